"""A `torch.distributed` process group as an exchange's way to the other ranks.

The exchange talks over a group of its own, a double of the model's: its collectives then cannot
mix with those that the training script or another thread issues, and have a deadline of their own.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import Deliver, Gather, Reduce, Request, Total, ordered_sum, share_size
from ..errors import AttachError, ExchangeError
from ..message import CHECKSUM, FINE, damage_code, is_sealed, seal, sealed_bytes
from .rollcall import RollCall
from .simulated import answer_all

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
        is_own: the process group was made for this, and needs no double.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        device: torch.device | None = None,
        is_own: bool = False,
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
        self._is_own = is_own
        if self.size > 1 and is_own:
            self._double = original
        elif self.size > 1:
            spare = _spares.setdefault(original, {}).setdefault(timeout, [])
            self._double = spare.pop() if spare else self._make_double(original)
        if self._double is not None:
            self.roll_call = RollCall.of(self._double, self.rank, self.size)
            self._all_gather = self._find_all_gather()
            self._all_to_all = self._find_all_to_all()

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

    def _find_all_gather(self) -> Callable[[Tensor, Tensor], None]:
        """The best all-gather that this backend offers: into one tensor, or into a list."""
        # the name changed from all_gather_into_tensor to all_gather_single in torch 2.13
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def into_one(output: Tensor, payload: Tensor) -> None:
            single(output, payload, group=self._double)

        def into_list(output: Tensor, payload: Tensor) -> None:
            dist.all_gather(list(output.view(self.size, -1)), payload, group=self._double)

        probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
        try:
            into_one(probe.new_empty(self.size), probe)
        except (RuntimeError, NotImplementedError) as error:
            if "support" not in str(error).lower():
                raise self.failure(error) from error
            return into_list
        return into_one

    def _find_all_to_all(self) -> Callable[[Tensor, Tensor], None]:
        """The best that this backend offers to give every rank a row: all at once, or in pairs."""

        def at_once(output: Tensor, rows: Tensor) -> None:
            dist.all_to_all_single(output, rows, group=self._double)

        def in_pairs(output: Tensor, rows: Tensor) -> None:
            output[self.rank] = rows[self.rank]
            pairs = [
                dist.P2POp(operation, row[rank], group=self._double, group_peer=rank)
                for rank in range(self.size)
                if rank != self.rank
                for operation, row in ((dist.isend, rows), (dist.irecv, output))
            ]
            for work in dist.batch_isend_irecv(pairs):
                work.wait()

        probe = torch.zeros(self.size, 1, dtype=torch.uint8, device=self._device)
        try:
            at_once(torch.empty_like(probe), probe)
        except (RuntimeError, NotImplementedError) as error:
            if "support" not in str(error).lower():
                raise self.failure(error) from error
            return in_pairs
        return at_once

    def answer(self, request: Request) -> Any:
        """Carry out one request together with all other ranks."""
        if self._closed:
            raise ExchangeError(f"{self.doing} cannot take place: the group was closed")
        try:
            return self._answer(request)
        except RuntimeError as cause:
            raise self.failure(cause) from cause

    def failure(self, cause: Exception) -> ExchangeError:
        """What happened, after telling the other ranks and finding out who is missing."""
        text = " ".join(str(cause).split()) or type(cause).__name__
        finding = ""
        if self.roll_call is not None:
            self.roll_call.alarm(text)
            finding = f"; {self.roll_call.findings()}"
        error = ExchangeError(
            f"{self.doing} failed on rank {self.rank} of {self.size}{finding}. Cause: "
            f"{text[:300]}. Weights and memory are those of the last whole step: restart from a "
            f"checkpoint"
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
            self._all_gather(output, payload)
            return list(output.to(home).view(self.size, -1))
        if isinstance(request, Deliver):
            rows = torch.empty_like(payload)
            self._all_to_all(rows, payload)
            return list(rows.to(home))
        total = self._reduce(payload, request)
        return Total(total.values.to(home), total.damage.to(home))

    def _reduce(self, payload: Tensor, request: Reduce) -> Total:
        """Every rank adds up its share of the coordinates, then all gather the shares."""
        count, key = payload.numel(), request.context.key(self.rank)
        share = share_size(count, self.size)
        sent, received = self._rows("sent", share, payload), self._rows("received", share, payload)
        _cut(payload, sent, share * payload.dtype.itemsize)
        for row in sent:
            seal(row, key)
        # as bytes, since not every backend carries every float type
        self._all_to_all(received, sent)
        parts, damage = self._unseal_each(received, share, payload.dtype, request)
        total = ordered_sum(parts, request.dtype, request.scale)
        own = total.new_zeros(sealed_bytes(total.nbytes), dtype=torch.uint8)
        own[: total.nbytes] = total.view(torch.uint8)
        shown = self._rows("sent", share, total)
        self._all_gather(shown.view(-1), seal(own, key))
        sums, later = self._unseal_each(shown, share, request.dtype, request)
        values = self._room("sum", self.size * total.nbytes).view(request.dtype)
        torch.cat(sums, out=values)
        return Total(values[:count], torch.where(damage == FINE, later, damage))

    def _rows(self, name: str, share: int, like: Tensor) -> Tensor:
        """Room for one sealed share of numbers as `like` from or for every rank."""
        width = sealed_bytes(share * like.dtype.itemsize)
        return self._room(name, self.size * width).view(self.size, width)

    def _room(self, name: str, nbytes: int) -> Tensor:
        """Memory that is kept: to get as much anew costs more than to send it over a fast link."""
        room = self._rooms.get(name)
        if room is None or room.numel() < nbytes:
            room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._rooms[name] = room
        return room[:nbytes]

    def _unseal_each(
        self, rows: Tensor, share: int, dtype: torch.dtype, request: Reduce
    ) -> tuple[list[Tensor], Tensor]:
        """Every rank's share, and the damage code of the first that is damaged."""
        damage = torch.full((), FINE, device=rows.device)
        for rank, row in enumerate(rows):
            is_fine = is_sealed(row, request.context.key(rank)) | (damage != FINE)
            damage = torch.where(is_fine, damage, damage_code(rank, CHECKSUM))
        return [row[: share * dtype.itemsize].view(dtype) for row in rows], damage

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


def _cut(payload: Tensor, rows: Tensor, nbytes: int) -> None:
    """Give every row its `nbytes` of the payload, and zero bytes where there are no more."""
    data = payload.view(torch.uint8)
    full = data.numel() // nbytes if nbytes else 0
    rows[:full, :nbytes] = data[: full * nbytes].view(full, nbytes)
    rows[:full, nbytes:] = 0
    rest = data[full * nbytes :]
    rows[full:] = 0
    if rest.numel():
        rows[full, : rest.numel()] = rest
