"""W workers in one process, without threads or sockets: the same numbers as W processes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar, cast

import torch

from ..collectives import Deliver, Gather, Reduce, Request, Show, Total, ordered_sum
from ..errors import DisagreementError, SchemeError
from ..message import FINE
from ..meter import Meter

Result = TypeVar("Result")


class SimulatedGroup:
    """Runs the exchanges of `size` workers in lockstep."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise SchemeError(f"a simulated group of {size} workers makes no sense; use at least 1")
        self.size = size

    def drive(
        self, runs: Sequence[Generator[Request, Any, Result]], meters: Sequence[Meter]
    ) -> list[Result]:
        """Run every worker's part to its end; they end together. What each one returned."""
        answers: Sequence[Any] = [None] * self.size
        while True:
            requests: list[Request] = []
            results: list[Result] = []
            for run, answer in zip(runs, answers, strict=True):
                try:
                    requests.append(run.send(answer))
                except StopIteration as end:
                    results.append(end.value)
            if not requests:
                return results
            if results:
                raise DisagreementError("some workers ended their exchange before the others")
            answers = self._answer(requests, meters)

    def follow(
        self, runs: Sequence[Generator[Request, Any, Result]], meters: Sequence[Meter]
    ) -> Result:
        """Run the first worker's part to its end, and the others' as far as it depends on them.

        All ranks end with the same mean, so one of them need work it out.
        """
        answers: Sequence[Any] = [None] * self.size
        while True:
            try:
                requests = [runs[0].send(answers[0])]
            except StopIteration as end:
                for run in runs[1:]:
                    run.close()
                return cast(Result, end.value)
            requests += [
                run.send(answer) for run, answer in zip(runs[1:], answers[1:], strict=True)
            ]
            answers = self._answer(requests, meters)

    def _answer(self, requests: Sequence[Request], meters: Sequence[Meter]) -> list[Any]:
        answers = answer_all(requests)
        for request, meter in zip(requests, meters, strict=True):
            meter.count(request.traffic(self.size))
        return answers


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
    if isinstance(first, Deliver):
        return [[payload[rank] for payload in payloads] for rank in range(len(requests))]
    if isinstance(first, Show):
        return [payloads[first.root]] * len(requests)
    assert isinstance(first, Reduce)
    total = ordered_sum(payloads, first.dtype, first.scale)
    fine = torch.full((), FINE, device=total.device)
    return [Total(total, fine)] * len(requests)
