"""Whether all ranks still hold the same weights, which they compare every so many steps.

DDP and an exchange only keep ranks together that take the same steps. One rank that steps its
optimizer under `no_sync`, or calls `backward` once more than the others, drifts away unseen.
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

_SCHEME = fingerprint("audit")  # in the place of a scheme's


class Audit:
    """What one rank compares with the others.

    Arguments:
        every: steps between two comparisons; None for none.
        optimizer_steps: taken on this rank so far; stays 0 where no optimizer is known.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise AttachError(
                f"audit_every is a number of steps of at least 1, or None for no audit, "
                f"not {every!r}"
            )
        self.every = every
        self.optimizer_steps = 0

    def is_due(self, step: int) -> bool:
        """Whether weights are compared in this step, which has not changed them yet."""
        return self.every is not None and step > 0 and step % self.every == 0

    def compare(self, weights: Mapping[str, Tensor], step: int, rank: int) -> Routine[None]:
        """Compare with all other ranks; every one of them raises if any differs.

        It comes after the statuses of the step, which say that all ranks are at this step.
        """
        digests = torch.stack([checksum(weight) for weight in weights.values()]).cpu()
        steps = torch.tensor([self.optimizer_steps])
        payload = torch.cat([steps, digests]).view(torch.uint8)
        context = Context(step, 0, _SCHEME, 0)
        answers, corruption = yield from gather_checked(payload, context, rank, "everyone")
        if int(corruption) != FINE:
            raise ExchangeError(
                f"the audit of rank {int(corruption) // len(REASONS)} before step {step} arrived "
                f"corrupt. The other ranks may have gone on, so the group is broken: restart all "
                f"ranks from a checkpoint"
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
            found = f"{_told(_odd(counts), len(counts))} in how often the optimizer has stepped"
        if _odd(counts):
            taken = ", ".join(map(str, counts))
            found += f"; the optimizer has taken {taken} steps on ranks 0, 1, …"
        raise DisagreementError(
            f"ranks do not hold the same weights before step {step}: {found}. Some ranks alone "
            f"stepped an optimizer, called backward once more, or changed or loaded the model: "
            f"restart all of them from one checkpoint. If their hardware rounds differently, pass "
            f"audit_every=None"
        )


def _odd(row: Sequence[int]) -> list[int]:
    """The ranks that differ from most others; all of them if there is no majority."""
    (usual, count), *_ = Counter(row).most_common(1)
    if 2 * count <= len(row):
        return [] if count == len(row) else list(range(len(row)))
    return [rank for rank, value in enumerate(row) if value != usual]


def _told(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks differ"
    one = len(ranks) == 1
    return f"rank{'' if one else 's'} {', '.join(map(str, ranks))} of {size} differ{'s' * one}"
