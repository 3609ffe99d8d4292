"""Hierarchical exchange: all ranks of one machine act as a single member of the group.

The ranks of a machine average their gradients. The first rank, the leader, exchanges the average
with the leaders of the other machines and broadcasts the result to its machine. Every message
carries a checksum keyed by machine, step and bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import errors
from .errors import ExchangeError, SparsewireError
from .message import (
    CHECKSUM,
    CHECKSUM_BYTES,
    FINE,
    INTRA_NODE,
    REASONS,
    Context,
    Header,
    add_checksum,
    bytes_with_checksum,
    corruption_code,
    gather_checked,
    gather_headers,
    local_corruption_code,
    local_difference,
    matches_checksum,
)
from .randomness import fold
from .requests import Routine, broadcast
from .sums import sum_over_ranks
from .workspace import Workspace

NOTE_BYTES = 2048  # size of the note that reports to a machine how its leader's exchange ended


class Machine:
    """One rank's view of the exchanges within its machine during one step.

    Records the first corrupt message of each exchange until `gather_corruption` reports it to the
    leader.

    Arguments:
        rank: the rank on this machine; 0 is the leader.
        size: the number of ranks on the machine.
        number: the index of the machine.
        dtype: the accumulation type for gradients; the gradient's own type if None.
        work: reusable buffers.
    """

    def __init__(
        self, rank: int, size: int, number: int, dtype: torch.dtype | None, work: Workspace
    ) -> None:
        self.rank = rank
        self.size = size
        self.number = number
        self._dtype = dtype
        self._work = work
        self._corruption: list[Tensor] = []

    def compare(self, header: Header) -> Routine[int]:
        """Compare headers on this machine. Return the mismatch as `Header.odd_local` encodes it."""
        first = self.number * self.size
        own = replace(header, rank=first + self.rank)
        return local_difference((yield from gather_headers(own, "intra_node", first=first)))

    def average(self, flat: Tensor, context: Context) -> Routine[None]:
        """Replace a flat gradient in place by its mean over the machine."""
        dtype = self._dtype or flat.dtype
        total = yield from sum_over_ranks(
            flat.to(dtype),
            dtype,
            self._inside(context),
            self.rank,
            self.size,
            self._work,
            1 / self.size,
            "intra_node",
            out=flat if flat.dtype == dtype else None,
        )
        if flat.dtype != dtype:
            flat.copy_(total.values)
        self._corruption.append(total.corruption)

    def follow(
        self, routine: Routine[Tensor], payload: Tensor, context: Context
    ) -> Routine[tuple[Tensor, Tensor]]:
        """Run a routine on the leader and broadcast its result to all ranks of the machine.

        An error raised on the leader is raised on every rank.

        Arguments:
            routine: the routine to run, on the leader only.
            payload: a byte tensor with the size and device of the result.
            context: a context unique to this routine.

        Returns:
            The received bytes, and a flag that is False if they arrived corrupt. Corruption is also
            recorded for `gather_corruption`.
        """
        nbytes, key = payload.numel(), fold(context.common, INTRA_NODE, self.number)
        size = NOTE_BYTES + bytes_with_checksum(nbytes)
        message = self._work.buffer("machine", size, payload.device)
        error: Exception | None = None
        if self.rank == 0:
            try:
                body = message[NOTE_BYTES:]
                body[:nbytes] = yield from routine
                body[nbytes:] = 0
                add_checksum(body, key)
            except Exception as raised:
                error = raised
            message[:NOTE_BYTES] = _write_note(error, self._note_key)
        told = yield broadcast(message, 0, "intra_node")
        error = error or self._read_note(told[:NOTE_BYTES], context)
        if error is not None:
            raise error
        is_fine = matches_checksum(told[NOTE_BYTES:], key)
        self._note(torch.where(is_fine, FINE, corruption_code(0, CHECKSUM)))
        return told[NOTE_BYTES : NOTE_BYTES + nbytes], is_fine

    def _note(self, corruption: Tensor) -> None:
        """Record a corruption code for the current exchange, unless it already has one."""
        first = self._corruption[-1]
        corruption = corruption.to(first.device)
        self._corruption[-1] = torch.where(first == FINE, corruption, first)

    def gather_corruption(self, context: Context) -> Routine[list[int]]:
        """Return one corruption code per exchange, merged over the ranks of the machine.

        Raises `ExchangeError`, on the leader only, if another rank's report arrives corrupt.
        """
        own = torch.stack(self._corruption).cpu()
        rows, corruption = yield from gather_checked(
            own.view(torch.uint8),
            self._inside(context.status),
            self.rank,
            "intra_node",
        )
        if self.rank == 0 and int(corruption) != FINE:
            raise self.unreadable(int(corruption) // len(REASONS), context)
        found = torch.stack(rows).view(torch.int64)
        return [_first_code(codes) for codes in found.T.tolist()]

    def _inside(self, context: Context) -> Context:
        """Return the context for messages among the ranks of this machine."""
        return replace(context, purpose=INTRA_NODE, machine=self.number)

    @property
    def _note_key(self) -> int:
        """The checksum key of notes, independent of the step so that every rank can read them."""
        return fold(INTRA_NODE, self.number)

    def _read_note(self, note: Tensor, context: Context) -> SparsewireError | None:
        """Return the error in a leader's note, or None."""
        note = note.cpu()
        if not bool(matches_checksum(note, self._note_key)):
            return self.unreadable(0, context)
        text = note[:-CHECKSUM_BYTES].numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
        if not text:
            return None
        name, _, words = text.partition("\n")
        error: SparsewireError = _ERRORS[name](words)
        return error

    def unreadable(self, sender: int, context: Context) -> ExchangeError:
        """Return the error for a message within the machine that only this rank found corrupt."""
        return ExchangeError(
            f"what rank {sender} of machine {self.number} told its machine at step {context.step}, "
            f"bucket {context.bucket}, arrived corrupt, or the ranks are not at the same step. The "
            f"other ranks may have gone on, so the group is broken: restart all ranks from a "
            f"checkpoint"
        )


def _first_code(codes: Sequence[int]) -> int:
    """Return the first code other than FINE among all ranks' codes for one exchange."""
    for receiver, code in enumerate(codes):
        if code != FINE:
            return local_corruption_code(code // len(REASONS), receiver)
    return FINE


def _write_note(error: Exception | None, key: int) -> Tensor:
    """Encode an error as a fixed-size message, with empty text if there is no error."""
    text = ""
    if isinstance(error, SparsewireError):
        kind = next(base for base in type(error).__mro__ if base.__name__ in _ERRORS)
        text = f"{kind.__name__}\n{error}"
    elif error is not None:
        text = f"ExchangeError\nthe leader of this machine met {type(error).__name__}: {error}"
    data = text.encode()[: NOTE_BYTES - CHECKSUM_BYTES].ljust(NOTE_BYTES, b"\0")
    return add_checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8), key)


_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SparsewireError)
}
