"""A `torch.distributed` process group as the connection to the other ranks.

The exchange has a process group of its own, a duplicate of the model's. Its collectives then cannot
mix with those that the training script or another thread issues, and have a deadline of their own.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AttachError
from .connection import Connection, Ticket
from .liveness import Liveness, part_of, store_of
from .transport import Transport

Result = TypeVar("Result")

# Duplicates that are free again, by the number of the meeting that made them. They are not
# destroyed: torch may give a new group the name of a destroyed one, and then finds the addresses of
# the old one in the store.
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, dict[int, dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def seconds_of(timeout: float | datetime.timedelta) -> float:
    """Return a time-out in seconds. Raise if it is not a positive time."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise AttachError(
            f"timeout is a number of seconds above 0, or a timedelta, not {timeout!r}"
        )
    return float(timeout)


class DistributedGroup(Connection):
    """The ranks of a `torch.distributed` process group.

    It makes a process group of its own over the same ranks, so that its collectives cannot mix with
    yours. All ranks must make it together.

    Arguments:
        process_group: The ranks that take part. If None, the default group.
        timeout: Seconds, or a `timedelta`, that any collective may take.
        device: The device of the gradients. If None, the CPU. Messages are copied to the CPU if
            the backend needs them there.

    Attributes:
        rank: This rank's number in the group.
        size: The number of ranks.
        timeout: The time-out in seconds.
    """

    # `_part_of` is the group of all ranks, if the process group was made for some of them. It needs
    # no duplicate then, and a failure concerns all ranks.

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
        timeout = seconds_of(timeout)
        rank, size = dist.get_rank(original), dist.get_world_size(original)
        liveness = _part_of.liveness if _part_of else Liveness(rank, size, timeout)
        device = self._message_device(original, device or torch.device("cpu"))
        super().__init__(rank, size, liveness, device)
        self._original = original
        self._double: dist.ProcessGroup | None = None
        self._is_own = _part_of is not None
        self._made = self.meeting = _meetings[original] = _meetings.get(original, 0) + 1
        if self.size == 1:
            return
        self._double, self._transport = self.limited(self._meet)

    @staticmethod
    def _message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
        on_device = device.type != "cpu" and "nccl" in str(dist.get_backend_config(group))
        return device if on_device else torch.device("cpu")

    def _meet(self) -> tuple[dist.ProcessGroup, Transport]:
        """Meet the other ranks. Return the process group to use, and its transport."""
        original = self._original
        if self._is_own:
            return original, self._transport_of(original)
        spares = _spares.setdefault(original, {}).setdefault(self.timeout, {})
        store = store_of(original)
        self._made = self._arrive(part_of(store, self.meeting), spares) or self.meeting
        for number in _left.pop(original, ()):  # all ranks are here, so none still uses these
            self._forget(part_of(store, number))
        double = spares.pop(self._made, None) or self._make_double(original)
        return double, self._transport_of(double)

    def _transport_of(self, group: dist.ProcessGroup) -> Transport:
        return Transport(group, self._device, lambda: self.liveness.given_up)

    def _make_double(self, original: dist.ProcessGroup) -> dist.ProcessGroup:
        backend = dist.get_backend(original)
        # members can make a group by themselves, except under MPI: there all processes call attach
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
    def members(self) -> list[int]:
        """The global numbers of the ranks that take part, in order."""
        return dist.get_process_group_ranks(self._original)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these tensors with those of rank 0 on all ranks."""
        if self._double is None:
            return
        for tensor in tensors:
            payload = tensor.detach().to(self._device).contiguous()
            self.wait(Ticket(self._transport.show(payload, 0), lambda: None))
            tensor.detach().copy_(payload)

    def close(self) -> None:
        """Leave the group. Do not use it afterwards."""
        if self._double is not None and not (self._is_own or self._is_abandoned):
            _spares[self._original][self.timeout][self._made] = self._double
            _left.setdefault(self._original, []).append(self.meeting)
        self._double = None
        self._is_closed = True
