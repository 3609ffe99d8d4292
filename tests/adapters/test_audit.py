"""The comparison of weights between ranks: who drifted away, and in what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsewire as sw
from sparsewire.adapters.audit import Audit
from sparsewire.counters import Counters
from sparsewire.groups import SimulatedGroup
from sparsewire.requests import Request


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 4, 4, generator=generator)
    return {
        "wide": torch.randn(5, 7, generator=generator).double(),
        "conv": image.contiguous(memory_format=torch.channels_last),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "none": torch.zeros(0),
    }


def compare(models: Sequence[dict[str, Tensor]], steps: Sequence[int] | None = None) -> list[str]:
    """What every rank says."""
    audits = [Audit(10) for _ in models]
    for audit, taken in zip(audits, steps or [0] * len(models), strict=True):
        audit.optimizer_steps = taken
    runs = [audits[rank].compare(model, 20, rank) for rank, model in enumerate(models)]
    found = SimulatedGroup(len(models)).outcomes(runs, [Counters() for _ in models])
    return [str(each or "") for each in found]


def test_equal_weights_pass_whatever_their_layout() -> None:
    models = [weights() for _ in range(3)]
    models[1]["conv"] = models[1]["conv"].contiguous()
    assert compare(models) == ["", "", ""]


@pytest.mark.parametrize("name", ["wide", "conv", "half"])
def test_one_bit_is_found_on_all_ranks(name: str) -> None:
    models = [weights() for _ in range(4)]
    weight = models[2][name]
    weight[(0,) * weight.dim()] = weight.flatten()[0].nextafter(torch.tensor(9, dtype=weight.dtype))
    said = compare(models)
    assert said == [said[0]] * 4
    assert f"before step 20: rank 2 of 4 differs in {name}." in said[0]


def test_several_parameters_and_ranks() -> None:
    models = [weights() for _ in range(5)]
    for rank in (1, 3):
        models[rank]["wide"][0] += 1
        models[rank]["half"][0] += 1
    (said,) = set(compare(models))
    assert "ranks 1, 3 of 5 differ in wide and 1 more parameter." in said


def test_two_ranks_have_no_majority() -> None:
    models = [weights(), weights()]
    models[1]["conv"][0] += 1
    (said,) = set(compare(models, [7, 8]))
    assert "all 2 ranks differ in conv" in said
    assert "the optimizer has taken 7, 8 steps on ranks 0, 1, …" in said


def test_optimizers_that_stepped_unequally() -> None:
    (said,) = set(compare([weights() for _ in range(3)], [7, 7, 8]))
    assert "rank 2 of 3 differs in the number of optimizer steps" in said


def test_when() -> None:
    assert [step for step in range(31) if Audit(10).is_due(step)] == [10, 20, 30]
    assert not any(Audit(None).is_due(step) for step in range(31))
    for wrong in (0, -1, 1.5, True, "often"):
        with pytest.raises(sw.errors.AttachError, match="audit_every must be a number of steps"):
            Audit(wrong)  # type: ignore[arg-type]


def test_an_audit_that_arrives_corrupt_breaks_the_group() -> None:
    class Network(SimulatedGroup):
        def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
            answers = [[row.clone() for row in rows] for rows in super().carry(ranks, requests)]
            answers[1][0][3] ^= 1
            return answers

    network = Network(3)
    runs = [Audit(10).compare(weights(), 20, rank) for rank in range(3)]
    fine, error, _ = network.outcomes(runs, [Counters() for _ in runs])
    assert fine is None
    assert "the audit of rank 0 before step 20 arrived corrupt" in str(error)
    assert network.broken is error
