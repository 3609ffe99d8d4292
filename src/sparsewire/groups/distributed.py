"""A `torch.distributed` process group as an exchange's way to the other ranks.

The exchange talks over a group of its own, a double of the model's: its collectives then cannot
mix with those that the training script or another thread issues, and have a deadline of their own.
"""

from __future__ import annotations

import datetime
import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttachError, ExchangeError
from ..requests import Request
from .liveness import GRACE, Liveness, store_of, within
from .simulated import answer_all
from .transport import Transport, Work

Result = TypeVar("Result")

# Doubles that are free again, by the number of the meeting that made them. They are not destroyed:
# torch may give a new group the name of one that is gone, and then finds the addresses of the old
# one in the store.
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, dict[int, dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ticket:
    """A request under way: what to wait for, and what to call then."""

    work: Work | None
    answer: Callable[[], Any]


def seconds_of(timeout: float | datetime.timedelta) -> float:
    """Return a time-out in seconds; refused if it is none."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise AttachError(
            f"timeout is a number of seconds above 0, or a timedelta, not {timeout!r}"
        )
    return float(timeout)


class DistributedGroup:
    """The ranks of a process group, for tensors on `device`.

    Arguments:
        process_group: who takes part; the default group if None.
        timeout: seconds, or a `timedelta`, that any collective may take.
        device: where gradients live; messages go to the CPU where the backend needs them there.
        _part_of: the group of all ranks, if the process group was made for some of them. It needs
            no double then, and a failure concerns all ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | datetime.timedelta = 60.0,
        device: torch.device | None = None,
        _part_of: DistributedGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise AttachError(
                "torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() first, or start the script with torchrun"
            )
        original = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(original, dist.ProcessGroup):
            raise AttachError("this process is not a member of the process group")
        self.timeout = timeout = seconds_of(timeout)
        self.rank = dist.get_rank(original)
        self.size = dist.get_world_size(original)
        self._device = self._message_device(original, device or torch.device("cpu"))
        self._original = original
        self._double: dist.ProcessGroup | None = None
        self._closed = False
        self._is_abandoned = False
        self._is_own = _part_of is not None
        self.liveness: Liveness = (
            _part_of.liveness if _part_of else Liveness(self.rank, self.size, timeout)
        )
        self._made = self.meeting = _meetings[original] = _meetings.get(original, 0) + 1
        if self.size == 1:
            return
        self._double, self._transport = self.limited(self._meet)

    @staticmethod
    def _message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
        on_device = device.type != "cpu" and "nccl" in str(dist.get_backend_config(group))
        return device if on_device else torch.device("cpu")

    def _meet(self) -> tuple[dist.ProcessGroup, Transport]:
        """Meet the other ranks: the group to talk in, and the way to do so."""
        original = self._original
        if self._is_own:
            return original, Transport(original, self._device)
        self._store = store_of(original, str(self.meeting))
        self.liveness.arrive(self._store)
        spares = _spares.setdefault(original, {}).setdefault(self.timeout, {})
        self._made = self._find_common("doubles", spares) or self.meeting
        double = spares.pop(self._made, None) or self._make_double(original)
        return double, Transport(double, self._device)

    def limited(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns; it may wait for a store that never answers."""
        limit, on_cuda = self.timeout + GRACE, self._device.type == "cuda"

        def on_device() -> Result:
            with torch.cuda.device(self._device) if on_cuda else nullcontext():
                return call()  # on a thread, and each has a device of its own

        try:
            return within(limit, on_device)
        except RuntimeError as cause:
            raise self.failure(cause) from cause
        except TimeoutError as cause:
            late = TimeoutError(f"it took more than {limit:.0f} seconds")
            raise self.failure(late) from cause

    def find_common(self, what: str, spares: Iterable[int]) -> int | None:
        """Return the first of these numbers that every rank has, if there is one.

        A model that goes without `detach` leaves its groups on some ranks sooner than on others.
        """
        if self.size == 1:
            return min(spares, default=None)
        return self.limited(lambda: self._find_common(what, spares))

    def _find_common(self, what: str, spares: Iterable[int]) -> int | None:
        self._store.set(f"{what}/{self.rank}", json.dumps(list(spares)))
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, datetime.timedelta(seconds=self.timeout))  # type: ignore[attr-defined]
        common = set.intersection(*(set(json.loads(self._store.get(key))) for key in keys))
        return min(common, default=None)

    def _make_double(self, original: dist.ProcessGroup) -> dist.ProcessGroup:
        backend = dist.get_backend(original)
        # members alone can make a group, except under MPI: there all processes must call attach
        is_part = self.size < dist.get_world_size() and backend != "mpi"
        double = dist.new_group(
            dist.get_process_group_ranks(original),
            timeout=datetime.timedelta(seconds=self.timeout),
            backend=None if backend == "undefined" else backend,
            use_local_synchronization=is_part,
            group_desc="sparsewire",
        )
        assert isinstance(double, dist.ProcessGroup)
        return double

    @property
    def doing(self) -> str:
        """What is under way, for the words of an error."""
        return self.liveness.progress.doing

    @doing.setter
    def doing(self, what: str) -> None:
        self.liveness.progress.begin(what)

    def start(self, request: Request) -> Ticket:
        """Begin a request together with all other ranks."""
        if self._closed:
            raise ExchangeError(f"{self.doing} cannot take place: the group was closed")
        if self.liveness.given_up:
            raise self._given_up()
        try:
            return self._start(request)
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def wait(self, ticket: Ticket) -> Any:
        """Wait for the end of a request, and return its answer."""
        liveness = self.liveness
        try:
            if ticket.work is not None:
                liveness.progress.enter("waiting")
                if not self._transport.wait(ticket.work, lambda: liveness.given_up):
                    raise self._given_up()
                liveness.progress.enter("computing")
            return ticket.answer()
        except ExchangeError:
            raise
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def _given_up(self) -> ExchangeError:
        return ExchangeError(f"{self.doing} was given up, since the group is broken or detached")

    def failure(self, cause: BaseException) -> ExchangeError:
        """What happened, after telling the other ranks and finding out who is missing."""
        return self.liveness.failure(cause)

    def abandon(self, error: ExchangeError) -> None:
        """Refuse every later request, and tell the other ranks why."""
        if self.size > 1 and not self.liveness.given_up:
            self.liveness.given_up = self._is_abandoned = True
            self.liveness.inquire(str(error))

    def _start(self, request: Request) -> Ticket:
        home = request.payload.device
        payload = request.payload.to(self._device).contiguous()
        if self.size == 1:
            answer = answer_all([request])[0]
            return Ticket(None, lambda: answer)
        if request.op == "broadcast":
            shown = payload if self.rank == request.root else torch.empty_like(payload)
            return Ticket(self._transport.show(shown, request.root), lambda: shown.to(home))
        rows = request.out
        if rows is None or rows.device != self._device:
            width = payload.numel() if request.op == "all_gather" else payload.shape[1]
            rows = payload.new_empty(self.size, width)
        arrived = rows
        if request.op == "all_gather":
            work = self._transport.gather(arrived.view(-1), payload)
        else:
            work = self._transport.deliver(arrived, payload)
        return Ticket(work, lambda: list(arrived.to(home)))

    @property
    def members(self) -> list[int]:
        """The global ranks that take part, in order."""
        return dist.get_process_group_ranks(self._original)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks what rank 0 has in these tensors."""
        if self._double is None:
            return
        for tensor in tensors:
            payload = tensor.detach().to(self._device).contiguous()
            self.wait(Ticket(self._transport.show(payload, 0), lambda: None))
            tensor.detach().copy_(payload)

    def close(self) -> None:
        """Leave the group in good order; the next one over the same ranks takes it over."""
        if self._double is not None and not (self._is_own or self._is_abandoned):
            _spares[self._original][self.timeout][self._made] = self._double
        self._double = None
        self._closed = True
