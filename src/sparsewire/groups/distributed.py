"""A `torch.distributed` process group as an exchange's way to the other ranks.

The exchange talks over a group of its own, a double of the model's: its collectives then cannot
mix with those that the training script or another thread issues, and have a deadline of their own.
"""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import (
    Deliver,
    Gather,
    Reduce,
    Request,
    Show,
    Total,
    chunk_sizes,
    ordered_sum,
    share_size,
)
from ..errors import AttachError, ExchangeError
from ..message import first_broken, is_sealed, seal, sealed_bytes
from .rollcall import RollCall
from .simulated import answer_all
from .transport import Transport, Work

IN_FLIGHT = 3  # legs of a sum that are under way at the same time
Leg = Generator[Work, None, None]  # yields what must be over before it can go on

# Doubles that are free again. They are not destroyed: torch may give a new group the name of one
# that is gone, and then finds the addresses of the old one in the store.
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, list[dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


class DistributedGroup:
    """The ranks of a process group, for tensors on `device`.

    Arguments:
        process_group: who takes part; the default group if None.
        timeout: seconds that any collective may take.
        device: where gradients live; messages go to the CPU where the backend needs them there.
        _is_own: the process group was made for this, and needs no double.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
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
        self.timeout = timeout
        self.rank = dist.get_rank(original)
        self.size = dist.get_world_size(original)
        self._device = self._message_device(original, device or torch.device("cpu"))
        self._original = original
        self._double: dist.ProcessGroup | None = None
        self.roll_call: RollCall | None = None
        self.doing = "the first meeting"
        self._closed = False
        self._rooms: dict[str, Tensor] = {}
        self._is_own = _is_own
        if self.size > 1 and _is_own:
            self._double = original
        elif self.size > 1:
            spare = _spares.setdefault(original, {}).setdefault(timeout, [])
            self._double = spare.pop() if spare else self._make_double(original)
        if self._double is not None:
            self.roll_call = RollCall.of(self._double, self.rank, self.size)
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

    def answer(self, request: Request) -> Any:
        """Carry out one request together with all other ranks."""
        if self._closed:
            raise ExchangeError(f"{self.doing} cannot take place: the group was closed")
        try:
            return self._answer(request)
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
        if self.roll_call is not None:
            finding = f"; {self.roll_call.inquire(text)}"
        error = ExchangeError(
            f"{self.doing} failed on rank {self.rank} of {self.size}{finding}. Cause: "
            f"{text[:300]}. Weights and memory are those of the last whole step: restart from a "
            f"checkpoint{self._hint(text)}"
        )
        error.__cause__ = cause
        return error

    def _answer(self, request: Request) -> Any:
        home = request.payload.device
        payload = request.payload.to(self._device).contiguous()
        if self.size == 1:
            return answer_all([request])[0]
        if isinstance(request, Gather):
            output = payload.new_empty(self.size * payload.numel())
            self._transport.gather(output, payload).wait()
            return list(output.to(home).view(self.size, -1))
        if isinstance(request, Deliver):
            rows = torch.empty_like(payload)
            self._transport.deliver(rows, payload).wait()
            return list(rows.to(home))
        if isinstance(request, Show):
            shown = payload if self.rank == request.root else torch.empty_like(payload)
            self._transport.show(shown, request.root).wait()
            return shown.to(home)
        total = self._reduce(payload, request)
        return Total(total.values.to(home), total.damage.to(home))

    def _reduce(self, payload: Tensor, request: Reduce) -> Total:
        """Every rank adds up its share of all chunks, then all gather the shares."""
        sizes = chunk_sizes(payload.numel())
        total = self._room("total", payload.numel() * request.dtype.itemsize).view(request.dtype)
        parts, goals = torch.split(payload, sizes), torch.split(total, sizes)
        sealed: list[Tensor] = []
        slots = itertools.cycle(range(IN_FLIGHT))
        # not chunk by chunk: two kinds of traffic at once get in each other's way
        legs = [
            *(self._add_up(n, p, request, sealed, next(slots)) for n, p in enumerate(parts)),
            *(self._spread(n, g, request, sealed, next(slots)) for n, g in enumerate(goals)),
        ]
        try:
            _overlap(legs, at_once=min(IN_FLIGHT, len(sizes)))
        except BaseException:
            self._rooms.clear()  # what is still under way may write there
            raise
        return Total(total, first_broken(torch.stack(sealed).all(0)))

    def _add_up(
        self, chunk: int, part: Tensor, request: Reduce, sealed: list[Tensor], slot: int
    ) -> Leg:
        """Give every rank its share of a chunk, and add up this rank's."""
        keys, share = self._keys(request, chunk), share_size(part.numel(), self.size)
        sent = self._rows(f"sent {slot}", share, part.dtype)
        received = self._rows(f"received {slot}", share, part.dtype)
        for rank, (row, piece) in enumerate(zip(sent, self._shares(part), strict=True)):
            row[: piece.nbytes] = piece.view(torch.uint8)
            row[piece.nbytes :] = 0
            if rank != self.rank:
                seal(row, keys[self.rank])
        # as bytes, since not every backend carries every float type
        yield self._transport.deliver(received, sent)
        sealed.append(self._are_sealed(received, keys))
        parts = [row[: share * part.dtype.itemsize].view(part.dtype) for row in received]
        end = share * request.dtype.itemsize
        own = self._room(f"sum {chunk}", sealed_bytes(end))
        ordered_sum(parts, request.dtype, request.scale, out=own[:end].view(request.dtype))
        own[end:] = 0
        seal(own, keys[self.rank])

    def _spread(
        self, chunk: int, goal: Tensor, request: Reduce, sealed: list[Tensor], slot: int
    ) -> Leg:
        """Show all ranks the sum of this rank's share of a chunk, and write theirs into `goal`."""
        share = share_size(goal.numel(), self.size)
        shown = self._rows(f"received {slot}", share, goal.dtype)
        yield self._transport.gather(shown.view(-1), self._room(f"sum {chunk}", shown.shape[1]))
        sealed.append(self._are_sealed(shown, self._keys(request, chunk)))
        for row, piece in zip(shown, self._shares(goal), strict=True):
            piece.copy_(row[: piece.nbytes].view(goal.dtype))

    def _keys(self, request: Reduce, chunk: int) -> list[int]:
        context = replace(request.context, chunk=chunk)
        return [context.key(rank) for rank in range(self.size)]

    def _shares(self, chunk: Tensor) -> list[Tensor]:
        """The values of a chunk that each rank adds up; the last ranks may have fewer, or none."""
        share = share_size(chunk.numel(), self.size)
        return [chunk[rank * share : (rank + 1) * share] for rank in range(self.size)]

    def _rows(self, name: str, share: int, dtype: torch.dtype) -> Tensor:
        """Room for one sealed share from or for every rank."""
        width = sealed_bytes(share * dtype.itemsize)
        return self._room(name, self.size * width).view(self.size, width)

    def _room(self, name: str, nbytes: int) -> Tensor:
        """Memory that is kept: to get as much anew costs more than to send it over a fast link."""
        room = self._rooms.get(name)
        if room is None or room.numel() < nbytes:
            room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._rooms[name] = room
        return room[:nbytes]

    def _are_sealed(self, rows: Tensor, keys: list[int]) -> Tensor:
        """Whether each rank's share is as it was sent; this rank's own never left."""
        own = torch.ones((), dtype=torch.bool, device=rows.device)
        return torch.stack(
            [
                own if rank == self.rank else is_sealed(row, key)
                for rank, (row, key) in enumerate(zip(rows, keys, strict=True))
            ]
        )

    @property
    def members(self) -> list[int]:
        """The global ranks that take part, in order."""
        return dist.get_process_group_ranks(self._original)

    def sum_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, as the backend makes it; the tensor may be used up."""
        if self._double is None:
            return tensor
        payload = tensor.to(self._device).contiguous()
        try:
            dist.all_reduce(payload, group=self._double)
        except RuntimeError as cause:
            raise self.failure(cause) from cause
        return payload.to(tensor.device)

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
        self._rooms.clear()
        self._closed = True


def _overlap(legs: Iterable[Leg], at_once: int) -> None:
    """Let some legs travel while another is worked on, in the same order on all ranks."""
    under_way: deque[tuple[Leg, Work]] = deque()
    for leg in legs:
        under_way.append((leg, next(leg)))
        if len(under_way) == at_once:
            _finish(*under_way.popleft())
    for leg, work in under_way:
        _finish(leg, work)


def _finish(leg: Leg, work: Work) -> None:
    work.wait()
    next(leg, None)
