"""`parse(repr(x)) == x`, for every part and for schemes put together at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

import sparsewire as sw
from sparsewire.codecs import Place, ValueCodec
from sparsewire.notation import read
from sparsewire.scheme import AnyScheme
from sparsewire.segments import Segments
from sparsewire.workspace import Workspace

from .cases import LAWFUL, examples, is_cast, label

NAMES = {kind.__name__: kind for family in sw.scheme.FAMILIES.values() for kind in family}
PARTS = [part for family in sw.scheme.FAMILIES if family != "scheme" for part in examples(family)]

ratios = st.floats(0, 1, exclude_min=True)
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "block": st.integers(1, 10**9),
    "sample": st.integers(100, 10**9),
    "shared": st.booleans(),
    "momentum": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "nesterov": st.booleans(),
    "masking": st.booleans(),
    "clip": st.none() | st.floats(1e-9, 1e9),
    "centre": st.sampled_from(["threshold", "column", "global"]),
    "bits": st.integers(2, 16),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "bucket": st.integers(1, 10**9),
    "decay": st.floats(0, 1, exclude_min=True),
    "pull_ratio": st.none() | ratios,
}
SIZES = st.fixed_dictionaries(
    {"ratio": ratios}, optional={"min_count": st.integers(1, 10**9)}
) | st.fixed_dictionaries({"count": st.integers(1, 10**9)})


def parts(family: str) -> st.SearchStrategy[Any]:
    """Parts of a family with arguments at random, those that are left out included."""
    return st.one_of([part(kind) for kind in sw.scheme.FAMILIES[family]])


@st.composite
def part(draw: st.DrawFn, kind: type) -> Any:
    names = [field.name for field in fields(kind)]
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    arguments = {name: draw(ARGUMENTS[name]) for name in chosen if name in ARGUMENTS}
    return kind(**arguments, **(draw(SIZES) if "ratio" in chosen else {}))


@st.composite
def schemes(draw: st.DrawFn) -> sw.Scheme:
    arguments = {
        "values": parts("values"),
        "indices": parts("indices"),
        "memory": parts("memory"),
        "collective": parts("collectives"),
        "scope": st.sampled_from(["layer", "global"]) | st.integers(1, 10**6),
        "dense_below": st.integers(0, 10**6),
        "dense_1d": st.booleans(),
        "seed": st.integers(-(2**62), 2**62),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(arguments)), unique=True))
    try:
        return sw.Scheme(draw(parts("selectors")), **{n: draw(arguments[n]) for n in chosen})
    except sw.errors.SchemeError:
        assume(False)
        raise


def test_every_argument_of_every_part_is_tried() -> None:
    selection = {field.name for part in PARTS for field in fields(part)}
    assert selection == {*ARGUMENTS, "ratio", "count", "min_count"}


@pytest.mark.parametrize("one", PARTS, ids=label)
def test_parts(one: Any) -> None:
    again = read(repr(one), NAMES)
    assert (type(again), again) == (type(one), one)


@given(scheme=schemes())
@LAWFUL
def test_schemes(scheme: sw.Scheme) -> None:
    again = sw.parse(repr(scheme))
    assert again == scheme
    assert repr(again) == repr(scheme)
    assert hash(again) == hash(scheme)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sw.Scheme(sw.TopK(0.1), seed=2**64),
        lambda: sw.Scheme(sw.TopK(0.1), dense_below=2**64),
        lambda: sw.Scheme(sw.TopK(0.1), scope=2**64),
        lambda: sw.Scheme(sw.TopK(count=2**64)),
        lambda: sw.Scheme(sw.TopK(0.1), memory=sw.MomentumCorrection(clip=1e19)),
        lambda: sw.Warmup(sw.TopK(0.1), steps=2**64),
    ],
    ids=["seed", "dense_below", "scope", "count", "clip", "steps"],
)
def test_huge_numbers_are_read_back_or_refused(make: Callable[[], AnyScheme]) -> None:
    try:
        scheme = make()
    except sw.errors.SchemeError:
        return
    assert sw.parse(repr(scheme)) == scheme


@given(scheme=schemes(), steps=st.integers(1, 10**9), ease=st.booleans())
@LAWFUL
def test_warm_ups(scheme: sw.Scheme, steps: int, ease: bool) -> None:
    has_ratio = getattr(scheme.selector, "ratio", None) is not None
    warmup = sw.Warmup(scheme, steps=steps, ease=ease and has_ratio)
    assert sw.parse(repr(warmup)) == warmup


@given(scheme=schemes())
@LAWFUL
def test_text_is_python_source(scheme: sw.Scheme) -> None:
    assert eval(repr(scheme), dict(NAMES)) == scheme


@given(scheme=schemes())
@LAWFUL
def test_text_is_one_line_without_what_goes_without_saying(scheme: sw.Scheme) -> None:
    text = repr(scheme)
    assert "\n" not in text
    assert len(text) < 300
    assert "Float32()" not in text
    assert "ErrorFeedback()" not in text
    assert "scope='layer'" not in text
    assert ("seed" in text) is (scheme.seed != 0)
    # leaving out what is derived gives the same scheme
    bare = sw.Scheme(
        scheme.selector,
        values=scheme.values,
        memory=scheme.memory,
        scope=scheme.scope,
        dense_below=scheme.dense_below,
        dense_1d=scheme.dense_1d,
        seed=scheme.seed,
    )
    assert ("indices=" in text) is (scheme.indices != bare.indices)


bits = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=0, max_size=20)


@pytest.mark.parametrize("codec", examples("values"), ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=bits)
@LAWFUL
def test_value_codecs(codec: ValueCodec, dtype: torch.dtype, numbers: list[float]) -> None:
    """Exact where claimed; never infinite, never of the wrong sign; casts are the nearest."""
    values = torch.tensor(numbers, dtype=dtype)
    count = values.numel()
    segments = Segments.partition(
        {"x": (count + 1,)}, sw.TopK(count=max(1, count)), dense_below=0, dense_1d=False
    )
    place = Place(torch.arange(segments.capacity), segments, 5, Workspace())
    values = torch.cat([values, values.new_zeros(segments.capacity - count)])
    again = codec.decode(codec.encode(values, place), place, dtype)
    assert again.dtype == dtype
    assert again.isfinite().all()
    assert (again * values.sign() >= 0).all()
    if codec.exact(dtype):
        assert torch.equal(again, values)
    if not is_cast(codec):
        return
    limit = torch.finfo(codec.dtype)
    nearest = values.clamp(limit.min, limit.max)
    slack = limit.eps / 2 * nearest.abs() + limit.smallest_normal * limit.eps
    assert ((again - nearest).abs() <= slack).all()
    # writing again what was read changes nothing more
    assert torch.equal(codec.decode(codec.encode(again, place), place, dtype), again)
