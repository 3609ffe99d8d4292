"""Both translators see what they should and nothing else, and learn."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.nn import functional

from papers.tasks.translation import BEGIN, END, NO_LABEL, PAD
from papers.tasks.translators import Translator, build, translate

MODELS: list[Literal["rnn", "transformer"]] = ["rnn", "transformer"]
every_model = pytest.mark.parametrize(
    ("model", "normalised"), [(m, n) for m in MODELS for n in (False, True)]
)


def made(model: Literal["rnn", "transformer"], normalised: bool) -> Translator:
    return build(model, 20, 16, 2, normalised, seed=3)


def pairs(*rows: tuple[list[int], list[int]]) -> torch.Tensor:
    return torch.tensor([[source, target] for source, target in rows])


@every_model
def test_the_same_for_the_same_seed(model: Literal["rnn", "transformer"], normalised: bool) -> None:
    before = torch.get_rng_state()
    one, other = made(model, normalised), made(model, normalised)
    assert torch.equal(before, torch.get_rng_state())
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name
    norms = [part for part in one.modules() if isinstance(part, torch.nn.LayerNorm)]
    assert bool(norms) == normalised


@every_model
@torch.no_grad()
def test_nothing_is_known_of_words_to_come(
    model: Literal["rnn", "transformer"], normalised: bool
) -> None:
    source = [5, 6, END, PAD]
    one, other = made(model, normalised)(
        pairs((source, [BEGIN, 7, 8, 9]), (source, [BEGIN, 7, 10, 11]))
    )
    torch.testing.assert_close(one[:2], other[:2])
    assert not torch.allclose(one[2], other[2])


@every_model
@torch.no_grad()
def test_the_source_is_seen(model: Literal["rnn", "transformer"], normalised: bool) -> None:
    target = [BEGIN, 7, 8, 9]
    one, other = made(model, normalised)(
        pairs(([5, 6, END, PAD], target), ([5, 9, END, PAD], target))
    )
    assert not torch.allclose(one[0], other[0])


@torch.no_grad()
def test_a_transformer_does_not_see_padding() -> None:
    model, target = made("transformer", True), [BEGIN, 7]
    long = model.decode(
        model.encode(torch.tensor([[5, END, PAD, PAD]])),
        torch.tensor([[True, True, False, False]]),
        torch.tensor([target]),
    )
    short = model.decode(
        model.encode(torch.tensor([[5, END]])), torch.tensor([[True, True]]), torch.tensor([target])
    )
    torch.testing.assert_close(long, short)


@every_model
def test_learns_to_copy_backwards(model: Literal["rnn", "transformer"], normalised: bool) -> None:
    """Every parameter gets a gradient, and greedy translation says what was learnt."""
    net = build(model, 12, 32, 1, normalised, seed=0)
    sources = torch.tensor([[4, 5, 6, END], [7, 8, END, PAD], [9, 10, 11, END], [6, END, PAD, PAD]])
    targets = torch.tensor(
        [
            [BEGIN, 6, 5, 4, END],
            [BEGIN, 8, 7, END, PAD],
            [BEGIN, 11, 10, 9, END],
            [BEGIN, 6, END, PAD, PAD],
        ]
    )
    labels = torch.where(targets[:, 1:] == PAD, NO_LABEL, targets[:, 1:])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        answers = net(torch.stack([sources, targets[:, :-1]], dim=1))
        loss = functional.cross_entropy(answers.flatten(0, 1), labels.flatten())
        loss.backward()
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
    assert torch.equal(translate(net.eval(), sources), targets[:, 1:])


@every_model
def test_works_under_autocast(model: Literal["rnn", "transformer"], normalised: bool) -> None:
    net, labels = made(model, normalised), torch.tensor([7, 8, 9, END])
    batch = pairs(([5, 6, END, PAD], [BEGIN, 7, 8, 9]))
    exact = functional.cross_entropy(net(batch).flatten(0, 1), labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(net(batch).flatten(0, 1), labels)
    found = torch.autograd.grad(loss, list(net.parameters()))
    assert all(gradient.dtype == torch.float32 for gradient in found)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
