"""What the kernels mean, against the most obvious way to say it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import sparsewire as sw
from sparsewire.kernels import reference as kernels
from sparsewire.segments import Segments
from sparsewire.workspace import Workspace

from ..laws.cases import LAWFUL, alone

WORK = Workspace()
few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-40])


def top_by_sorting(residual: Tensor, segments: Segments) -> list[int]:
    """Largest magnitudes first, equal ones from the lowest position up."""
    chosen: list[int] = []
    for segment in segments.sparse:
        places = range(segment.start, segment.start + segment.length)
        best = sorted(places, key=lambda place: (-abs(float(residual[place])), place))
        chosen += sorted(best[: segment.count])
    return chosen


def with_spare_slot(values: Tensor) -> Tensor:
    return torch.cat([values, torch.zeros(1)])


def top_k(values: Tensor, segments: Segments) -> Tensor:
    """What is chosen from these values."""
    return kernels.top_k(None, values, with_spare_slot(values), segments, WORK).indices


@given(
    st.lists(few_values | st.floats(-5, 5, width=32), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from(["layer", "global", 7]),
)
@LAWFUL
def test_top_k_is_what_sorting_says(row: list[float], count: int, scope: Any) -> None:
    segments = alone(sw.TopK(count=count), len(row), scope)
    residual = with_spare_slot(torch.tensor(row, dtype=torch.float32))
    assert top_k(residual[:-1], segments).tolist() == top_by_sorting(residual, segments)


def hard_for_a_sample(length: int) -> dict[str, Tensor]:
    """Long vectors whose strided sample misleads about the rest."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(length, generator=generator)
    seen = torch.zeros(length, dtype=torch.bool)
    seen[:: max(4, length >> 14)] = True
    sparse = torch.zeros(length)
    sparse[5::1000] = normal[5::1000]
    return {
        "normal": normal,
        "the sample sees only large ones": torch.where(seen, 100 + normal, normal),
        "the sample sees only small ones": torch.where(seen, normal, 100 + normal),
        "all equal": torch.ones(length),
        "two magnitudes": torch.where(normal > 2, 1.0, 0.5),
        "zeros": torch.zeros(length),
        "almost all zeros": sparse,
        "ascending": torch.arange(length).float(),
    }


