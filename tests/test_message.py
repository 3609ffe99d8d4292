"""The wire format: headers, who is odd one out, and bytes that are not ours."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sparsewire as sw
from sparsewire.message import (
    HEADER_BYTES,
    VERSION,
    Header,
    compare,
    fingerprint,
    layout_fingerprint,
    local_difference,
)
from sparsewire.segments import Segments

from .laws.cases import LAWFUL

HEADER = Header(rank=0, step=7, bucket=2, scheme=11, layout=22, length=33)
word = st.integers(0, 2**64 - 1)


def said(*changes: dict[str, int]) -> list[Header]:
    """Headers of as many ranks, each with its own differences."""
    return [replace(HEADER, rank=rank, **change) for rank, change in enumerate(changes)]


@given(
    st.builds(
        Header,
        rank=st.integers(0, 2**32 - 1),
        step=st.integers(-1, 2**63 - 1),
        bucket=word,
        scheme=word,
        layout=word,
        length=word,
        version=st.integers(0, 2**16 - 1),
        odd_local=st.integers(0, 2**32 - 1),
    )
)
@LAWFUL
def test_header_comes_back_as_it_was(header: Header) -> None:
    data = header.pack()
    assert (data.dtype, data.numel()) == (torch.uint8, HEADER_BYTES)
    assert Header.unpack(data, header.rank) == header


def test_header_is_laid_out_as_ever() -> None:
    """Pinned: another layout must come with another version."""
    data = replace(HEADER, rank=258).pack().numpy().tobytes()
    assert VERSION == 6
    assert data.hex() == (
        "53505752" "0600" "0000" "02010000" "00000000" "0700000000000000"
        "0200000000000000" "0b00000000000000" "1600000000000000" "2100000000000000"
        "944580102cdf88d1"
    )  # fmt: skip


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_foreign_bytes_are_refused(place: int) -> None:
    data = HEADER.pack()
    data[place] ^= 1
    with pytest.raises(
        sw.errors.ExchangeError, match=r"from rank 0 is no header .* another program .* is broken"
    ) as refusal:
        Header.unpack(data, 0)
    assert not refusal.value.is_agreed


def test_header_of_another_rank_is_refused() -> None:
    with pytest.raises(sw.errors.ExchangeError, match="from rank 1 is no header"):
        Header.unpack(HEADER.pack(), 1)


def test_same_words_pass_whatever_their_rank() -> None:
    headers = said({}, {}, {})
    for own in headers:
        compare(headers, own, "TopK(0.01)")


@pytest.mark.parametrize(
    ("name", "words", "detail"),
    [
        ("version", "the version of sparsewire's wire format", "(99 instead of 6)"),
        ("scheme", "the scheme,", ""),
        ("layout", "names, order, shapes or types,", ""),
        ("step", "the step", "(99 instead of 7)"),
        ("bucket", "which bucket comes next", "(99 instead of 2)"),
        ("length", "the length of the message", "(99 instead of 33)"),
    ],
)
def test_odd_rank_is_named_with_the_reason(name: str, words: str, detail: str) -> None:
    headers = said({}, {}, {name: 99}, {})
    texts = set()
    for own in headers:
        with pytest.raises(sw.errors.DisagreementError) as refusal:
            compare(headers, own, "TopK(0.01)")
        text = str(refusal.value)
        assert text.startswith("rank 2 of 4 disagrees with the others on ")
        assert words in text
        assert detail in text
        assert f"this is rank {own.rank} with TopK(0.01)" in text
        assert "same code, model and scheme" in text
        texts.add(text.split(", at step")[0])
    assert len(texts) == 1  # all ranks say the same


@pytest.mark.parametrize("change", [{"step": 8}, {"bucket": 0}, {"layout": 1}], ids=str)
def test_odd_rank_of_a_machine_is_named_to_all(change: dict[str, int]) -> None:
    assert local_difference(said({}, {}, {})) == 0
    odd_local = local_difference(said({}, {}, change))
    headers = said({}, {"odd_local": odd_local}, {})
    assert Header.unpack(headers[1].pack(), 1) == headers[1]
    for own in headers:
        words = "^rank 2 of machine 1 disagrees with the others of its"
        with pytest.raises(sw.errors.DisagreementError, match=words):
            compare(headers, own, "TopK(0.01)")


def test_several_odd_ranks_are_named() -> None:
    headers = said({"step": 8}, {}, {}, {"step": 9}, {})
    with pytest.raises(sw.errors.DisagreementError, match=r"^ranks 0, 3 of 5 disagree with"):
        compare(headers, headers[0], "TopK(0.01)")


def test_first_difference_is_the_reason() -> None:
    """Another scheme has other lengths too; it is the scheme that should be named."""
    headers = said({}, {}, {"scheme": 1, "length": 2})
    with pytest.raises(sw.errors.DisagreementError, match="others on the scheme, "):
        compare(headers, headers[0], "TopK(0.01)")


def test_fingerprints_differ_with_every_text() -> None:
    prints = [
        fingerprint("a", "b"),
        fingerprint("b", "a"),
        fingerprint("ab"),
        fingerprint("a", "b", ""),
        fingerprint("a", "c"),
        fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    assert all(0 <= one < 2**64 for one in prints)
    assert fingerprint("a", "b") == prints[0]


def test_layouts_differ_by_name_order_shape_and_type() -> None:
    def printed(
        shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, ratio: float = 0.1
    ) -> int:
        return layout_fingerprint(
            Segments.partition(shapes, sw.TopK(ratio), dense_below=0, dense_1d=False), dtype
        )

    base = printed({"a": (2, 3), "b": (4,)})
    others = [
        printed({"b": (4,), "a": (2, 3)}),
        printed({"a": (3, 2), "b": (4,)}),
        printed({"a": (2, 3), "c": (4,)}),
        printed({"a": (2, 3), "b": (4,)}, torch.float64),
        printed({"a": (2, 3)}),
    ]
    assert len({base, *others}) == 6
    assert printed({"a": (2, 3), "b": (4,)}, ratio=0.5) == base  # that is the scheme's business
