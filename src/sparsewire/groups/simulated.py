"""W workers in one process, without threads or sockets: the same numbers as W processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..errors import DisagreementError, SchemeError
from ..meter import Meter
from ..requests import Request, Routine, Start, Step, Wait

Result = TypeVar("Result")


class SimulatedGroup:
    """Runs the exchanges of `size` workers in lockstep."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise SchemeError(f"a simulated group of {size} workers makes no sense; use at least 1")
        self.size = size

    def drive(self, runs: Sequence[Routine[Result]], meters: Sequence[Meter]) -> list[Result]:
        """Run every worker's part to its end; they end together. What each one returned."""
        answers: Sequence[Any] = [None] * self.size
        while True:
            steps: list[Step] = []
            results: list[Result] = []
            for run, answer in zip(runs, answers, strict=True):
                try:
                    steps.append(run.send(answer))
                except StopIteration as end:
                    results.append(end.value)
            if not steps:
                return results
            if results:
                raise DisagreementError("some workers ended their exchange before the others")
            answers = self._answer(steps, meters)

    def follow(self, runs: Sequence[Routine[Result]], meters: Sequence[Meter]) -> Result:
        """Run the first worker's part to its end, and the others' as far as it depends on them.

        All ranks end with the same mean, so one of them need work it out.
        """
        answers: Sequence[Any] = [None] * self.size
        while True:
            try:
                steps = [runs[0].send(answers[0])]
            except StopIteration as end:
                for run in runs[1:]:
                    run.close()
                return cast(Result, end.value)
            steps += [run.send(answer) for run, answer in zip(runs[1:], answers[1:], strict=True)]
            answers = self._answer(steps, meters)

    def _answer(self, steps: Sequence[Step], meters: Sequence[Meter]) -> list[Any]:
        if not isinstance(steps[0], Wait):
            for step, meter in zip(steps, meters, strict=True):
                assert not isinstance(step, Wait)
                request = step.request if isinstance(step, Start) else step
                meter.count(request.traffic(self.size))
        return results_of(steps)


def results_of(steps: Sequence[Step]) -> list[Any]:
    """What each rank gets when all have made the same step."""
    kinds = {type(step) for step in steps}
    if kinds == {Wait}:
        return [step.ticket for step in steps if isinstance(step, Wait)]
    if kinds == {Start}:
        # a copy, as on a network: the sender may write to its payload before all have read it
        started = [step.request for step in steps if isinstance(step, Start)]
        return answer_all([replace(r, payload=r.payload.clone()) for r in started])
    if kinds != {Request}:
        raise _different()
    return answer_all([step for step in steps if isinstance(step, Request)])


def answer_all(requests: Sequence[Request]) -> list[Any]:
    """What each rank gets when all have asked."""
    first = requests[0]
    payloads = [request.payload for request in requests]
    alike = all((r.op, r.root) == (first.op, first.root) for r in requests)
    if not alike or len({payload.shape for payload in payloads}) != 1:
        raise _different()
    if first.op == "all_gather":
        return [payloads] * len(requests)
    if first.op == "all_to_all":
        return [[payload[rank] for payload in payloads] for rank in range(len(requests))]
    return [payloads[first.root]] * len(requests)


def _different() -> DisagreementError:
    return DisagreementError("workers asked for different things: their schemes or layouts differ")
