"""The kernels for CPUs say what the reference says, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from sparsewire.kernels import Kernels, reference
from sparsewire.segments import Segments
from sparsewire.workspace import Workspace

from . import agreement

pytest.importorskip("numba")
from sparsewire.kernels import cpu as module
from sparsewire.kernels.cpu import extract, jit, sums

cpu: Kernels = module
CPU = torch.device("cpu")
FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=[1, 2, 5], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many threads, for however little work."""
    monkeypatch.setattr(jit, "SHARED_OUT", 16)
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(usual)


@pytest.mark.parametrize("check", agreement.CHECKS, ids=lambda check: check.__name__[6:])
def test_agreement(check: agreement.Check) -> None:
    check(cpu, CPU, 700)


@pytest.mark.parametrize("check", agreement.WITHDRAWALS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_agreement_of_threads_past_the_cache(
    check: agreement.Check, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "LARGE", 0)
    check(cpu, CPU, 300)


def test_agreement_of_threads_on_blocks(threads: int) -> None:
    agreement.check_blocks(cpu, CPU, 2000)


@pytest.mark.parametrize("past_cache", [False, True])
def test_agreement_of_threads_when_adding_up(
    threads: int, past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "_LARGE", 0 if past_cache else 1 << 62)
    agreement.check_add_up(cpu, CPU, 5000)
    agreement.check_add_up(cpu, CPU, 9001)  # neither blocks nor stripes come out even


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("scope", ["global", "layer", 1000])
def test_many_tiles(
    scope: agreement.Scope, past_cache: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of several tiles, cut between threads, with candidates beyond their room."""
    if past_cache:
        monkeypatch.setattr(extract, "LARGE", 0)
    segments = agreement.partition([(150, 333), (11,), (70_001, 1)], 0.01, scope, 100, slack=0.25)
    courses = agreement.courses(segments.size)
    for name in ("a thousand times smaller", "to and fro", "through ties"):
        exact = agreement.Pair(cpu, CPU, segments, f"top_k, {name}")
        rough = agreement.Pair(cpu, CPU, segments, f"over_threshold, {name}")
        for addend in courses[name]:
            exact.step(addend, lambda k, b, x, a, w: k.top_k(b, x, a, segments, w))
            rough.step(addend, lambda k, b, x, a, w: k.over_threshold(b, x, a, segments, 500, 3, w))
        exact.compare()
        rough.compare()


@given(st.data())
@FEW
def test_any_small_row(data: st.DataObject) -> None:
    numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40])
    rows = data.draw(st.lists(st.lists(numbers, min_size=30, max_size=30), min_size=1, max_size=4))
    scope = data.draw(st.sampled_from(["layer", "global", 7]))
    ratio = data.draw(st.sampled_from([0.05, 0.3, 0.8]))
    segments = agreement.partition([(4, 5), (3,), (7, 1)], ratio, scope, 4, slack=0.25)
    key = data.draw(st.integers(0, 2**64 - 1))
    for call in (
        lambda k, b, x, a, w: k.top_k(b, x, a, segments, w),
        lambda k, b, x, a, w: k.over_threshold(b, x, a, segments, 8, key, w),
        lambda k, b, x, a, w: k.chosen(b, x, a, segments, k.random_k(segments, key, CPU, w), w),
    ):
        pair = agreement.Pair(cpu, CPU, segments, "a small row")
        for row in rows:
            pair.step(torch.tensor(row), call)
        pair.compare()


@given(st.binary(max_size=70), st.integers(0, 200), st.integers(1, 20))
@FEW
def test_any_bytes(content: bytes, count: int, width: int) -> None:
    """Whatever arrives is read without leaving its memory."""
    data = torch.tensor(list(content), dtype=torch.uint8)
    assert torch.equal(cpu.find_flags(data, count), reference.find_flags(data, count))
    fits = data.numel() // width * 8
    assert torch.equal(cpu.unpack(data, fits, width), reference.unpack(data, fits, width))
    with pytest.raises(ValueError, match="too few"):
        cpu.unpack(data, fits + 1, width)
    if fits:
        segments = agreement.partition([(4 * fits,)], 0.25)
        ours, theirs = (k.read_ascending(data, width, segments) for k in (reference, cpu))
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="too few"):
        cpu.read_ascending(data, width, agreement.partition([(4 * fits + 4,)], 0.25))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), st.integers(1, 40))
@FEW
def test_any_integers(numbers: list[int], width: int) -> None:
    values = torch.tensor(numbers, dtype=torch.int64)
    assert torch.equal(cpu.pack(values, width), reference.pack(values, width))
    assert torch.equal(cpu.is_ascending(values, width), reference.is_ascending(values, width))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
@FEW
def test_any_indices_are_added_up_inside_the_gradient(numbers: list[int]) -> None:
    """Indices are checked before; still, wrong ones must not write elsewhere."""
    segments = agreement.partition([(50,), (3,)], 0.5, dense_below=4)
    guarded = torch.zeros(segments.size + 200)
    flat = guarded[100 : 100 + segments.size]
    indices = torch.tensor(numbers, dtype=torch.int64)
    values = torch.ones(len(numbers) + segments.dense_size)
    cpu.add_up(flat, [(indices, values)], 1.0, segments, Workspace())
    cpu.put_back(flat, indices, values, segments, Workspace())
    assert not guarded[:100].any()
    assert not guarded[100 + segments.size :].any()


class TestPredictor:
    """What a study of it reads."""

    @staticmethod
    def tally(segments: Segments, rows: list[torch.Tensor]) -> list[int]:
        """Hits and misses."""
        work = Workspace()
        before, after = torch.zeros(segments.size + 1), torch.zeros(segments.size + 1)
        for row in rows:
            cpu.top_k(before, row, after, segments, work)
            before, after = after, before
        tally: list[int] = extract.plan_of(segments, "counts", work).tally.tolist()
        return tally

    def test_hits_and_misses_are_counted(self) -> None:
        segments = agreement.partition([(90, 100), (100, 90)], 0.01)
        rows = [agreement.normal(segments.size, seed) for seed in range(3)]
        hits, misses = self.tally(segments, [*rows, -1000 * rows[0], 1000 * rows[0]])
        assert hits + misses == 2 * 4
        assert hits >= 4

    def test_first_floor_is_no_prediction(self) -> None:
        segments = agreement.partition([(90, 100)], 0.01)
        assert self.tally(segments, [agreement.normal(segments.size)]) == [0, 0]


def test_other_numbers_are_left_to_the_reference() -> None:
    segments = agreement.partition([(40, 5)], 0.1)
    addend = agreement.normal(segments.size).double()
    after = torch.zeros(segments.size + 1, dtype=torch.float64)
    selection = cpu.top_k(None, addend, after, segments, Workspace())
    assert selection.values.dtype == torch.float64
    expected = reference.top_k(None, addend, torch.zeros_like(after), segments, Workspace())
    assert torch.equal(selection.indices, expected.indices)
