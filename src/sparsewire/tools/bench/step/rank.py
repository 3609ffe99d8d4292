"""One rank of a measurement: takes its turns with every contender, and rank 0 tells about them.

Its records: "opening" about the model, "turn" when one begins, "step" after each of its steps as
a sign of life, "measured" with all steps of a turn, "failed" for a contender that cannot run here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ...tasks import workloads
from ...tasks.workloads import Workload, WorkloadError
from ..contenders import PEERS, Entry, interface_bytes
from .stopwatch import steps

Emit = Callable[[dict[str, Any]], None]

Turn = tuple[int, str]  # the round and the contender

_PATIENCE = 5.0  # seconds that the measured steps of a turn should not exceed by much
_FEWEST = 2  # steps that a turn measures even so


@dataclass(frozen=True)
class Plan:
    """One measurement on one network, the same for every rank.

    Args:
        model: the workload's name.
        batch_size: examples per rank and step; None for the model's own.
        turns: rounds and contenders, in order.
        steps: how many steps a turn measures at most.
        timeout: seconds after which a step counts as hung.
        counts: the number of steps per contender, where it is decided already.
    """

    model: str
    batch_size: int | None
    turns: tuple[Turn, ...]
    steps: int
    timeout: float
    counts: dict[str, int]


def interleave(contenders: Sequence[str], rounds: int) -> tuple[Turn, ...]:
    """Return the turns of all contenders in every round; every other round is reversed.

    A machine that slows down during the measurement then affects all contenders alike.

    >>> interleave(["a", "b"], 2)
    ((0, 'a'), (0, 'b'), (1, 'b'), (1, 'a'))
    """
    return tuple(
        (number, name)
        for number in range(rounds)
        for name in (reversed(contenders) if number % 2 else contenders)
    )


def take_turns(plan: Plan, emit: Emit) -> None:
    """Measure the turns of `plan`, as a rank of the default process group."""
    rank = dist.get_rank()
    tell: Emit = emit if rank == 0 else lambda record: None
    workload = workloads.build(plan.model, plan.batch_size, rank)
    workloads.rehearse(workload, plan.model)
    _compare(workload, plan.model)
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    tell(
        {
            "record": "opening",
            "parameters": sum(p.numel() for p in parameters),
            "tensors": len(parameters),
            "examples": workload.examples,
        }
    )
    unable = find_unable({name for _, name in plan.turns})
    for name, reason in unable.items():
        tell({"record": "failed", "contender": name, "reason": reason})
    course = _Course(plan, workload, tell)
    for number, name in plan.turns:
        if name not in unable:
            course.turn(number, name)


class _Course:
    """The turns of one rank."""

    def __init__(self, plan: Plan, workload: Workload, tell: Emit) -> None:
        self._plan, self._workload, self._tell = plan, workload, tell
        self._counts = dict(plan.counts)
        self._start = {k: v.clone() for k, v in workload.model.state_dict().items()}

    def turn(self, number: int, name: str) -> None:
        """Enter, warm up, measure, leave."""
        self._tell({"record": "turn", "round": number, "contender": name})
        # Gradients shrink during training, down to denormal numbers.
        self._workload.model.load_state_dict(self._start)
        optimizer = torch.optim.SGD(self._workload.model.parameters(), lr=0.01)
        entry = Entry(name, self._workload.model, optimizer, perf_counter, self._plan.timeout)
        taking = steps(entry, self._workload, optimizer, dist.barrier)
        try:
            for _ in range(entry.warm_up):
                last = next(taking)
                self._tell({"record": "step", "seconds": last.seconds})
            if name not in self._counts:
                self._counts[name] = self._agree(last.seconds)
            entry.forget_buckets()
            mine: list[dict[str, Any]] = []
            for _ in range(self._counts[name]):
                before = entry.sent(dist.get_world_size()), interface_bytes()
                step = next(taking)
                after = entry.sent(dist.get_world_size()), interface_bytes()
                wire = None if before[1] is None or after[1] is None else after[1] - before[1]
                sent = {"payload": after[0] - before[0], "wire": wire}
                mine.append({"seconds": step.seconds, **asdict(step), **sent})
                self._tell({"record": "step", "seconds": step.seconds})
        finally:
            taking.close()
        buckets = entry.buckets()
        entry.leave()
        self._tell(
            {
                "record": "measured",
                "round": number,
                "contender": name,
                "steps": _merge(mine),
                "buckets": buckets,
            }
        )

    def _agree(self, seconds: float) -> int:
        """Return how many steps to measure, which rank 0 decides from the time of one."""
        count = min(self._plan.steps, max(_FEWEST, int(_PATIENCE / seconds)))
        decided = torch.tensor(count)
        dist.broadcast(decided, 0)
        return int(decided)


def _merge(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every step as the mean over all ranks; nothing on ranks other than 0."""
    found = gather_texts(json.dumps(mine))
    if dist.get_rank() != 0:
        return []
    return [_mean(ranks) for ranks in zip(*map(json.loads, found), strict=True)]


def gather_texts(text: str) -> list[str]:
    """Return every rank's text: sent as bytes, since pickled objects could run code."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.tensor(0) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(mine.numel()))
    longest = int(max(sizes))
    padded = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [
        bytes(row[: int(size)].tolist()).decode() for row, size in zip(rows, sizes, strict=True)
    ]


def _mean(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of one step over all ranks, and how long each of them took."""

    def means(key: str) -> dict[str, float]:
        return {part: fmean(rank[key][part] for rank in ranks) for part in ranks[0][key]}

    wire = [rank["wire"] for rank in ranks if rank["wire"] is not None]
    return {
        "seconds": fmean(rank["seconds"] for rank in ranks),
        "ranks": [rank["seconds"] for rank in ranks],
        **{key: means(key) for key in ("parts", "busy", "hidden")},
        "payload": fmean(rank["payload"] for rank in ranks),
        "wire": fmean(wire) if wire else None,
    }


def find_unable(names: set[str]) -> dict[str, str]:
    """Return the contenders whose number type this backend cannot add up, by trying it."""
    unable = {}
    for name, peer in PEERS.items():
        if name in names:
            try:
                dist.all_reduce(torch.zeros(1, dtype=peer.adds))
            except RuntimeError:
                kind = str(peer.adds).removeprefix("torch.")
                unable[name] = f"the backend {dist.get_backend()} cannot add {kind}"
    return unable


def _compare(workload: Workload, name: str) -> None:
    """Refuse models that are not the same on all ranks, with which DDP would hang or go astray."""
    digest = hashlib.sha256()
    for key, parameter in workload.model.named_parameters():
        total = float(parameter.detach().double().sum())
        digest.update(f"{key} {tuple(parameter.shape)} {parameter.dtype} {total}".encode())
    found = gather_texts(digest.hexdigest())
    for rank, other in enumerate(found):
        if other != found[0]:
            raise WorkloadError(
                f"{name} builds another model on rank {rank} than on rank 0: all ranks must begin "
                f"with the same weights, so leave torch's seed alone, or set the same everywhere"
            )
