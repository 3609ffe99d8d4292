"""Ranks that share a machine: dense among themselves, and one of them speaks for all to the others.

The first rank of a node leads. The node's gradients are averaged over the fast links inside the
machine; the leader alone exchanges that average with the leaders of the other nodes, and hands the
mean to its node.
"""

from __future__ import annotations

import datetime
import json
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import errors
from ..errors import AttachError, SparsewireError
from ..report import plural
from ..requests import all_gather
from .distributed import DistributedGroup

Within = dist.ProcessGroup | DeviceMesh | int | Literal["local"]
_NOTE_BYTES = 8192  # of what a leader tells its node
_TEXT = 1000  # characters of an error, each of up to six bytes


# Groups that are free again, for each way to share out the ranks and deadline.
_Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]
_spares: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, list[_Pair]]] = (
    weakref.WeakKeyDictionary()
)


class Node:
    """This rank's machine. `leaders` is the group of those who lead, on a leader, else None."""

    def __init__(
        self,
        within: Within,
        dtype: torch.dtype | None,
        everyone: DistributedGroup,
        device: torch.device,
    ) -> None:
        """All ranks of `everyone` must come; gradients are averaged in `dtype`, or in their own."""
        nodes = _share_out(_members(within, everyone), everyone)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        key = (tuple(map(tuple, nodes)), everyone.timeout)
        self._spare = _spares.setdefault(world, {}).setdefault(key, [])
        self._pair = self._spare.pop() if self._spare else _make_groups(nodes, everyone.timeout)
        self.count = len(nodes)
        self.size = len(nodes[0])
        self._group = DistributedGroup(self._pair[0], everyone.timeout, device, _is_own=True)
        self.leaders: DistributedGroup | None = None
        if self._group.rank == 0:
            self.leaders = DistributedGroup(self._pair[1], everyone.timeout, device, _is_own=True)
            self.leaders.roll_call = everyone.roll_call  # a failure anywhere concerns all ranks
        self._group.roll_call = everyone.roll_call
        self._dtype = dtype
        self._everyone = everyone
        if dtype is not None:
            self._check_dtype(device)

    def _check_dtype(self, device: torch.device) -> None:
        try:
            self._group.sum_up(torch.zeros(1, dtype=self._dtype, device=device))
        except SparsewireError as error:
            raise AttachError(
                f"this backend cannot add up {self._dtype} inside a node: leave within_dtype out"
            ) from error

    def average(self, gradient: Tensor) -> None:
        """Put the mean of all ranks of this node into the gradient."""
        self._follow()
        scaled = gradient.to(self._dtype or gradient.dtype) * (1 / self.size)
        gradient.copy_(self._group.sum_up(scaled))

    def share(self, gradient: Tensor) -> None:
        """Give all ranks of this node what its leader has in the gradient."""
        self._group.broadcast([gradient])

    def ask(self, work: Callable[[DistributedGroup], Any]) -> Any:
        """What `work` returns to the leader, who alone does it, or raises, on all ranks alike.

        It is to return what JSON can say in a few words.
        """
        self._follow()
        note: dict[str, Any] = {}
        if self.leaders is not None:
            try:
                note["result"] = work(self.leaders)
            except errors.ExchangeError:
                raise  # the roll call reaches the others
            except SparsewireError as error:
                note["error"] = [type(error).__name__, str(error)[:_TEXT]]
        data = json.dumps(note).encode().ljust(_NOTE_BYTES)
        said = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._group.broadcast([said])
        note = json.loads(said.numpy().tobytes())
        if "error" in note:
            name, text = note["error"]
            raise getattr(errors, name)(text)
        return note["result"]

    def _follow(self) -> None:
        for group in (self._group, self.leaders):
            if group is not None:
                group.doing = self._everyone.doing

    def close(self) -> None:
        """Leave both groups; the next node of these ranks takes them over."""
        self._group.close()
        if self.leaders is not None:
            self.leaders.close()
        self._spare.append(self._pair)


def _members(within: Within, everyone: DistributedGroup) -> list[int]:
    """The global ranks of this node, however they were given."""
    if isinstance(within, DeviceMesh):
        if within.ndim != 1:
            raise AttachError(
                f"within takes one dimension of a mesh, and this one has {within.ndim}: "
                f"write within=mesh['local'] with the name of the one inside a machine"
            )
        within = within.get_group()
    if isinstance(within, dist.ProcessGroup):
        return dist.get_process_group_ranks(within)
    size = within
    if size == "local":
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not text.isdigit():
            raise AttachError(
                "within='local' takes the number of ranks on a machine from LOCAL_WORLD_SIZE, "
                "which torchrun sets and which is not set here: write it, as within=8"
            )
        size = int(text)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or everyone.size % size:
        raise AttachError(
            f"within={size!r} makes no sense for {plural(everyone.size, 'rank')}: it is the number "
            f"of ranks on every machine, a process group of them, one dimension of a DeviceMesh, "
            f"or 'local'"
        )
    first = everyone.rank // size * size
    return everyone.members[first : first + size]


def _share_out(mine: list[int], everyone: DistributedGroup) -> list[list[int]]:
    """All nodes, as their global ranks; refused unless they share the ranks out evenly."""
    if everyone.size != dist.get_world_size():
        raise AttachError("within= needs a model over all ranks, since all must make the groups")
    row = torch.full((everyone.size,), -1)
    row[: len(mine)] = torch.tensor(mine)
    answers = everyone.wait(everyone.start(all_gather(row.view(torch.uint8))))
    rows = [answer.cpu().view(torch.int64).tolist() for answer in answers]
    nodes = sorted({tuple(rank for rank in row if rank >= 0) for row in rows})
    if len({len(node) for node in nodes}) > 1 or sum(map(len, nodes)) != everyone.size:
        raise AttachError(
            f"the nodes given by within= do not share out the model's {everyone.size} ranks "
            f"evenly: every rank must be in one node, and all nodes must have as many ranks"
        )
    return [list(node) for node in nodes]


def _make_groups(nodes: list[list[int]], timeout: float) -> _Pair:
    """The ranks of this node, and those in the same place of all nodes.

    All ranks make all groups, in one order, and belong to as many: torch names groups by that.
    """
    limit = datetime.timedelta(seconds=timeout)
    own: list[dist.ProcessGroup] = []
    for sets in (nodes, [list(place) for place in zip(*nodes, strict=True)]):
        for ranks in sets:
            group = dist.new_group(ranks, timeout=limit, group_desc="sparsewire")
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own.append(group)
    return own[0], own[1]
