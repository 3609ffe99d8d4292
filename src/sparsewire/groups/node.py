"""Ranks that share a machine: dense among themselves, and one of them speaks for all to the others.

The first rank of a node leads. The node's gradients are averaged over the fast links inside the
machine; the leader alone exchanges that average with the leaders of the other nodes, and hands the
mean to its node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import errors
from ..collectives import Gather
from ..errors import AttachError, SparsewireError
from .distributed import DistributedGroup

Within = dist.ProcessGroup | DeviceMesh | int | Literal["local"]
_NOTE_BYTES = 2048  # of what a leader tells its node


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
        group = DistributedGroup(_process_group(within, everyone), everyone.timeout, device)
        leaders = _find_leaders(group, everyone)
        self.count = len(leaders)
        self.size = group.size
        self.leaders: DistributedGroup | None = None
        if group.rank == 0:
            between = dist.new_group(leaders, use_local_synchronization=True)
            self.leaders = DistributedGroup(between, everyone.timeout, device)
            self.leaders.roll_call = everyone.roll_call  # a failure anywhere concerns all ranks
        group.roll_call = everyone.roll_call
        self._group = group
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

        It is to return what JSON can say.
        """
        self._follow()
        note: dict[str, Any] = {}
        if self.leaders is not None:
            try:
                note["result"] = work(self.leaders)
            except errors.ExchangeError:
                raise  # the roll call reaches the others
            except SparsewireError as error:
                note["error"] = [type(error).__name__, str(error)]
        data = json.dumps(note).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES)
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
        """Leave both groups."""
        self._group.close()
        if self.leaders is not None:
            self.leaders.close()


def _process_group(within: Within, everyone: DistributedGroup) -> dist.ProcessGroup:
    """The ranks of this node, however they were given."""
    if isinstance(within, DeviceMesh):
        if within.ndim != 1:
            raise AttachError(
                f"within takes one dimension of a mesh, and this one has {within.ndim}: "
                f"write within=mesh['local'] with the name of the one inside a machine"
            )
        return within.get_group()
    if isinstance(within, dist.ProcessGroup):
        return within
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
            f"within={size!r} makes no sense for {everyone.size} ranks: it is the number of ranks "
            f"on every machine, a process group of them, one dimension of a DeviceMesh, or 'local'"
        )
    first = everyone.rank // size * size
    members = everyone.members[first : first + size]
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _find_leaders(group: DistributedGroup, everyone: DistributedGroup) -> list[int]:
    """The leaders of all nodes, by their global rank; refused unless the nodes are alike."""
    own = torch.tensor([group.members[0], group.size, everyone.members[everyone.rank]])
    answers = everyone.answer(Gather(own.view(torch.uint8)))
    said = [tuple(answer.cpu().view(torch.int64).tolist()) for answer in answers]
    leaders = sorted({leader for leader, _, _ in said})
    sizes = {size for _, size, _ in said}
    per_node = [sum(leader == other for other, _, _ in said) for leader in leaders]
    if len(sizes) > 1 or set(per_node) != sizes or not set(leaders) <= set(everyone.members):
        raise AttachError(
            f"the nodes given by within= do not share out the model's {everyone.size} ranks "
            f"evenly: every rank must be in one node, and all nodes must have as many ranks"
        )
    return leaders
