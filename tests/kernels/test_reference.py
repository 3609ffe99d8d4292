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

from ..laws.cases import LAWFUL, alone

few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 1e-40])


def top_by_sorting(ledger: Tensor, segments: Segments) -> list[int]:
    """Largest magnitudes first, equal ones from the lowest position up."""
    chosen: list[int] = []
    for piece in segments.pieces:
        places = range(piece.start, piece.start + piece.length)
        best = sorted(places, key=lambda place: (-abs(float(ledger[place])), place))
        chosen += sorted(best[: piece.count])
    return chosen


def with_spare_slot(values: Tensor) -> Tensor:
    return torch.cat([values, torch.zeros(1)])


@given(
    st.lists(few_values | st.floats(-5, 5, width=32), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from(["layer", "global", 7]),
)
@LAWFUL
def test_top_k_is_what_sorting_says(row: list[float], count: int, scope: Any) -> None:
    segments = alone(sw.TopK(count=count), len(row), scope)
    ledger = with_spare_slot(torch.tensor(row, dtype=torch.float32))
    assert kernels.top_k(ledger, segments).tolist() == top_by_sorting(ledger, segments)


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
        chosen = kernels.top_k(with_spare_slot(values), alone(sw.TopK(count=count), length))
        assert torch.equal(chosen, ranking[:count].sort().values)


def test_deposit_leaves_before_alone() -> None:
    before, after = torch.tensor([1.0, 2.0, 0.0]), torch.full((3,), 9.0)
    kernels.deposit(before, torch.tensor([10.0, 20.0]), after)
    assert before.tolist() == [1, 2, 0]
    assert after.tolist() == [11, 22, 9]  # the spare slot is not written


def test_deposit_without_memory_copies() -> None:
    after = torch.full((3,), 9.0)
    kernels.deposit(None, torch.tensor([10.0, 20.0]), after)
    assert after.tolist() == [10, 20, 9]


def test_take_leaves_zero_behind() -> None:
    ledger = torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert kernels.take(ledger, torch.tensor([0, 2, 3, 3])).tolist() == [1, 3, 0, 0]
    assert ledger.tolist() == [0, 2, 0, 0]


def test_runs_are_taken_in_order_and_emptied() -> None:
    ledger = torch.arange(6.0)
    assert kernels.take_runs(ledger, ((1, 2), (3, 5))).tolist() == [1, 3, 4]
    assert ledger.tolist() == [0, 0, 2, 0, 0, 5]
    assert kernels.take_runs(ledger, ()).numel() == 0


def test_entries_are_added_to_indices_and_then_to_runs() -> None:
    flat = torch.ones(6)
    kernels.add_entries(flat, torch.tensor([4, 5]), torch.tensor([10.0, 20, 1, 2, 3]), ((0, 3),))
    assert flat.tolist() == [2, 3, 4, 1, 11, 21]


def test_entries_nowhere_change_nothing() -> None:
    flat = torch.ones(3)
    kernels.add_entries(flat, torch.tensor([1, 3, 3]), torch.tensor([5.0, 0, 0]), ())
    assert flat.tolist() == [1, 6, 1]


class TestThreshold:
    """Gradient dropping: all that reach the threshold, as far as there is room."""

    @staticmethod
    def chosen(values: list[float], selector: sw.Threshold, key: int = 0) -> list[int]:
        ledger = with_spare_slot(torch.tensor(values))
        segments = alone(selector, len(values))
        return kernels.over_threshold(ledger, segments, selector.sample, key).tolist()

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
        """Spikes where one sample of ten looks: only that sample sets its threshold by them."""
        values = [1.0] * 1000
        values[3::10] = [2.0 + i for i in range(100)]
        selector = sw.Threshold(count=20, sample=100)
        found = {
            len([i for i in self.chosen(values, selector, key) if i < 1000]) for key in range(60)
        }
        assert found == {2, 25}

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
    ledger = with_spare_slot(values)
    assert kernels.top_k(ledger, segments).tolist() == top_by_sorting(ledger, segments)


def test_nothing_to_select_from() -> None:
    segments = alone(sw.TopK(1.0), 5)
    device = torch.device("cpu")
    ledger = torch.ones(6)
    for indices in (
        kernels.top_k(ledger, segments),
        kernels.over_threshold(ledger, segments, 100, 0),
        kernels.random_k(segments, 0, device),
        kernels.block_random_k(segments, 0, device),
    ):
        assert indices.dtype == torch.int64
        assert indices.numel() == 0
