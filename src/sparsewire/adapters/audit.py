"""A periodic comparison of the weights of all ranks.

DDP and an exchange keep weights equal only if all ranks take the same steps. A rank that steps its
optimizer under `no_sync`, or calls `backward` more often than the others, drifts away unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..digest import checksum
from ..errors import AttachError, DisagreementError, ExchangeError
from ..message import FINE, REASONS, Context, fingerprint, gather_checked
from ..report import plural
from ..requests import Routine

_SCHEME = fingerprint("audit")  # instead of a scheme's fingerprint


class Audit:
    """One rank's part in the comparisons.

    Arguments:
        every: The number of steps between two comparisons. If None, there are no comparisons.

    Attributes:
        optimizer_steps: The number of steps that this rank's optimizer took; 0 if unknown.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise AttachError(
                f"audit_every must be a number of steps of at least 1, or None for no audit, "
                f"not {every!r}"
            )
        self.every = every
        self.optimizer_steps = 0

    def is_due(self, step: int) -> bool:
        """Return whether to compare weights in this step, before it changes them."""
        return self.every is not None and step > 0 and step % self.every == 0

    def compare(self, weights: Mapping[str, Tensor], step: int, rank: int) -> Routine[None]:
        """Compare the weights of all ranks. All of them raise if any differs.

        Call it after the statuses of the step, which show that all ranks are at this step.
        """
        digests = torch.stack([checksum(weight) for weight in weights.values()]).cpu()
        steps = torch.tensor([self.optimizer_steps])
        payload = torch.cat([steps, digests]).view(torch.uint8)
        context = Context(step, 0, _SCHEME, 0)
        answers, corruption = yield from gather_checked(payload, context, rank, "everyone")
        if int(corruption) != FINE:
            raise ExchangeError(
                f"the audit of rank {int(corruption) // len(REASONS)} before step {step} arrived "
                f"corrupt. The other ranks may have continued, so the group is broken: restart "
                f"all ranks from a checkpoint"
            )
        counts, *rows = zip(*(a.cpu().view(torch.int64).tolist() for a in answers), strict=True)
        odd = {name: _odd(row) for name, row in zip(weights, rows, strict=True)}
        different = [name for name, ranks in odd.items() if ranks]
        if not different and not _odd(counts):
            return
        if different:
            more = f" and {plural(len(different) - 1, 'more parameter')}" if different[1:] else ""
            found = f"{_told(odd[different[0]], len(counts))} in {different[0]}{more}"
        else:
            found = f"{_told(_odd(counts), len(counts))} in the number of optimizer steps"
        if _odd(counts):
            taken = ", ".join(map(str, counts))
            found += f"; the optimizer has taken {taken} steps on ranks 0, 1, …"
        raise DisagreementError(
            f"ranks do not hold the same weights before step {step}: {found}. Some ranks stepped "
            f"an optimizer, called backward, or changed or loaded the model, and the others did "
            f"not: restart all of them from one checkpoint. If their hardware rounds differently, "
            f"pass audit_every=None"
        )


def _odd(row: Sequence[int]) -> list[int]:
    """Return the ranks that differ from the majority; all ranks if there is none."""
    (usual, count), *_ = Counter(row).most_common(1)
    if 2 * count <= len(row):
        return [] if count == len(row) else list(range(len(row)))
    return [rank for rank, value in enumerate(row) if value != usual]


def _told(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks differ"
    one = len(ranks) == 1
    return f"rank{'' if one else 's'} {', '.join(map(str, ranks))} of {size} differ{'s' * one}"
