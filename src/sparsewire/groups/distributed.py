"""A `torch.distributed` process group as an exchange's way to the other ranks.

The exchange talks over a group of its own, a double of the model's: its collectives then cannot
mix with those that the training script or another thread issues, and have a deadline of their own.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttachError, ExchangeError
from ..requests import Request
from .liveness import Liveness
from .simulated import answer_all
from .transport import Transport, Work

# Doubles that are free again. They are not destroyed: torch may give a new group the name of one
# that is gone, and then finds the addresses of the old one in the store.
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, list[dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


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
        _is_own: the process group was made for this, and needs no double.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | datetime.timedelta = 60.0,
        device: torch.device | None = None,
        _is_own: bool = False,
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
        self.liveness: Liveness | None = None
        self.doing = "the first meeting"
        self._closed = False
        self._is_own = _is_own
        if self.size > 1 and _is_own:
            self._double = original
        elif self.size > 1:
            spare = _spares.setdefault(original, {}).setdefault(timeout, [])
            self._double = spare.pop() if spare else self._make_double(original)
        if self._double is not None:
            self.liveness = Liveness.of(self._double, self.rank, self.size)
            try:
                self._transport = Transport(self._double, self._device)
            except RuntimeError as cause:
                raise self.failure(cause) from cause

    @staticmethod
    def _message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
        on_device = device.type != "cpu" and "nccl" in str(dist.get_backend_config(group))
        return device if on_device else torch.device("cpu")

    def _make_double(self, original: dist.ProcessGroup) -> dist.ProcessGroup:
        backend = dist.get_backend(original)
        # members alone can make a group, except under MPI: there all processes must call attach
        is_part = self.size < dist.get_world_size() and backend != "mpi"
        try:
            double = dist.new_group(
                dist.get_process_group_ranks(original),
                timeout=datetime.timedelta(seconds=self.timeout),
                backend=None if backend == "undefined" else backend,
                use_local_synchronization=is_part,
                group_desc="sparsewire",
            )
        except RuntimeError as cause:
            text = " ".join(str(cause).split())
            raise ExchangeError(
                f"the first meeting of {self.size} ranks failed on rank {self.rank}: all ranks "
                f"must attach, in the same order, within {self.timeout:g} seconds. Cause: "
                f"{text[:300]}"
            ) from cause
        assert isinstance(double, dist.ProcessGroup)
        return double

    def start(self, request: Request) -> Ticket:
        """Begin a request together with all other ranks."""
        if self._closed:
            raise ExchangeError(f"{self.doing} cannot take place: the group was closed")
        try:
            return self._start(request)
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def wait(self, ticket: Ticket) -> Any:
        """Wait for the end of a request, and return its answer."""
        try:
            if ticket.work is not None:
                ticket.work.wait()
            return ticket.answer()
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def _hint(self, text: str) -> str:
        """What to change if a rank was only slow."""
        if "timed out" not in text.lower():
            return ""
        return (
            f", and if a rank is slow rather than lost, give it more than timeout={self.timeout:g}"
        )

    def failure(self, cause: Exception) -> ExchangeError:
        """What happened, after telling the other ranks and finding out who is missing."""
        text = " ".join(str(cause).split()) or type(cause).__name__
        finding = ""
        if self.liveness is not None:
            finding = f"; {self.liveness.inquire(text)}"
        error = ExchangeError(
            f"{self.doing} failed on rank {self.rank} of {self.size}{finding}. Cause: "
            f"{text[:300]}. Weights and memory are those of the last whole step: restart from a "
            f"checkpoint{self._hint(text)}"
        )
        error.__cause__ = cause
        return error

    def _start(self, request: Request) -> Ticket:
        home = request.payload.device
        payload = request.payload.to(self._device).contiguous()
        if self.size == 1:
            answer = answer_all([request])[0]
            return Ticket(None, lambda: answer)
        if request.op == "broadcast":
            shown = payload if self.rank == request.root else torch.empty_like(payload)
            return Ticket(self._transport.show(shown, request.root), lambda: shown.to(home))
        if request.op == "all_reduce":
            total = payload.clone() if payload is request.payload else payload
            return Ticket(self._transport.add_up(total), lambda: total.to(home))
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
        first = dist.get_process_group_ranks(self._double)[0]
        for tensor in tensors:
            payload = tensor.detach().to(self._device).contiguous()
            try:
                dist.broadcast(payload, first, group=self._double)
            except RuntimeError as cause:
                raise self.failure(cause) from cause
            tensor.detach().copy_(payload)

    def close(self) -> None:
        """Leave the group in good order; the next one over the same ranks takes it over."""
        if self._double is not None and not self._is_own:
            _spares[self._original][self.timeout].append(self._double)
        self._double = None
        self._closed = True
