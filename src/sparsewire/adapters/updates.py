"""Exchange updates: the changes that a rank's optimizer made to the weights in the last H steps.

    update = start − live             subtracted by the optimizer since the round began
    e ← e + update, send C(e)         with any scheme, as for a gradient
    x ← x − mean(sent)                the same on all ranks
    e ← e − sent
    live ← x − λ·e                    the next round begins

`Updates` runs these steps for one rank. It does not depend on a group: drivers carry out its
requests. A round is a step of the session, so errors, headers and counters count rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import CorruptMessageError
from ..exchange import NonFinite
from ..randomness import below, fold, mix, signed
from ..requests import Routine
from ..session import Session, Transaction, Unit
from .audit import Audit
from .weights import Weights

StepAhead = float | Literal["auto"]

UNIT = "updates"
SAMPLE = 1024  # coordinates of the residual that ranks compare
PERIOD = 64  # rounds between two comparisons
_SAMPLE_KEY = 0x5A11


class Updates:
    """One rank's updates, round by round.

    Arguments:
        session: This rank's state.
        parameters: The trained parameters by name.
        step_ahead: λ. `'auto'` measures the share of the residual that ranks have in common.
        outer: An optimizer over the same parameters that gets the mean update as its gradient.
        buffers: Tensors that all ranks take from rank 0 at the end of every round.
        is_delayed: If True, the next round begins before this one's exchange has ended.
        audit: Compares the shared weights with those of other ranks.
    """

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, nn.Parameter],
        *,
        step_ahead: StepAhead = 0.0,
        outer: torch.optim.Optimizer | None = None,
        buffers: Sequence[Tensor] = (),
        is_delayed: bool = False,
        audit: Audit | None = None,
    ) -> None:
        self.session = session
        self.weights = Weights(parameters, keeps_start=is_delayed)
        self.is_measured = step_ahead == "auto"
        self.ahead = 0.0 if step_ahead == "auto" else float(step_ahead)
        self.bad: str | None = None  # a parameter with a non-finite gradient, to tell all ranks
        self._audit = audit or Audit(None)
        self._outer = outer
        self._buffers = [buffer.detach() for buffer in buffers]
        self.packed: Tensor | None = None  # the buffers' bytes, until they are applied
        self._unit = self._make_unit(Transaction(session))
        self._transaction: Transaction | None = None

    def _make_unit(self, transaction: Transaction) -> Unit:
        weights = self.weights
        unit = transaction.unit(UNIT, weights.shapes, weights.dtype, weights.device)
        weights.lay_out(unit.exchange.segments)
        return unit

    @property
    def residual(self) -> Tensor | None:
        """This rank's residual as one flat tensor; None without a memory."""
        return self.session.residual(self._unit)

    @property
    def mean(self) -> Tensor:
        """The mean update, after an exchange."""
        return self._unit.flat

    # -- one round -------------------------------------------------------------------------------

    @torch.no_grad()
    def round(self) -> Routine[NonFinite | None]:
        """End a round: exchange the update, and begin the next round at the new weights."""
        self.collect()
        try:
            found, ahead = yield from self.exchange()
        except BaseException:
            self.begin()
            raise
        self.apply(found, ahead, begins=True)
        return found

    def collect(self) -> None:
        """Write this rank's update of the round into the flat tensor of its exchange."""
        self._transaction = self.session.begin()
        self._unit = unit = self._make_unit(self._transaction)
        self.weights.collect(unit.flat, self.residual, self.ahead)
        self._pack_buffers()
        if self.bad is not None:
            dict(unit.views())[self.bad].view(-1)[0] = float("nan")
            self.bad = None

    def exchange(self) -> Routine[tuple[NonFinite | None, float]]:
        """Replace the update by the mean of all ranks' updates, and end the transaction.

        Returns the `NonFinite` finding or None, and the new λ. If there is one, no rank's update
        counts. A corrupt message raises on all ranks, and the update stays in the residual.
        """
        transaction, unit = self._transaction, self._unit
        assert transaction is not None
        try:
            yield from transaction.exchange(unit)  # first, because it compares headers
            if self.packed is not None:
                self.packed = yield from transaction.share(self.packed)
            ahead = self.ahead
            if self._is_due():
                ahead = yield from self._compare(unit, transaction)
            found = yield from transaction.agree()
            if found is None and self._audit.is_due(transaction.number):
                shared, rank = self.weights.values(self.weights.shared), self.session.place[0]
                yield from self._audit.compare(shared, transaction.number, rank)
        except CorruptMessageError:
            transaction.defer()
            raise
        except BaseException:
            transaction.rollback()
            raise
        if found is None:
            transaction.commit()
        else:
            transaction.rollback()
            self.session.counters.skipped += 1
        return found, ahead

    def apply(self, found: NonFinite | None, ahead: float, begins: bool = False) -> None:
        """Apply the mean update to the shared weights, and take rank 0's buffers.

        With `begins`, begin the next round there.
        """
        self._take_buffers()
        self.ahead = ahead
        if begins and found is None and self._outer is None:
            self.weights.advance(self.mean, self.residual, ahead)
            return
        if found is None:
            self.weights.apply(self.mean, self._outer)
        if begins:
            self.begin()

    def begin(self) -> None:
        """Begin a round at x − λ·e."""
        self.weights.begin(self._unit.flat, self.residual, self.ahead)

    def begin_early(self) -> None:
        """Begin a round before the exchange of the update that was collected."""
        self.weights.begin_early(self._unit.flat, self.residual, self.ahead)

    # -- the measurement of λ --------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Return whether to compare residuals: every `PERIOD` rounds, more often at first."""
        number = self.session.steps
        early = 0 < number < PERIOD and number & (number - 1) == 0
        return self.is_measured and (early or (number > 0 and number % PERIOD == 0))

    def _compare(self, unit: Unit, transaction: Transaction) -> Routine[float]:
        """Return ‖mean e‖² / mean ‖e‖² over a sample of coordinates, the same on all ranks.

        It is the λ for which x − λ·e comes closest to x − mean(e), on average over ranks.
        """
        residual = self.session.residual(unit)
        if residual is None:
            return 0.0
        key = fold(_SAMPLE_KEY, self.session.scheme.at(0).seed, self.session.steps)
        words = mix(torch.arange(SAMPLE, device=residual.device) ^ signed(key))
        sample = residual[below(words, torch.full_like(words, residual.numel()))]
        answers = yield from transaction.gather(sample.float().contiguous().view(torch.uint8))
        rows = torch.stack([a.view(torch.float32) for a in answers]).double()
        squares = rows.square().sum(dim=1).mean()
        share = rows.mean(dim=0).square().sum() / squares
        return float(share.nan_to_num(0.0, 0.0, 0.0).clamp(max=1.0))  # rounding may exceed 1

    # -- buffers ---------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """The size of `packed`."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _pack_buffers(self) -> None:
        """Copy the buffers now, since forward may change them during the exchange."""
        if self._buffers:
            self.packed = torch.cat([_bytes_of(buffer) for buffer in self._buffers])

    def _take_buffers(self) -> None:
        """Take the buffers that rank 0 sent. Rank 0 keeps its own, which may be newer."""
        packed, self.packed = self.packed, None
        if packed is None or (self.session.topology.rank == 0 and self.session.topology.leads):
            return
        sizes = [buffer.nbytes for buffer in self._buffers]
        for buffer, part in zip(self._buffers, torch.split(packed, sizes), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
