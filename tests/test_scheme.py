"""Schemes: what is derived, what is refused and how, and warm-ups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from torch import nn

import sparsewire as sw
from sparsewire.codecs import Float32, ValueCodec
from sparsewire.scheme import as_scheme

from .laws.cases import LAWFUL, examples


class NotLinear(Float32):
    """A codec whose messages cannot be added, though they are plain numbers."""

    linear = False


@pytest.mark.parametrize(
    ("text", "indices", "collective"),
    [
        ("TopK(0.01)", sw.EliasFano(), sw.AllGather()),
        ("TopK(count=5)", sw.EliasFano(), sw.AllGather()),
        ("TopK(0.25)", sw.EliasFano(), sw.AllGather()),
        ("TopK(0.26)", sw.Bitmap(), sw.AllGather()),
        ("TopK(1.0)", sw.Bitmap(), sw.AllGather()),
        ("TopK(5e-324)", sw.EliasFano(), sw.AllGather()),
        ("Threshold(0.01)", sw.EliasFano(), sw.AllGather()),
        ("Scheme(RandomK(0.01), values=TwoBit())", sw.Implied(), sw.AllGather()),
        ("RandomK(0.01)", sw.Implied(), sw.AllReduce()),
        ("RandomK(0.01, shared=False)", sw.Implied(), sw.AllGather()),
        ("BlockRandomK(0.01)", sw.Implied(), sw.AllGather()),
        ("TopBlock(0.01)", sw.Implied(), sw.AllReduce()),
        ("Scheme(TopBlock(0.01), values=TwoBit())", sw.Implied(), sw.AllGather()),
        ("LeaderTopK(0.01)", sw.EliasFano(), sw.AllReduce()),
        ("LeaderTopK(0.5)", sw.Bitmap(), sw.AllReduce()),
        ("UnionTopK(0.01)", sw.EliasFano(), sw.AllReduce()),
        ("UnionTopK(0.5)", sw.EliasFano(), sw.AllReduce()),
        ("Scheme(UnionTopK(0.01), values=TwoBit())", sw.EliasFano(), sw.AllGather()),
        ("Scheme(LeaderTopK(0.01), values=TwoBit())", sw.EliasFano(), sw.AllGather()),
        ("Scheme(LeaderTopK(0.01), indices=Int32())", sw.Int32(), sw.AllReduce()),
        ("BlockRandomK(0.01, shared=True)", sw.Implied(), sw.AllReduce()),
        ("Dense()", sw.Implied(), sw.AllReduce()),
        ("Scheme(RandomK(0.01), indices=Int32())", sw.Int32(), sw.AllGather()),
        ("Scheme(RandomK(0.01), values=Float16())", sw.Implied(), sw.AllReduce()),
    ],
)
def test_indices_and_collective_are_derived(text: str, indices: object, collective: object) -> None:
    scheme = sw.parse(text)
    assert isinstance(scheme, sw.Scheme)
    assert (scheme.indices, scheme.collective) == (indices, collective)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.2, 0.24, 0.25, 0.26, 0.3, 0.4, 0.5, 0.9])
def test_the_index_codec_is_the_smallest(ratio: float) -> None:
    scheme = sw.Scheme(sw.TopK(ratio))
    segments = scheme.partition({"w": (1000, 1000)})
    sizes = [codec.nbytes(segments) for codec in (sw.EliasFano(), sw.Bitmap(), sw.Int32())]
    assert scheme.indices.nbytes(segments) <= min(sizes) + 8


def test_values_that_cannot_be_added_are_gathered() -> None:
    scheme = sw.Scheme(sw.RandomK(0.01), values=NotLinear())
    assert scheme.collective == sw.AllGather()


def test_defaults() -> None:
    scheme = sw.Scheme(sw.TopK(0.01))
    assert scheme.values == sw.Float32()
    assert scheme.memory == sw.ErrorFeedback()
    assert (scheme.scope, scheme.dense_below, scheme.dense_1d) == ("layer", 1024, True)
    assert scheme.seed == 0


def test_every_combination_is_built_or_refused_with_a_remedy() -> None:
    built = 0
    for parts in itertools.product(
        *(examples(family) for family in ("selectors", "values", "indices", "collectives"))
    ):
        selector, values, indices, collective = parts
        try:
            sw.Scheme(selector, values=values, indices=indices, collective=collective)
            built += 1
        except sw.errors.SchemeError as refusal:
            text = str(refusal)
            assert "Write" in text or "Leave" in text, text
            reasons = (
                " does not work with ",
                " needs its indices sent",
                " has nothing to encode with ",
            )
            assert any(reason in text for reason in reasons), text
    assert built


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"selector": sw.TopK(0.01), "collective": sw.AllReduce()},
        "ranks pick different coordinates",
        "collective=AllGather(), or use TopBlock(…)",
    ),
    (
        {"selector": sw.BlockRandomK(0.01), "collective": sw.AllReduce()},
        "ranks pick different coordinates",
        "BlockRandomK(…, shared=True)",
    ),
    (
        {"selector": sw.RandomK(0.01), "values": NotLinear(), "collective": sw.AllReduce()},
        "its values cannot be summed in transit",
        "collective=AllGather(), or values=Float32()",
    ),
    (
        {"selector": sw.RandomK(0.01), "indices": sw.Int32(), "collective": sw.AllReduce()},
        "indices cannot be summed",
        "Leave indices out",
    ),
    (
        {"selector": sw.Dense(), "values": sw.OneBit()},
        "it quantizes selected values, and here everything is sent densely",
        "values=BFloat16()",
    ),
    (
        {"selector": sw.TopK(1.0), "values": sw.QSGD()},
        "it quantizes selected values, and here everything is sent densely",
        "a ratio below 1",
    ),
    (
        {"selector": sw.TopK(0.01), "indices": sw.Implied()},
        "they depend on the gradient",
        "Leave indices out, or write indices=EliasFano()",
    ),
    (
        {"selector": sw.LeaderTopK(0.01), "indices": sw.Implied()},
        "they depend on the gradient",
        "Leave indices out, or write indices=EliasFano()",
    ),
    (
        {"selector": sw.UnionTopK(0.01), "indices": sw.Implied()},
        "they depend on the gradient",
        "Leave indices out, or write indices=EliasFano()",
    ),
    (
        {"selector": sw.TopBlock(0.01), "indices": sw.EliasFano()},
        "has nothing to encode",
        "Leave indices out",
    ),
    (
        {"selector": sw.TopBlock(0.01), "collective": sw.Sharded()},
        "owners have nothing left to choose",
        "Leave collective out",
    ),
    (
        {"selector": sw.LeaderTopK(0.01), "collective": sw.Sharded(1.0)},
        "owners have nothing left to choose",
        "Leave collective out",
    ),
    (
        {"selector": sw.UnionTopK(0.01), "collective": sw.Sharded()},
        "owners have nothing left to choose",
        "Leave collective out",
    ),
    (
        {"selector": sw.TopBlock(0.01, block=64), "scope": 64},
        "nothing to choose",
        "Write a scope of several blocks, or a smaller block=",
    ),
    (
        {"selector": sw.TopK(0.01), "scope": "layers"},
        "not 'layers'",
        "must be 'layer', 'global', or the length of chunks such as 4096",
    ),
    ({"selector": sw.TopK(0.01), "scope": 0}, "scope must be", "'layer', 'global', or the length"),
    ({"selector": sw.TopK(0.01), "scope": -5}, "scope must be", "the length of chunks"),
    ({"selector": sw.TopK(0.01), "scope": 1.5}, "scope must be", "the length of chunks"),
    ({"selector": sw.TopK(0.01), "scope": True}, "scope must be", "the length of chunks"),
    ({"selector": sw.TopK(0.01), "scope": None}, "scope must be", "the length of chunks"),
    ({"selector": sw.TopK(0.01), "dense_below": -1}, "dense_below must be", "sent densely, or 0"),
    ({"selector": sw.TopK(0.01), "dense_below": 1.0}, "dense_below must be", "sent densely, or 0"),
    (
        {"selector": sw.TopK(0.01), "dense_below": False},
        "dense_below must be",
        "sent densely, or 0",
    ),
    ({"selector": sw.TopK(0.01), "dense_1d": 1}, "dense_1d must be True or False", "not 1"),
    ({"selector": sw.TopK(0.01), "seed": 1.0}, "seed must be", "a whole number"),
    ({"selector": sw.TopK(0.01), "seed": "x"}, "seed must be", "a whole number"),
    ({"selector": sw.TopK}, "first argument", "TopK(), Threshold(), RandomK()"),
    ({"selector": "TopK(0.01)"}, "first argument", "TopK(), Threshold(), RandomK()"),
    ({"selector": sw.Scheme(sw.TopK())}, "first argument", "TopK(), Threshold(), RandomK()"),
    (
        {"selector": sw.TopK(), "values": sw.Int32()},
        "values=",
        "Float32(), BFloat16(), Float16()",
    ),
    ({"selector": sw.TopK(), "values": None}, "values=", "Float32(), BFloat16(), Float16()"),
    ({"selector": sw.TopK(), "memory": None}, "memory=", "ErrorFeedback(), Momentum"),
    ({"selector": sw.TopK(), "indices": sw.TopK()}, "indices=", "Int32(), Implied()"),
    (
        {"selector": sw.TopK(), "collective": "x"},
        "collective=",
        "AllReduce(), Sharded()",
    ),
]


@pytest.mark.parametrize(("arguments", "reason", "remedy"), REFUSED)
def test_refusals_give_reason_and_remedy(
    arguments: dict[str, Any], reason: str, remedy: str
) -> None:
    with pytest.raises(sw.errors.SchemeError) as refusal:
        sw.Scheme(**arguments)
    assert reason in str(refusal.value)
    assert remedy in str(refusal.value)


def test_refusals_are_errors_of_value_too() -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        sw.TopK(2.0)


def test_scheme_is_the_same_at_all_steps() -> None:
    scheme = sw.Scheme(sw.TopK(0.01))
    assert scheme.at(0) is scheme.at(10**9) is scheme


def test_cut_uses_scope_and_whole() -> None:
    shapes = {"w": (10, 10), "b": (10,)}
    cut = sw.Scheme(sw.TopK(0.1), scope="global", dense_below=0, dense_1d=False).partition(shapes)
    assert [(segment.name, segment.length) for segment in cut.sparse] == [("*", 110)]
    assert sw.Scheme(sw.TopK(0.1)).partition(shapes).sparse == ()


@pytest.mark.parametrize(
    "given", [sw.TopK(0.1), "TopK(0.1)", sw.Scheme(sw.TopK(0.1)), "Scheme(TopK(0.1))"]
)
def test_as_scheme(given: object) -> None:
    assert as_scheme(given) == sw.Scheme(sw.TopK(0.1))


@pytest.mark.parametrize("given", [None, 0.01, sw.Float32(), sw.TopK])
def test_as_scheme_refuses_the_rest(given: object) -> None:
    with pytest.raises(
        sw.errors.SchemeError, match=r"is not a scheme. Pass a selector such as TopK"
    ):
        as_scheme(given)


def test_a_long_object_in_place_of_a_scheme_is_not_shown_in_full() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    with pytest.raises(sw.errors.SchemeError, match=r"^Sequential.* is not a scheme. Pass") as told:
        as_scheme(model)
    assert len(str(told.value)) < 150
    assert "\n" not in str(told.value)


class TestWarmup:
    """Dense for a while, or eased in."""

    def test_wraps_selectors_and_schemes(self) -> None:
        assert sw.Warmup(sw.TopK(0.1)) == sw.Warmup(sw.Scheme(sw.TopK(0.1)))
        assert (sw.Warmup(sw.TopK(0.1)).steps, sw.Warmup(sw.TopK(0.1)).ease) == (1000, False)

    def test_boundaries(self) -> None:
        scheme = sw.Scheme(sw.TopK(0.1))
        warmup = sw.Warmup(scheme, steps=10)
        assert [warmup.at(step).selector for step in (0, 9)] == [sw.Dense()] * 2
        assert warmup.at(10) is scheme
        assert warmup.at(10**9) is scheme

    def test_dense_part_keeps_what_it_can(self) -> None:
        scheme = sw.Scheme(
            sw.TopK(0.1),
            values=sw.BFloat16(),
            memory=sw.MomentumCorrection(0.5),
            scope="global",
            dense_below=7,
            seed=3,
        )
        warmup = sw.Warmup(scheme, steps=10)
        assert warmup.at(0) == replace(
            scheme, selector=sw.Dense(), indices=sw.Implied(), collective=sw.AllReduce()
        )
        assert (warmup.memory, warmup.scope) == (scheme.memory, scheme.scope)

    def test_dense_part_sends_plain_values_where_others_cannot_be_added(self) -> None:
        codec: ValueCodec = NotLinear()
        warmup = sw.Warmup(sw.Scheme(sw.TopK(0.1), values=codec), steps=10)
        assert warmup.at(0).values == sw.Float32()
        assert warmup.at(10).values is codec

    def test_a_ratio_for_the_first_steps(self) -> None:
        scheme = sw.Scheme(sw.TopK(0.01, min_count=5), values=sw.TwoBit(), scope="global")
        warmup = sw.Warmup(scheme, steps=10, ratio=0.2)
        assert warmup.at(0) == replace(scheme, selector=sw.TopK(0.2, min_count=5))
        assert warmup.at(9) == warmup.at(0)
        assert warmup.at(10) is scheme
        assert sw.parse(repr(warmup)) == warmup
        assert sw.Warmup(scheme, steps=10, ratio=1.0).at(9).selector == sw.Dense()

    def test_equal_ratios_have_one_identity(self) -> None:
        one, other = sw.Warmup(sw.TopK(0.1), ratio=1), sw.Warmup(sw.TopK(0.1), ratio=1.0)
        assert (one.identity, repr(one)) == (other.identity, repr(other))

    def test_a_ratio_leaves_other_identities_as_they_were(self) -> None:
        assert "ratio=None" not in sw.Warmup(sw.TopK(count=5)).identity.split("scheme=")[0]
        assert sw.Warmup(sw.TopK(0.1)).identity.endswith("steps=1000, ease=False)")
        assert sw.Warmup(sw.TopK(0.1), ratio=0.2).identity.endswith("ease=False, ratio=0.2)")

    @pytest.mark.parametrize(
        ("scheme", "options", "reason"),
        [
            (sw.TopK(0.1), {"ratio": 2.0}, "Warmup's ratio must be .* at most 1, not 2.0"),
            (sw.TopK(0.1), {"ratio": 0.0}, "above 0"),
            (sw.TopK(0.1), {"ratio": float("nan")}, "above 0"),
            (sw.TopK(0.1), {"ratio": "0.04"}, "must be a number"),
            (sw.TopK(0.1), {"ratio": True}, "must be a number"),
            (sw.TopK(0.1), {"ratio": 0.2, "ease": True}, "ease or a ratio, not both"),
            (sw.Dense(), {"ratio": 0.2}, "replaces that of a selector"),
            (sw.TopK(count=5), {"ratio": 0.2}, "replaces that of a selector"),
        ],
    )
    def test_ratios_that_are_refused(
        self, scheme: Any, options: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(sw.errors.SchemeError, match=reason):
            sw.Warmup(scheme, **options)

    @pytest.mark.parametrize("steps", [1, 2, 1000])
    def test_ease_formula(self, steps: int) -> None:
        """At step t the share R^(steps/(1+t)) is dropped."""
        warmup = sw.Warmup(sw.TopK(0.01), steps=steps, ease=True)
        for step in {0, steps // 2, steps - 1}:
            selector = warmup.at(step).selector
            assert isinstance(selector, sw.TopK)
            dropped = 0.99 ** (steps / (1 + step))
            assert selector.ratio == pytest.approx(1 - dropped, rel=1e-12)
        assert warmup.at(steps).selector == sw.TopK(0.01)

    @given(st.floats(1e-9, 1.0), st.integers(1, 3000))
    @LAWFUL
    def test_eased_ratio_falls_to_the_target(self, ratio: float, steps: int) -> None:
        warmup = sw.Warmup(sw.RandomK(ratio), steps=steps, ease=True)
        ratios = [
            warmup.at(step).selector.ratio  # type: ignore[attr-defined]
            for step in sorted({0, steps // 3, steps - 1, steps})
        ]
        assert all(now * (1 + 1e-6) >= later for now, later in itertools.pairwise(ratios))
        assert ratios[-2] == pytest.approx(ratio, rel=1e-6)

    def test_eased_scheme_keeps_all_else(self) -> None:
        scheme = sw.Scheme(
            sw.RandomK(0.1, shared=True),
            values=sw.Float16(),
            collective=sw.AllGather(),
            memory=sw.MomentumCorrection(0.5),
            scope=100,
            dense_below=7,
            seed=3,
        )
        eased = sw.Warmup(scheme, steps=10, ease=True).at(3)
        assert eased.selector != scheme.selector
        assert replace(eased, selector=scheme.selector) == scheme

    def test_quantized_values_are_eased_in_from_a_dense_start(self) -> None:
        """So near to 1 that floats cannot tell, nothing is selected that could be quantized."""
        warmup = sw.Warmup(sw.Scheme(sw.TopK(0.01), values=sw.TwoBit()), steps=10**5, ease=True)
        assert warmup.at(0).selector == sw.Dense()
        assert warmup.at(10**5 - 1).values == sw.TwoBit()

    def test_tiny_ratios_can_be_eased_in(self) -> None:
        assert sw.Warmup(sw.TopK(1e-17), steps=10, ease=True).at(5)

    @pytest.mark.parametrize("steps", [0, -1, 1.5, True, "many"])
    def test_steps_must_be_a_number(self, steps: object) -> None:
        with pytest.raises(sw.errors.SchemeError, match="whole number of at least 1"):
            sw.Warmup(sw.TopK(0.1), steps=steps)  # type: ignore[arg-type]

    @pytest.mark.parametrize("inner", [None, "TopK(0.1)", sw.Warmup(sw.TopK(0.1)), sw.TopK])
    def test_wraps_nothing_else(self, inner: object) -> None:
        with pytest.raises(sw.errors.SchemeError, match=r"Warmup\(TopK\(0\.01\), steps=1000\)"):
            sw.Warmup(inner)  # type: ignore[arg-type]

    @pytest.mark.parametrize("selector", [sw.Dense(), sw.TopK(count=5)], ids=repr)
    def test_without_a_ratio_nothing_can_be_eased_in(self, selector: Any) -> None:
        with pytest.raises(
            sw.errors.SchemeError, match=r"since it has none\. Write a ratio such as"
        ):
            sw.Warmup(selector, ease=True)
        assert sw.Warmup(selector).at(0).selector == sw.Dense()


def test_families_name_every_part_once() -> None:
    kinds = [kind for family in sw.scheme.FAMILIES.values() for kind in family]
    assert len(kinds) == len(set(kinds)) == len({kind.__name__ for kind in kinds})
    assert all(kind.__doc__ for kind in kinds)
