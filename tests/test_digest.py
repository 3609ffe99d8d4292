"""Saved state is what was saved: any change is found, and what a file does to it is none."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsewire as sw
from sparsewire.digest import FORMAT, digest, seal, verify

from .laws.cases import Crew, noise


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    crew = Crew(sw.Scheme(sw.TopK(0.1), dense_below=64, memory=sw.MomentumCorrection()), 2)
    for step in range(2):
        crew.exchange(noise(2, crew.size, step))
    return {
        **crew.sessions[1].state_dict(),
        "rates": {"a": 0.1, "b": 1e-5},
        "odd": torch.randn(3, 3, 3, generator=generator).bfloat16(),
        "bytes": torch.arange(13, dtype=torch.uint8),
        "outer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99), "on": True}], 0: {"step": None}},
    }


def through_a_file(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_a_file_changes_nothing() -> None:
    state = seal(make_state())
    verify(state)
    verify(read(through_a_file(state)))
    verify(copy.deepcopy(state))
    verify(seal(state))
    assert state["format"] == FORMAT
    assert len(state["digest"]) == 32


def test_how_it_lies_in_memory_does_not_count() -> None:
    state = make_state()
    turned = {key: state[key] for key in reversed(state)}
    turned["outer"] = {0: {"step": None}, "groups": ({**state["outer"]["groups"][0]},)}
    turned["odd"] = torch.stack([state["odd"]] * 2, dim=-1)[..., 1]
    turned["bytes"] = torch.cat([torch.zeros(3, dtype=torch.uint8), state["bytes"]])[3:]
    assert digest(turned) == digest(state)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_never_loaded_as_another_number(seed: int) -> None:
    """Bits of a file that hold no numbers may be lost on torch.load, which notices or not."""
    state = seal(make_state())
    content, dice, found = through_a_file(state), random.Random(seed), 0
    for _ in range(100):
        place = dice.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        try:
            loaded = read(bytes(damaged))
        except Exception:
            continue
        try:
            verify(loaded)
        except sw.errors.StateError:
            found += 1
        else:
            assert same(loaded, state)
    assert found > 10


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state = seal(make_state())
    change(state)
    return state


def swap(state: dict[str, Any]) -> None:
    kept = state["memory"]["matrix"]
    kept["residual"], kept["velocity"] = kept["velocity"], kept["residual"]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step=1),
        lambda state: state.update(rank=True),
        lambda state: state.update(more=None),
        lambda state: state.pop("rates"),
        lambda state: state.pop("digest"),
        lambda state: state["rates"].update(a=0.1000001),
        lambda state: state["rates"].update(b=1),
        lambda state: state["outer"]["groups"][0].update(betas=(0.99, 0.9)),
        lambda state: state["outer"]["groups"][0].update(on=1),
        lambda state: state["outer"].update({"0": state["outer"].pop(0)}),
        lambda state: state["bytes"][-1].add_(1),
        lambda state: state["odd"][2, 2, 2].add_(1),
        lambda state: state["memory"]["scalar"]["residual"].add_(1),
        lambda state: state["memory"].update(nothing={"residual": torch.zeros(5, 0)}),
        lambda state: state.update(odd=state["odd"].float()),
        lambda state: state.update(odd=state["odd"].view(torch.int16)),
        lambda state: state.update(odd=state["odd"].view(9, 3)),
        lambda state: state.update(odd=state["odd"].to("meta")),
        lambda state: state.update(odd=state["odd"].to_sparse()),
        swap,
    ],
)
def test_any_change_is_found(change: Any) -> None:
    with pytest.raises(sw.errors.StateError, match=r"digest does not match.*older checkpoint"):
        verify(changed(change))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (3, "not the state of a sparsewire exchange"),
        ([], "not the state of a sparsewire exchange"),
        ({"step": 1}, "not the state of a sparsewire exchange"),
        ({"format": 2}, f"has format 2, and this version of sparsewire reads {FORMAT}"),
    ],
)
def test_what_was_never_sealed_is_refused(state: Any, reason: str) -> None:
    with pytest.raises(sw.errors.StateError, match=reason):
        verify(state)
