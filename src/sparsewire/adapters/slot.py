"""DDP's one hook slot. A hook cannot be taken out of it again, so ours stays and is filled anew.

(No postponed annotations here: DDP inspects the hook's signature for the real classes.)
"""

import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError


class Taker(Protocol):
    """Whoever handles the buckets."""

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]: ...


class Slot:
    """The hook that sits in one model's slot: hands buckets to its taker, or reduces plainly."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.taker: Taker | None = None
        self._group = group

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.taker is None:
            return allreduce_hook(self._group, bucket)
        return self.taker.take(bucket)


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, Slot]" = weakref.WeakKeyDictionary()


def slot_of(ddp: DistributedDataParallel) -> Slot:
    """The model's slot with our hook in it; refused if something else has taken it."""
    if ddp in _slots:
        return _slots[ddp]
    slot = Slot(ddp.process_group)
    try:
        ddp.register_comm_hook(None, slot.hook)
    except RuntimeError as error:
        raise AttachError(
            "DDP has one slot for a communication hook, and it is taken: by another "
            "register_comm_hook (fp16, PowerSGD …), by DDP(mixed_precision=…) or by an optimizer "
            "that runs in backward. Build the model's DDP without that and attach again; for "
            "16-bit values on the wire use Scheme(…, values=BFloat16())"
        ) from error
    _slots[ddp] = slot
    return slot
