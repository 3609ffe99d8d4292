"""The desk of a rank that also owns a share of the coordinates.

It deals its entries out to their owners, adds up as an owner what all ranks sent it, answers with
the largest of that, and puts everybody's answers into the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .desk import Desk, inspect, leave_out, read, write
from .form import Form
from .message import FINE, first_damage
from .randomness import fold, join
from .segments import Span
from .selectors import Draw, Selector, TopK
from .shards import Shards

PUSH, PULL = 1, 2  # what keeps the messages of the two ways apart


@dataclass
class ShardDesk(Desk):
    """Writes, answers and reads the messages of one exchange by way of owners.

    `before` and `after` are what this rank remembers as an owner; `unused` are parameters of which
    nothing may be sent.
    """

    shards: Shards
    push_forms: Sequence[Form]
    pull_forms: Sequence[Form]
    before: Tensor | None
    after: Tensor
    unused: Sequence[Span]

    def push(self, indices: Tensor, values: Tensor) -> Tensor:
        with self.meter.stage("encode"):
            shards, count, device = self.shards, indices.numel(), values.device
            places, sources = kernels.on(device).deal(indices, shards)
            selected = torch.cat([values[:count], values.new_zeros(1)])  # and one for free slots
            numbers = selected.index_select(0, sources)
            rows, errors = [], []
            lost = values.new_zeros(values.numel() - count)
            for owner, form in enumerate(self.push_forms):
                slots = slice(shards.slots[owner], shards.slots[owner + 1])
                whole = shards.whole_sent(owner, device)
                part = torch.cat([numbers[slots], values[count:][whole]])
                dice = self._dice(PUSH, self.call.rank, owner)
                data, _, changed = write(form, places[slots], part, dice)
                rows.append(form.write(places[slots], data, self._key(PUSH, owner, self.call.rank)))
                if changed is not None:
                    room = slots.stop - slots.start
                    errors.append(changed[:room])
                    lost[whole] = changed[room:]
            self._put_back(indices, selected, sources, torch.cat(errors) if errors else None, lost)
            return torch.stack(rows)

    def _put_back(
        self,
        indices: Tensor,
        kept: Tensor,
        sources: Tensor,
        errors: Tensor | None,
        lost: Tensor,
    ) -> None:
        """What found no slot stays in the ledger, and what a codec changed goes back there."""
        count, kernel = indices.numel(), kernels.on(kept.device)
        if errors is None:
            if kept.device.type == "cpu" and self._all_sent(indices, sources):
                return
            kept.index_fill_(0, sources, 0)
        else:
            kept.index_copy_(0, sources, errors)
        kernel.put_back(self.ledger, indices, torch.cat([kept[:count], lost]), self.form.segments)

    def _all_sent(self, indices: Tensor, sources: Tensor) -> bool:
        count, size = indices.numel(), self.form.segments.size
        if count and indices[-1] == size:  # "nowhere" comes last
            count = int(torch.searchsorted(indices, size))
        return int((sources < indices.numel()).count_nonzero()) == count

    def settle(self, messages: Sequence[Tensor]) -> Tensor:
        rank, shards = self.call.rank, self.shards
        part, result = shards.part(rank), shards.result(rank)
        kernel = kernels.on(self.gradient.device)
        with self.meter.stage("decode"):
            form = self.push_forms[rank]
            entries = [self._part(message, sender) for sender, message in enumerate(messages)]
            key = self._key(PUSH, rank)
            self._remember(first_damage(inspect(form, messages, entries, key, 0)))
            total = self.gradient.new_empty(part.size)
            kernel.add_up(total, entries, self.share, part)
        with self.meter.stage("select"):
            draw = Draw(fold(self.seed, PULL), self.call.step, rank)
            taken = self._selector.withdraw(self.before, total, self.after, result, draw)
            # what a damaged message brought is no sign of a bad gradient
            self.unsound = torch.where(self.damage == FINE, taken.unsound, FINE)
            leave_out(self.unused, taken.indices, taken.values, result)
        with self.meter.stage("encode"):
            form = self.pull_forms[rank]
            dice = self._dice(PULL, rank)
            data, _, errors = write(form, taken.indices, taken.values, dice)
            if errors is not None:
                kernel.put_back(self.after, taken.indices, errors, result)
            return form.write(taken.indices, data, self._key(PULL, sender=rank))

    def pull(self, messages: Sequence[Tensor]) -> None:
        with self.meter.stage("decode"):
            shards, device = self.shards, self.gradient.device
            kernel = kernels.on(device)
            selected, found, whole = [], [], []
            for owner, (form, message) in enumerate(zip(self.pull_forms, messages, strict=True)):
                dice = self._dice(PULL, owner)
                entries = read(form, message, _never, dice, self.ledger.dtype)
                found.append(inspect(form, [message], [entries], self._key(PULL), owner))
                places, values = entries
                selected.append((kernel.collect(places, owner, shards), values[: places.numel()]))
                whole.append(values[places.numel() :])
            self._remember(first_damage(torch.cat(found)))
            kernel.add_up(self.gradient, selected, 1.0, shards.selected)
            for owner, values in enumerate(whole):
                self.gradient[shards.whole_results(owner, device)] = values

    @property
    def _selector(self) -> Selector:
        """What an owner chooses by: the same rule, if it looks at magnitudes."""
        selector = self.selector
        return TopK() if selector.coordination.is_seeded or self.shards.ratio == 1.0 else selector

    def _part(self, message: Tensor, sender: int) -> tuple[Tensor, Tensor]:
        """What a rank sent this owner."""
        rank = self.call.rank

        def coordinates() -> Tensor:
            draw = Draw(self.seed, self.call.step, sender)
            all_of_them = self.selector.coordinates(self.form.segments, draw, message.device)
            places, _ = kernels.on(message.device).deal(all_of_them, self.shards)
            return places[self.shards.slots[rank] : self.shards.slots[rank + 1]]

        form = self.push_forms[rank]
        return read(form, message, coordinates, self._dice(PUSH, sender, rank), self.ledger.dtype)

    def _key(self, way: int, owner: int = 0, sender: int | None = None) -> int:
        """What digests are keyed with: of all messages of one way, or of one sender's."""
        common = fold(self.context.common, way, owner)
        return common if sender is None else join(common, sender)

    def _dice(self, way: int, *ranks: int) -> int:
        """What is random about writing one message."""
        return fold(self.seed, self.call.step, way, *ranks)


def _never() -> Tensor:
    raise AssertionError("owners write their indices")
