"""A sharded parameter server: every rank owns a share of the coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..codecs import EliasFano
from ..errors import SchemeError
from ..layout import Entries, leave_out, of_one_length
from ..message import FINE, first_corruption
from ..randomness import RandomKey, fold, join
from ..requests import Routine, all_gather, all_to_all, gather_traffic
from ..segments import Segments
from ..selectors import Accumulation, Selector, TopK, owner_selector
from ..shards import Shards
from ..state import OWNED, RESIDUAL, StateField
from ..workspace import Workspace
from .base import Coding, Collective, CollectivePlan, Transfer

PUSH, PULL = 1, 2  # directions, as parts of the keys of checksums


@dataclass(frozen=True, repr=False)
class Sharded(Collective):
    """Every rank owns a share of the coordinates: a parameter server that is sparse both ways.

    Every rank sends each owner the entries that belong to that owner. The owner sums them, adds its
    own residual, and sends the largest sums to all ranks. The rest stays in its residual. The bytes
    that a rank receives do not grow with the number of ranks. It works with every codec, and with
    every selector that does not negotiate.

    Arguments:
        pull_ratio: The share of its coordinates that an owner sends back. If None, as many as a
            rank sends. With 1.0, all that arrived, which grows with the number of ranks.

    >>> import sparsewire as sw
    >>> for collective in (sw.AllGather(), sw.Sharded()):
    ...     scheme = sw.Scheme(sw.TopK(0.01), collective=collective)
    ...     sent = [sw.explain(scheme, {"w": (4096, 4096)}, w).sent_bytes for w in (2, 8, 64)]
    ...     print([f"{n / 1e6:.1f} MB" for n in sent])
    ['0.9 MB', '6.0 MB', '53.6 MB']
    ['1.0 MB', '1.7 MB', '1.9 MB']

    Reference: Aji & Heafield 2017, section 3.
    """

    pull_ratio: float | None = None

    adds = False
    fields = (StateField(OWNED, extent="owned", follows_lr=True),)

    def __post_init__(self) -> None:
        ratio = self.pull_ratio
        if ratio is None:
            return
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise SchemeError(
                f"Sharded's pull_ratio must be above 0 and at most 1, as in "
                f"Sharded(pull_ratio=0.01), not {ratio!r}. It is the share of its coordinates that "
                f"an owner sends back"
            )
        object.__setattr__(self, "pull_ratio", float(ratio))

    def plan(
        self, coding: Coding, segments: Segments, world_size: int, dtype: torch.dtype
    ) -> ShardedPlan:
        shards = Shards(segments, world_size, self.pull_ratio, coding.selector.clustered)
        return ShardedPlan(coding, shards, self.owner_selector(coding.selector))

    def owner_selector(self, selector: Selector) -> Selector:
        # if all that arrived goes back, there is nothing to choose
        return TopK() if self.pull_ratio == 1.0 else owner_selector(selector)

    def why(self, coding: Coding) -> str:
        back = "all of it" if self.pull_ratio == 1.0 else "the largest of it"
        return f"every worker sums the share that it owns, and sends {back} back to all"


class ShardedPlan(CollectivePlan):
    """Entries to their owners, and from every owner the largest sums to all ranks."""

    def __init__(self, coding: Coding, shards: Shards, owner_selector: Selector) -> None:
        self._coding = coding
        self._shards = shards
        self._owner_selector = owner_selector
        world_size = shards.world_size
        self.push = of_one_length(
            coding.indices, coding.values, [shards.part(owner) for owner in range(world_size)]
        )
        written = coding.indices if coding.indices.written else EliasFano()
        self.pull = of_one_length(
            written, coding.values, [shards.result(owner) for owner in range(world_size)]
        )
        self.message_bytes = {"push": self.push[0].nbytes, "pull": self.pull[0].nbytes}
        self.traffic = sum(
            gather_traffic(nbytes, world_size) for nbytes in self.message_bytes.values()
        )

    def owned(self, rank: int) -> Segments:
        return self._shards.result(rank)

    def run(self, entries: Entries, transfer: Transfer) -> Routine[None]:
        parts = yield all_to_all(self._write_parts(entries, transfer))
        results = yield all_gather(self._answer(parts, transfer))
        self._read_results(results, transfer)

    # -- a rank's entries to their owners --------------------------------------------------------

    def _write_parts(self, entries: Entries, transfer: Transfer) -> Tensor:
        """Return this rank's messages to all owners, a row each."""
        with transfer.counters.stage("encode"):
            indices, values = entries
            shards, work = self._shards, transfer.work
            count, device = indices.numel(), values.device
            places, sources = kernels.on(device).deal(indices, shards, work)
            selected = torch.cat([values[:count], values.new_zeros(1)])  # and one for free slots
            numbers = selected.index_select(0, sources)
            dense_sent = work.kept(
                self,
                ("dense sent", device),
                lambda: [self._dense_sent(n, device, work) for n in range(shards.world_size)],
            )
            rows, errors = [], []
            lost = values.new_zeros(values.numel() - count)
            for owner, (layout, dense) in enumerate(zip(self.push, dense_sent, strict=True)):
                slots = slice(shards.slots[owner], shards.slots[owner + 1])
                part = places[slots], torch.cat([numbers[slots], values[count:][dense]])
                rounding = _rounding_key(transfer, PUSH, transfer.rank, owner)
                data, _, changed = layout.encode_values(part, rounding, work)
                key = _message_key(transfer, PUSH, owner, transfer.rank)
                rows.append(layout.pack(part[0], data, key))
                if changed is not None:
                    capacity = slots.stop - slots.start
                    errors.append(changed[:capacity])
                    lost[dense] = changed[capacity:]
            error = torch.cat(errors) if errors else None
            self._put_back(indices, selected, sources, error, lost, transfer)
            return torch.stack(rows)

    def _put_back(
        self,
        indices: Tensor,
        kept: Tensor,
        sources: Tensor,
        errors: Tensor | None,
        lost: Tensor,
        transfer: Transfer,
    ) -> None:
        """Return to the residual what found no slot, and what a codec changed."""
        count = indices.numel()
        if errors is None:
            if kept.device.type == "cpu" and self._all_sent(indices, sources):
                return
            kept.index_fill_(0, sources, 0)
        else:
            kept.index_copy_(0, sources, errors)
        transfer.put_back(indices, torch.cat([kept[:count], lost]), self._shards.segments)

    def _all_sent(self, indices: Tensor, sources: Tensor) -> bool:
        count, size = indices.numel(), self._shards.segments.size
        if count and indices[-1] == size:  # the padding index comes last
            count = int(torch.searchsorted(indices, size))
        return int((sources < indices.numel()).count_nonzero()) == count

    # -- as an owner -----------------------------------------------------------------------------

    def _answer(self, messages: Sequence[Tensor], transfer: Transfer) -> Tensor:
        """Add up what all ranks sent this owner, and return its message to all of them."""
        rank, counters = transfer.rank, transfer.counters
        state, work = transfer.state, transfer.work
        part, result = self._shards.part(rank), self._shards.result(rank)
        kernel = kernels.on(transfer.gradient.device)
        with counters.stage("decode"):
            received = [self._read_part(m, sender, transfer) for sender, m in enumerate(messages)]
            key = _message_key(transfer, PUSH, rank)
            transfer.note(first_corruption(self.push[rank].inspect(messages, received, key, 0)))
            total = transfer.gradient.new_empty(part.size)
            kernel.add_up(total, received, transfer.share, part, work)
        with counters.stage("select"):
            after = state.after[OWNED]
            accumulation = Accumulation(state.before.get(OWNED), total, after)
            draw = RandomKey(fold(transfer.key.seed, PULL), transfer.key.step, rank)
            selection = self._owner_selector.select(
                accumulation, result, draw, state.for_owner, work
            )
            # values of a corrupt message say nothing about the gradient
            transfer.non_finite = torch.where(
                transfer.corruption == FINE, selection.non_finite, FINE
            )
            entries = selection.indices, selection.values
            leave_out(transfer.unused, entries, result)
        with counters.stage("encode"):
            layout = self.pull[rank]
            rounding = _rounding_key(transfer, PULL, rank)
            data, _, errors = layout.encode_values(entries, rounding, work)
            if errors is not None:
                kernel.put_back(after, selection.indices, errors, result, work)
            return layout.pack(selection.indices, data, _message_key(transfer, PULL, sender=rank))

    def _read_part(self, message: Tensor, sender: int, transfer: Transfer) -> Entries:
        """Return what a rank sent this owner."""
        rank, shards, device = transfer.rank, self._shards, message.device
        work = transfer.work

        def coordinates() -> Tensor:
            key = transfer.random_key(sender)
            selected = self._coding.selector.coordinates(shards.segments, key, device, work)
            places, _ = kernels.on(device).deal(selected, shards, work)
            return places[shards.slots[rank] : shards.slots[rank + 1]]

        rounding = _rounding_key(transfer, PUSH, sender, rank)
        dtype = transfer.state.after[RESIDUAL].dtype
        return self.push[rank].decode(message, coordinates, rounding, dtype, work)

    # -- from all owners -------------------------------------------------------------------------

    def _read_results(self, messages: Sequence[Tensor], transfer: Transfer) -> None:
        """Write what all owners answered into the gradient."""
        with transfer.counters.stage("decode"):
            shards, gradient, work = self._shards, transfer.gradient, transfer.work
            kernel = kernels.on(gradient.device)
            dtype = transfer.state.after[RESIDUAL].dtype
            selected, found, dense = [], [], []
            for owner, (layout, message) in enumerate(zip(self.pull, messages, strict=True)):
                rounding = _rounding_key(transfer, PULL, owner)
                entries = layout.decode(message, _never, rounding, dtype, work)
                key = _message_key(transfer, PULL)
                found.append(layout.inspect([message], [entries], key, owner))
                places, values = entries
                indices = kernel.collect(places, owner, shards, work)
                selected.append((indices, values[: places.numel()]))
                dense.append(values[places.numel() :])
            transfer.note(first_corruption(torch.cat(found)))
            kernel.add_up(gradient, selected, 1.0, shards.selected, work)
            dense_places = work.kept(
                self,
                ("dense places", gradient.device),
                lambda: [
                    self._dense_places(n, gradient.device, work) for n in range(shards.world_size)
                ],
            )
            for at, values in zip(dense_places, dense, strict=True):
                gradient[at] = values

    # -- what is sent densely --------------------------------------------------------------------

    def _dense_sent(self, owner: int, device: torch.device, work: Workspace) -> Tensor:
        """Return which of a rank's dense values are the owner's, counted from the first."""
        places = self._dense_coordinates(self._shards.part(owner), owner, work)
        runs = torch.tensor(self._shards.segments.dense_runs, dtype=torch.int64).view(-1, 2)
        starts, sizes = runs[:, 0].contiguous(), runs[:, 1] - runs[:, 0]
        run = torch.bucketize(places, starts, right=True) - 1
        return ((sizes.cumsum(0) - sizes)[run] + places - starts[run]).to(device)

    def _dense_places(self, owner: int, device: torch.device, work: Workspace) -> Tensor:
        """Return the coordinates of the values that an owner sends back densely."""
        return self._dense_coordinates(self._shards.result(owner), owner, work).to(device)

    def _dense_coordinates(self, shard: Segments, owner: int, work: Workspace) -> Tensor:
        """Return the coordinates of a shard's dense values in the gradient."""
        runs = [torch.arange(start, stop) for start, stop in shard.dense_runs]
        local = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
        return kernels.on(local.device).collect(local, owner, self._shards, work)


def _message_key(transfer: Transfer, way: int, owner: int = 0, sender: int | None = None) -> int:
    """Return the key of checksums: of all messages in one direction, or of one sender's."""
    common = fold(transfer.context.common, way, owner)
    return common if sender is None else join(common, sender)


def _rounding_key(transfer: Transfer, way: int, *ranks: int) -> int:
    """Return the key of the random rounding of one message."""
    return fold(transfer.key.seed, transfer.key.step, way, *ranks)


def _never() -> Tensor:
    raise AssertionError("owners send their indices")
