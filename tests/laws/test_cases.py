"""The table of examples is complete, and the schemes made of it reach every part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

import sparsewire as sw
from sparsewire.selectors import Coordination

from .cases import EXAMPLES, SAMPLE, SCHEMES, SHAPES, examples, way

FAMILIES = [family for family in sw.scheme.FAMILIES if family != "scheme"]
KINDS = [kind for family in FAMILIES for kind in sw.scheme.FAMILIES[family]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_with_arguments_has_examples(kind: type) -> None:
    if fields(kind):
        assert EXAMPLES[kind]
        assert all(type(one) is kind for one in EXAMPLES[kind])


def test_table_names_no_part_that_is_gone() -> None:
    assert set(EXAMPLES) <= set(KINDS)


@pytest.mark.parametrize("family", ["selectors", "values", "indices", "collectives"])
def test_schemes_reach_every_example(family: str) -> None:
    field = {"selectors": "selector", "collectives": "collective"}.get(family, family)
    assert {getattr(scheme, field) for scheme in SCHEMES} == set(examples(family))


def test_schemes_select_from_some_tensors_and_send_others_whole() -> None:
    for scheme in SCHEMES:
        segments = scheme.partition(SHAPES)
        assert segments.dense
        assert bool(segments.sparse) is (scheme.selector != sw.Dense())


def test_every_selector_meets_every_index_codec_that_it_goes_with() -> None:
    met = {(scheme.selector, scheme.indices) for scheme in SCHEMES}
    for selector in examples("selectors"):
        for indices in examples("indices"):
            goes = indices.written or selector.coordination.is_seeded
            if selector.coordination is Coordination.NEGOTIATED:
                goes = indices.written is (selector.proposers != "none")
            assert ((selector, indices) in met) is goes


def test_sample_pairs_every_way_with_every_codec_and_scope() -> None:
    def pairs(schemes: Sequence[sw.Scheme]) -> set[tuple[object, ...]]:
        codecs = {(way(scheme), scheme.values) for scheme in schemes}
        return codecs | {(way(scheme), scheme.scope) for scheme in schemes}

    assert pairs(SAMPLE) == pairs(SCHEMES)
    assert {(s.values, s.scope) for s in SAMPLE} == {(s.values, s.scope) for s in SCHEMES}
    assert len(SAMPLE) <= 0.6 * len(SCHEMES)