@pytest.mark.parametrize("name", hard_for_a_sample(5000))
@pytest.mark.parametrize("length", [5_000, 70_001])
def test_top_k_of_long_pieces_is_exact_whatever_a_sample_says(name: str, length: int) -> None:
    values = hard_for_a_sample(length)[name]
    ranking = values.abs().sort(descending=True, stable=True).indices
    for count in (1, 10, length // 100, length // 8, length // 2):
        chosen = top_k(values, alone(sw.TopK(count=count), length))
        assert torch.equal(chosen, ranking[:count].sort().values)


def cut(shapes: dict[str, tuple[int, ...]]) -> Segments:
    """Matrices send one coordinate each, vectors are sent densely."""
    return Segments.partition(shapes, sw.TopK(count=1), dense_below=2)


def test_deposit_leaves_before_alone() -> None:
    segments = cut({"w": (1, 3)})
    before, after = torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.full((4,), 9.0)
    selection = kernels.top_k(before, torch.tensor([10.0, 20.0, 30.0]), after, segments, WORK)
    assert before.tolist() == [1, 2, 3, 0]
    assert (selection.indices.tolist(), selection.values.tolist()) == ([2], [33])
    assert after.tolist() == [11, 22, 0, 9]  # the spare slot is not written


def test_deposit_without_memory_copies() -> None:
    after = torch.full((4,), 9.0)
    addend, segments = torch.tensor([10.0, 20.0, 30.0]), cut({"w": (1, 3)})
    kernels.chosen(None, addend, after, segments, torch.tensor([1]), WORK)
    assert after.tolist() == [10, 0, 30, 9]


def test_whole_pieces_follow_what_is_chosen_and_are_emptied() -> None:
    segments = cut({"a": (1,), "w": (1, 2), "b": (2,)})
    after = torch.zeros(6)
    selection = kernels.top_k(None, torch.arange(5.0) + 1, after, segments, WORK)
    assert (selection.indices.tolist(), selection.values.tolist()) == ([2], [3, 1, 4, 5])
    assert after.tolist() == [0, 2, 0, 0, 0, 0]
    assert selection.squares.tolist() == pytest.approx([1, 13, 41])
    assert selection.non_finite == -1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_first_span_that_is_not_finite_is_named(bad: float) -> None:
    segments = cut({"a": (1,), "w": (1, 2), "b": (2,)})
    for place, param in ((0, 0), (1, 1), (4, 2)):
        values = torch.ones(5)
        values[place:] = bad
        selection = kernels.top_k(None, values, torch.zeros(6), segments, WORK)
        assert selection.non_finite == param


def test_sums_that_overflow_are_not_finite() -> None:
    segments = cut({"a": (1,), "b": (1,)})
    most = torch.tensor([1.0, 3e38])
    empty = torch.empty(0, dtype=torch.int64)
    selection = kernels.chosen(with_spare_slot(most), most, torch.zeros(3), segments, empty, WORK)
    assert selection.non_finite == 1


def test_messages_are_added_up_where_they_belong() -> None:
    segments = cut({"b": (3,), "w": (1, 3)})
    flat = torch.full((6,), 7.0)
    messages = [
        (torch.tensor([4]), torch.tensor([10.0, 1, 2, 3])),
        (torch.tensor([5]), torch.tensor([20.0, 1, 1, 1])),
        (torch.tensor([6]), torch.tensor([30.0, 0, 0, 0])),  # nowhere
    ]
    kernels.add_up(flat, messages, 0.5, segments, WORK)
    assert flat.tolist() == [1, 1.5, 2, 0, 5, 10]


def test_errors_are_put_back_and_the_spare_slot_stays_empty() -> None:
    segments = cut({"b": (1,), "w": (1, 2)})
    residual = torch.tensor([0.0, 5.0, 0.0, 0.0])
    kernels.put_back(residual, torch.tensor([2]), torch.tensor([0.5, 0.25]), segments, WORK)
    assert residual.tolist() == [0.25, 5, 0.5, 0]
    kernels.put_back(residual, torch.tensor([3]), torch.tensor([9.0, 0]), segments, WORK)
    assert residual.tolist() == [0.25, 5, 0.5, 0]


class TestThreshold:
    """Gradient dropping: all that reach the threshold, as far as there is room."""

    @staticmethod
    def chosen(values: list[float], selector: sw.Threshold, key: int = 0) -> list[int]:
        numbers = torch.tensor(values)
        segments = alone(selector, len(values))
        after = torch.zeros(len(values) + 1)
        selection = kernels.over_threshold(
            None, numbers, after, segments, selector.sample, key, WORK
        )
        return selection.indices.tolist()

    def test_whole_sample_finds_the_largest(self) -> None:
        values = [float((7 * i) % 20) for i in range(20)]
        assert self.chosen(values, sw.Threshold(count=4)) == [8, 11, 14, 17, 20]

    def test_ties_use_the_room_there_is(self) -> None:
        """Four are wanted and five fit; the lowest positions of equal magnitude go."""
        assert self.chosen([1.0] * 20, sw.Threshold(count=4)) == [0, 1, 2, 3, 4]

    def test_largest_go_first_when_too_many_reach_it(self) -> None:
        values = [1.0] * 20
        values[13], values[17] = -5.0, 3.0
        assert self.chosen(values, sw.Threshold(count=4)) == [0, 1, 2, 13, 17]

    def test_zeros_are_never_sent(self) -> None:
        values = [0.0] * 20
        values[7] = 1e-40
        assert self.chosen(values, sw.Threshold(count=4)) == [7, 20, 20, 20, 20]
        assert self.chosen([0.0] * 20, sw.Threshold(count=4)) == [20] * 5

    def test_sample_begins_elsewhere_from_step_to_step(self) -> None:
        """Spikes where one sample of seven looks: only that sample sets its threshold by them."""
        values = [1.0] * 10_000
        values[3::7] = [2.0 + i for i in range(1429)]
        selector = sw.Threshold(count=400, sample=1000)
        found = {
            len([i for i in self.chosen(values, selector, key) if i < 10_000]) for key in range(60)
        }
        assert found == {57, 500}

    def test_number_sent_stays_near_the_target(self) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(20_000, generator=generator).tolist()
        selector = sw.Threshold(0.05, sample=2_000)
        counts = [
            sum(index < 20_000 for index in self.chosen(values, selector, key)) for key in range(10)
        ]
        assert all(700 <= count <= 1250 for count in counts)
        assert len(set(counts)) > 1


def test_pieces_side_by_side_give_what_they_give_alone() -> None:
    """Chunks are handled as one grid; the last, shorter one by itself."""
    values = torch.randn(107, generator=torch.Generator().manual_seed(0))
    segments = alone(sw.TopK(0.1), 107, 20)
    assert [(rows, length) for _, rows, length, _ in segments.grids] == [(5, 20), (1, 7)]
    residual = with_spare_slot(values)
    assert top_k(values, segments).tolist() == top_by_sorting(residual, segments)


def test_nothing_to_select_from() -> None:
    segments = alone(sw.TopK(1.0), 5)
    device = torch.device("cpu")
    ones, after = torch.ones(5), torch.zeros(6)
    for indices in (
        kernels.top_k(None, ones, after, segments, WORK).indices,
        kernels.over_threshold(None, ones, after, segments, 100, 0, WORK).indices,
        kernels.random_k(segments, 0, device, WORK),
        kernels.block_random_k(segments, 0, device, WORK),
    ):
        assert indices.dtype == torch.int64
        assert indices.numel() == 0


@pytest.mark.parametrize(
    ("indices", "fine"),
    [
        ([], True),
        ([0, 3, 9], True),
        ([0, 3, 10, 10], True),
        ([10], True),
        ([3, 3], False),
        ([4, 3], False),
        ([-1, 3], False),
        ([3, 11], False),
        ([3, 10, 4], False),
        ([3, 11, 10], False),
    ],
)
def test_ascending_indices(indices: list[int], fine: bool) -> None:
    assert bool(kernels.is_ascending(torch.tensor(indices, dtype=torch.int64), 10)) is fine
