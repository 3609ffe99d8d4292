"""W workers in one process, without threads or sockets: the same numbers as W processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives import Gather, Reduce, Request, Total, ordered_sum
from ..engine import Outcome, Run
from ..errors import DisagreementError, SchemeError
from ..message import FINE
from ..meter import Meter


class SimulatedGroup:
    """Runs the exchanges of `size` workers in lockstep."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise SchemeError(f"a simulated group of {size} workers makes no sense; use at least 1")
        self.size = size

    def drive(self, runs: Sequence[Run], meters: Sequence[Meter]) -> Outcome:
        """Run every worker's exchange to its end; they end together, in the same way."""
        answers: Sequence[Any] = [None] * self.size
        while True:
            requests, outcomes = [], []
            for run, answer in zip(runs, answers, strict=True):
                try:
                    requests.append(run.send(answer))
                except StopIteration as end:
                    outcomes.append(end.value)
            if not requests:
                outcome: Outcome = outcomes[0]
                return outcome
            if outcomes:
                raise DisagreementError("some workers ended their exchange before the others")
            answers = answer_all(requests)
            for request, meter in zip(requests, meters, strict=True):
                meter.count(request.traffic(self.size))


def answer_all(requests: Sequence[Request]) -> list[Any]:
    """What each rank gets when all have asked."""
    first = requests[0]
    payloads = [request.payload for request in requests]
    alike = all(type(r) is type(first) for r in requests)
    if not alike or len({payload.numel() for payload in payloads}) != 1:
        raise DisagreementError(
            "workers asked for different things: their schemes or layouts differ"
        )
    if isinstance(first, Gather):
        return [payloads] * len(requests)
    assert isinstance(first, Reduce)
    total = ordered_sum(payloads, first.dtype, first.scale)
    fine = torch.full((), FINE, device=total.device)
    return [Total(total, fine)] * len(requests)
