"""What happens in trial number N of a seed, and with which form of training."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

DEADLINE = 4.0  # seconds, in trials that wait for it
MOST = 2.5  # times as long at most, if the machine is busy
AMPLE = 60.0  # seconds, in trials where no rank may wait for the deadline


@dataclass(frozen=True)
class Form:
    """One way to train.

    Arguments:
        family: what the results are counted under.
        scheme: what is attached.
        ddp: whether the model is under DDP.
        adam: AdamW, else SGD.
        options: of `attach`.
    """

    family: str
    scheme: str
    ddp: bool = True
    adam: bool = False
    options: Mapping[str, Any] | None = None

    @property
    def updates(self) -> bool:
        """Whether updates are exchanged."""
        return not self.ddp or self.adam

    @property
    def round(self) -> int:
        """Local steps until what a rank does now has reached all others."""
        options = self.options or {}
        return int(options.get("every", 1) * (1 + options.get("delay", 0)))


FORMS = {
    "ddp": Form("DDP", "TopK(0.05)"),
    "intra-node": Form("intra_node", "TopK(0.05)", options={"intra_node": 2}),
    "sharded": Form("sharded", "Scheme(TopK(0.05), collective=Sharded())"),
    "top-block": Form("negotiated", "TopBlock(0.05)"),
    "union": Form("negotiated", "UnionTopK(0.05)"),
    "leader": Form("negotiated", "LeaderTopK(0.05)"),
    "local": Form("local steps", "TopK(0.1)", ddp=False, options={"every": 3}),
    "delayed": Form("delay=1", "TopK(0.1)", ddp=False, options={"every": 2, "delay": 1}),
    "optimizer": Form("optimizer", "TopK(0.05)", adam=True),
}
FAMILIES = list(dict.fromkeys(form.family for form in FORMS.values()))


@dataclass(frozen=True)
class Trial:
    """Everything that a seed decides about one trial.

    Arguments:
        world: the number of ranks.
        victim: the rank that the fault is about.
        other: another rank.
        host: where the store lives: on rank 0, as without torchrun, or in an agent's process.
        at: the step in which it happens.
        delay: seconds after that step has begun.
        ending: how ranks end after an error: the exception goes uncaught, or `sys.exit(3)`.
        choice: a number that picks between variants of the fault.
        timeout: of `attach`, in seconds.
    """

    seed: int
    number: int
    fault: str
    form: str
    world: int
    victim: int
    other: int
    host: Literal["rank 0", "agent"]
    at: int
    delay: float
    ending: Literal["raise", "exit"]
    choice: int
    timeout: float

    @property
    def how(self) -> Form:
        """The form of training."""
        return FORMS[self.form]

    @property
    def others(self) -> list[int]:
        """All ranks but the victim."""
        return [rank for rank in range(self.world) if rank != self.victim]

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def draw(seed: int, number: int, stretch: float = 1.0) -> Trial:
    """Return trial `number` of a seed; the kinds of faults take turns.

    Arguments:
        stretch: what deadlines are multiplied with, since the machine is busy.
    """
    from .faults import FAULTS

    chance = random.Random(f"{seed}/{number}")
    fault = FAULTS[number % len(FAULTS)]
    family = chance.choice([f for f in FAMILIES if fault.suits(f)])
    form = chance.choice([name for name, each in FORMS.items() if each.family == family])
    world = 4 if family == "intra_node" else chance.choice([3, 4])
    victim, other = chance.sample(range(world), 2)
    host: Literal["rank 0", "agent"] = "agent" if chance.random() < 0.5 else "rank 0"
    return Trial(
        seed=seed,
        number=number,
        fault=fault.name,
        form=form,
        world=world,
        victim=victim,
        other=other,
        host=fault.host or host,
        at=chance.randrange(4, 14),
        delay=chance.random() * 0.04,
        ending="raise" if chance.random() < 0.5 else "exit",
        choice=chance.randrange(1 << 30),
        timeout=DEADLINE * min(stretch, MOST) if fault.waits else AMPLE * stretch,
    )
