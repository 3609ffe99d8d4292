"""Each kind of fault: what is promised, how it is done, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

from sparsewire.groups.liveness import GRACE, LIMIT
from sparsewire.tools.lab import Lab, obstacle

from ..patience import patience
from .rank import SAVES
from .stage import Setting, Stage, Zygote
from .trials import FAMILIES, Trial

LONG = 100_000  # steps, which a fault cuts short
SHORT = 36
GATE = 40  # steps after the fault, at which ranks wait until it is over
REFERENCE = 72  # steps that a run without a fault takes, to compare with
DISK = 16 << 20  # three checkpoints
SOON = 15.0  # seconds in which all know of a dead process, as a limit against hangs


def lacking(need: str | None) -> str | None:
    """Why this machine cannot do what a fault needs; None if it can."""
    if need is None:
        return None
    if os.geteuid() != 0:
        return "needs root"
    if need == "links":
        return obstacle()
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "needs unshare"


@dataclass
class Scene:
    """Where a trial is played, and what came of it.

    Arguments:
        reference: the weights after each step of a run without a fault; it is called only if
            they are needed.
    """

    trial: Trial
    zygote: Zygote
    folder: Path
    reference: Callable[[], Sequence[str]]
    broken: list[str] = field(default_factory=list)
    known: float | None = None  # seconds from the fault until all others had raised
    ended: float | None = None  # seconds from the fault until the last of them had ended
    load: float = 0.0
    _runs: int = 0

    @property
    def disk(self) -> Path:
        """Where checkpoints go."""
        return self.folder / "disk"

    def must(self, holds: object, promise: str) -> None:
        """Note a promise that was broken."""
        if not holds:
            self.broken.append(promise)

    def stage(
        self, steps: int = LONG, *, zygote: Zygote | None = None, **how: Unpack[Setting]
    ) -> Stage:
        """Another run."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        return Stage(self.trial, zygote or self.zygote, folder, self.disk, steps, **how)

    # -- what must hold after any run ------------------------------------------------------------

    def check_bits(self, stage: Stage, is_reference: bool = True) -> None:
        """All ranks held the same bits after every step, which are those without a fault."""
        found: dict[int, set[str]] = {}
        for rank in range(self.trial.world):
            for each in stage.all_of(rank, "step"):
                found.setdefault(each["n"], set()).add(each["weights"])
        split = [step for step, digests in found.items() if len(digests) > 1]
        self.must(not split, f"ranks hold different weights after steps {split[:5]}")
        expected = self.reference() if is_reference else ()
        other = [s for s, d in found.items() if s < len(expected) and d != {expected[s]}]
        self.must(not other, f"weights differ from a run without a fault after steps {other[:5]}")

    def check_codes(self, stage: Stage, ranks: Sequence[int], *codes: int) -> None:
        """These ranks ended with one of these codes."""
        for rank in ranks:
            end = stage.end(rank)
            self.must(
                end is not None and end.code in codes,
                f"rank {rank} ended with {end and end.code}, not {codes}: {stage.log(rank)}",
            )

    def check_errors(
        self,
        stage: Stage,
        ranks: Sequence[int],
        began: float,
        limit: float,
        names: str = "",
        guilty: Sequence[int] = (),
    ) -> None:
        """These ranks raised an ExchangeError that names the guilty one, and ended in order.

        Arguments:
            began: when the fault happened.
            limit: seconds from then until all know.
            names: what the error must say, as a pattern.
            guilty: the only ranks that it may call dead or out of reach.
        """
        in_time = stage.wait_for(lambda: stage.has_ended(*ranks), patience(limit) + stage.limit / 2)
        self.must(in_time, f"not all of ranks {list(ranks)} have ended")
        self.load = os.getloadavg()[0]
        times = []
        for rank in ranks:
            error = stage.find(rank, "error")
            if error is None:
                last = stage.events.get(f"rank-{rank}", [{}])[-1]
                self.must(False, f"rank {rank} saw no error, only {last}: {stage.log(rank)}")
                continue
            times.append(error["time"])
            text = _short(error)
            self.must(error["kind"] == "ExchangeError", f"rank {rank} raised {text}")
            self.must(re.search(names, error["text"]), f"rank {rank} does not say {names}: {text}")
            wrong = _blamed(error["text"]) - set(guilty)
            self.must(not guilty or not wrong, f"rank {rank} wrongly blames {wrong}: {text}")
            self._check_trace(stage, rank, error)
        self.check_codes(stage, ranks, 3 if self.trial.ending == "exit" else 1)
        if len(times) == len(ranks):
            self.known = max(times) - began
            ends = [end.time for rank in ranks if (end := stage.end(rank))]
            self.ended = max(ends, default=0.0) - began
            self.must(
                self.known <= patience(limit),
                f"it took {self.known:.1f} s until all knew, more than {limit:g}",
            )

    def _check_trace(self, stage: Stage, rank: int, error: dict[str, object]) -> None:
        """A failed step changed nothing, and a broken group says so again."""
        last = stage.find(rank, "step")
        if last is not None and "weights" in error:
            for what in ("weights", "memory"):
                self.must(last[what] == error[what], f"rank {rank} changed its {what} in the end")
        again = stage.find(rank, "again")
        self.must(again is None or again["raised"], f"rank {rank} went on in a broken group")
        self.must(
            again is None or again["seconds"] < patience(5),
            f"rank {rank} took {again and again['seconds']} s to say again that it is broken",
        )

    def check_done(self, stage: Stage, is_reference: bool = True) -> None:
        """All ranks reached the end with the bits of a run without a fault."""
        everyone = range(self.trial.world)
        self.must(stage.wait_for(lambda: stage.has_ended(*everyone)), "not all ranks have ended")
        self.check_codes(stage, everyone, 0)
        self.must(all(stage.find(rank, "done") for rank in everyone), "not all ranks were done")
        self.check_bits(stage, is_reference)


class Fault:
    """A kind of fault.

    Arguments:
        name: in the table.
        promise: what is promised, in the table.
        waits: whether ranks find out by the deadline.
        host: where the store must live.
        need: what the machine must be able to do: 'links' or 'disk'.
        families: the forms of training that it can happen to.
    """

    name: ClassVar[str]
    promise: ClassVar[str]
    waits: ClassVar[bool] = False
    host: ClassVar[Literal["rank 0", "agent"] | None] = None
    need: ClassVar[str | None] = None
    families: ClassVar[Sequence[str]] = FAMILIES

    def suits(self, family: str) -> bool:
        """Whether it can happen to this form of training."""
        return family in self.families

    def play(self, scene: Scene) -> None:
        """Do it, and note which promises were broken."""
        raise NotImplementedError


def _short(error: Mapping[str, Any] | None) -> str:
    """An error's kind and the end of its text, which is the original one."""
    if error is None:
        return "nothing"
    return f"{error['kind']}: {error['text'].split(' / ')[-1][:400]}"


def _blamed(text: str) -> set[int]:
    """The ranks that an error calls dead or out of reach."""
    found = re.findall(r"ranks? ([\d, ]+) of \d+ did not answer", text)
    return {int(rank) for ranks in found for rank in ranks.split(",")}


def _named(trial: Trial, guilty: int) -> str:
    """What an error must say of a rank that is gone or out of reach."""
    if trial.host == "rank 0" and guilty == 0:
        return r"the store (is out of reach|does not answer)|rank 0 of \d+ did not"
    return rf"rank {guilty} of \d+ (did not (answer|come)|is behind)|reported by rank {guilty}:"


def _deadline(trial: Trial) -> float:
    """Seconds until a rank that waits must know."""
    return trial.timeout + GRACE + LIMIT


class Kill(Fault):
    name = "kill -9"
    promise = "all others raise an error that names the rank, and end"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            began = stage.strike(trial.victim, signal.SIGKILL)
            names = _named(trial, trial.victim)
            scene.check_errors(stage, trial.others, began, SOON, names, [trial.victim])
            scene.check_bits(stage)


class KillAtAttach(Fault):
    name = "kill -9 while attaching"
    promise = "`attach`, or the first exchange, raises on all others by the deadline"
    waits = True

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            time.sleep(trial.delay * 2)
            began = stage.strike(trial.victim, signal.SIGKILL)
            names = _named(trial, trial.victim)
            scene.check_errors(stage, trial.others, began, _deadline(trial), names)


class Leave(Fault):
    name = "leaving"
    promise = "as for kill -9, if a rank leaves training by `sys.exit` or `os._exit`"

    def play(self, scene: Scene) -> None:
        _play_inside(scene, own_codes=(7,))


class UserException(Fault):
    name = "exception"
    promise = "as for kill -9, if user code raises in data, forward, backward or optimizer"

    def play(self, scene: Scene) -> None:
        _play_inside(scene, own_codes=(1, 3))


def _play_inside(scene: Scene, own_codes: Sequence[int]) -> None:
    """A rank does it to itself."""
    trial = scene.trial
    with scene.stage() as stage:
        stage.begin()
        stage.wait_for(lambda: stage.find(trial.victim, "fault") or stage.has_ended(trial.victim))
        fault = stage.find(trial.victim, "fault")
        scene.must(fault, "the fault could not be done")
        began = fault["time"] if fault else time.monotonic()
        names = _named(trial, trial.victim)
        scene.check_errors(stage, trial.others, began, SOON, names, [trial.victim])
        stage.wait_for(lambda: stage.has_ended(trial.victim))
        scene.check_codes(stage, [trial.victim], *own_codes)
        scene.check_bits(stage)


class Interrupt(Fault):
    name = "Ctrl-C"
    promise = "an interrupted rank raises `KeyboardInterrupt` at once, and the others raise and end"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        everyone = list(range(trial.world))
        is_all = bool(trial.choice % 2)  # as a terminal does
        with scene.stage() as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            hit = everyone if is_all else [trial.victim]
            began = max(stage.strike(rank, signal.SIGINT) for rank in hit)
            if not is_all:
                names = _named(trial, trial.victim)
                scene.check_errors(stage, trial.others, began, SOON, names, [trial.victim])
            stage.wait_for(lambda: stage.has_ended(*everyone))
            scene.must(stage.has_ended(*everyone), "not all ranks have ended")
            scene.load = os.getloadavg()[0]
            for rank in hit:
                raised = stage.find(rank, "raised")
                kinds = ["KeyboardInterrupt"]
                if is_all:  # another rank's end may be seen first
                    kinds += ["RuntimeError", "ExchangeError", "SystemExit"]
                scene.must(raised and raised["kind"] in kinds, f"rank {rank} raised {raised}")
                if raised is not None:
                    took = raised["time"] - began
                    scene.must(took <= patience(SOON), f"rank {rank} took {took:.1f} s")
                    scene.known = max(scene.known or 0.0, took)
            scene.check_codes(stage, hit, -signal.SIGINT, 1, *((3,) if is_all else ()))
            ends = [end.time for rank in everyone if (end := stage.end(rank))]
            scene.ended = max(ends, default=began) - began
            scene.check_bits(stage)


class Freeze(Fault):
    name = "SIGSTOP"
    promise = "all others raise at the deadline and name the rank, which ends if it wakes up"
    waits = True

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            began = stage.strike(trial.victim, signal.SIGSTOP)
            names = _named(trial, trial.victim)
            scene.check_errors(stage, trial.others, began, _deadline(trial), names, [trial.victim])
            if trial.choice % 2:
                stage.strike(trial.victim, signal.SIGCONT)
                stage.wait_for(lambda: stage.has_ended(trial.victim))
                scene.check_codes(stage, [trial.victim], 1, 3)
            scene.check_bits(stage)


class Pause(Fault):
    name = "SIGSTOP, SIGCONT in time"
    promise = "training goes on, with the bits of a run without the pause"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage(trial.at + GATE + 10, gate=trial.at + GATE) as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            stage.strike(trial.victim, signal.SIGSTOP)
            time.sleep(0.3 + trial.choice % 1200 / 1000)
            stage.strike(trial.victim, signal.SIGCONT)
            stage.open_gate()
            scene.check_done(stage)


class StoreKilled(Fault):
    name = "kill -9 of the store's process, then of a rank"
    promise = "all others raise, say that the store is out of reach, and end"
    host = "agent"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            stage.strike_agent(signal.SIGKILL)
            time.sleep(trial.choice % 1500 / 1000)
            began = stage.strike(trial.victim, signal.SIGKILL)
            names = "the store is out of reach"
            scene.check_errors(stage, trial.others, began, SOON, names)
            scene.check_bits(stage)


class StoreFrozen(Fault):
    name = "SIGSTOP of the store's process, then kill -9 of a rank"
    promise = "all others raise by the deadline, and say that the store does not answer"
    host = "agent"
    waits = True

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            stage.strike_agent(signal.SIGSTOP)
            time.sleep(trial.choice % 1000 / 1000)
            began = stage.strike(trial.victim, signal.SIGKILL)
            names = "the store does not answer"
            scene.check_errors(stage, trial.others, began, _deadline(trial), names)
            scene.check_bits(stage)


class Slow(Fault):
    name = "a rank that is too slow"
    promise = "all raise at the deadline; the others name the rank and say what it did last"
    waits = True

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            everyone = list(range(trial.world))
            stage.wait_for(lambda: stage.find(trial.victim, "fault"))
            fault = stage.find(trial.victim, "fault")
            scene.must(fault, "the fault could not be done")
            began = fault["time"] if fault else time.monotonic()
            names = rf"rank {trial.victim} of \d+ is behind"
            scene.check_errors(stage, everyone, began, _deadline(trial), names)
            scene.check_bits(stage)


class Late(Fault):
    name = "a rank that is late"
    promise = "training goes on, with the bits of a run without the delay"

    def play(self, scene: Scene) -> None:
        with scene.stage(SHORT) as stage:
            stage.begin()
            scene.check_done(stage)


class Links(Fault):
    """What happens to cables, in network namespaces."""

    need = "links"
    waits = True

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        everyone = list(range(trial.world))
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(hosts=trial.world))
            stage = stack.enter_context(scene.stage(lab=lab))
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            began = time.monotonic()
            self.cut(stage)
            scene.check_errors(stage, everyone, began, _deadline(trial), self.says(trial))
            scene.check_bits(stage)

    def cut(self, stage: Stage) -> None:
        """Cut the link."""
        raise NotImplementedError

    def says(self, trial: Trial) -> str:
        """What all ranks must say."""
        return r"did not answer|the store (does not answer|is out of reach)|is behind"


def _drop(stage: Stage, source: int, target: int) -> None:
    """Let everything vanish that one host sends to another."""
    address, nobody = f"10.77.0.{target + 1}", "02:00:00:00:00:01"
    words = ("neigh", "replace", address, "lladdr", nobody, "dev", "eth0", "nud", "permanent")
    stage.ip(f"host{source}", *words)


class Cut(Links):
    name = "a cut link"
    promise = "all ranks, on either side, raise by the deadline and end"

    def cut(self, stage: Stage) -> None:
        stage.ip("rack0", "link", "set", f"port{stage.trial.victim}", "down")


class HalfCut(Links):
    name = "a half-cut link"
    promise = (
        "as for a cut link, if what one rank sends to one or all others is lost, or what they send"
    )

    def cut(self, stage: Stage) -> None:
        trial = stage.trial
        kind = trial.choice % 3
        if kind == 0:
            _drop(stage, trial.victim, trial.other)
        for rank in trial.others if kind else ():
            _drop(stage, *((trial.victim, rank) if kind == 1 else (rank, trial.victim)))

    def says(self, trial: Trial) -> str:
        return rf"{super().says(trial)}|all ranks still answer"


class ShortCut(Fault):
    name = "a link cut and mended in time"
    promise = "training goes on, with the bits of a run without the cut"
    need = "links"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(hosts=trial.world))
            gate = trial.at + GATE
            stage = stack.enter_context(scene.stage(gate + 10, gate=gate, lab=lab))
            stage.begin()
            scene.must(stage.reach(trial.victim), "the fault could not be done")
            stage.ip("rack0", "link", "set", f"port{trial.victim}", "down")
            time.sleep(0.3 + trial.choice % 1200 / 1000)
            stage.ip("rack0", "link", "set", f"port{trial.victim}", "up")
            stage.open_gate()
            scene.check_done(stage)


class NaN(Fault):
    name = "NaN"
    promise = "all ranks raise or skip alike, as `on_nonfinite` says, and train on with equal bits"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage(SHORT) as stage:
            stage.begin()
            scene.check_done(stage, is_reference=False)
            scene.must(stage.find(trial.victim, "fault"), "the fault could not be done")
            if trial.choice % 2:
                return
            # the ranks of a machine take part as one
            on_machine = (trial.how.options or {}).get("intra_node")
            guilty = (
                f"machine {trial.victim // on_machine}" if on_machine else f"rank {trial.victim}"
            )
            for rank in range(trial.world):
                failed = stage.all_of(rank, "failed")
                scene.must(
                    [each["kind"] for each in failed] == ["NonFiniteError"]
                    and guilty in failed[0]["text"],
                    f"rank {rank} did not raise NonFiniteError with {guilty}: {failed}",
                )


class Corrupt(Fault):
    name = "corrupt message"
    promise = "one flipped bit, on one rank or all: all raise, and train on with equal bits or end"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        everyone = range(trial.world)
        with scene.stage(SHORT) as stage:
            stage.begin()
            stage.wait_for(lambda: stage.has_ended(*everyone))
            scene.must(stage.has_ended(*everyone), "not all ranks have ended")
            fault = next((f for r in everyone if (f := stage.find(r, "fault"))), None)
            scene.must(fault, "the fault could not be done")
            if all(stage.find(rank, "done") for rank in everyone):
                scene.check_done(stage, is_reference=not trial.how.updates)
                return
            began = fault["time"] if fault else 0.0
            scene.check_errors(stage, everyone, began, SOON)
            scene.check_bits(stage, is_reference=not trial.how.updates)


class Disagreement(Fault):
    name = "disagreement"
    promise = "`attach` raises on all ranks if one has another scheme or option, and names it"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            _check_disagreement(scene, stage, rf"rank {trial.victim} of \d+ disagrees")


def _check_disagreement(scene: Scene, stage: Stage, names: str) -> None:
    everyone = range(scene.trial.world)
    scene.must(stage.wait_for(lambda: stage.has_ended(*everyone)), "not all ranks have ended")
    for rank in everyone:
        error = stage.find(rank, "error")
        scene.must(
            error and error["kind"] == "DisagreementError" and re.search(names, error["text"]),
            f"rank {rank} did not raise a DisagreementError with {names!r}: {_short(error)}",
        )
    scene.check_codes(stage, everyone, 3 if scene.trial.ending == "exit" else 1)


class Drift(Fault):
    name = "drift"
    promise = "one weight changed on one rank: the next audit raises on all, and names it"
    families = ("DDP", "intra_node", "sharded", "negotiated")

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage() as stage:
            stage.begin()
            names = rf"rank {trial.victim} of \d+ differs in 5\.weight"
            _check_disagreement(scene, stage, names)
            for rank in range(trial.world):
                error = stage.find(rank, "error")
                step = -1 if error is None else error["n"]
                expected = -(-trial.at // 5) * 5
                scene.must(step == expected, f"rank {rank} raised at step {step}, not {expected}")


class Checkpoints(Fault):
    """Faults of files: afterwards, training goes on from the newest checkpoint that is whole."""

    def check_resumed(
        self, scene: Scene, saved: Sequence[int], zygote: Zygote | None = None
    ) -> None:
        """Another run goes on from one of these checkpoints, with the bits of a whole run."""
        how = Setting(faulty=False, saves=True, resumes="checked")
        with scene.stage(SHORT, zygote=zygote, **how) as stage:
            stage.begin()
            scene.check_done(stage)
            resumed = [stage.find(rank, "resumed") for rank in range(scene.trial.world)]
            steps = {each and each["n"] - 1 for each in resumed}
            scene.must(len(steps) == 1 and steps <= set(saved), f"resumed from {steps}")


class FullDisk(Checkpoints):
    name = "full disk"
    promise = "all end; what was saved before is whole, and training goes on from it bit for bit"
    need = "disk"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        zygote = Zygote((scene.disk, DISK))
        try:
            with scene.stage(zygote=zygote, saves=True) as stage:
                stage.begin()
                everyone = range(trial.world)
                in_time = stage.wait_for(lambda: stage.has_ended(*everyone))
                scene.must(in_time, "not all ranks have ended")
                scene.must(stage.find(trial.other, "fault"), "the fault could not be done")
                raised = [stage.find(rank, "raised") or {} for rank in everyone]
                full = any("No space left" in each.get("text", "") for each in raised)
                scene.must(full, f"no rank says that the disk is full: {raised}")
                scene.check_codes(stage, everyone, 1, 3)
                scene.check_bits(stage)
            self.check_resumed(scene, SAVES[:1], zygote)
        finally:
            zygote.close()


class KillWhileSaving(Checkpoints):
    name = "kill -9 while saving"
    promise = "all others end; training goes on bit for bit from the newest whole checkpoint"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        with scene.stage(saves=True) as stage:
            stage.begin()
            stage.wait_for(lambda: stage.has_ended(trial.victim))
            fault = stage.find(trial.victim, "fault")
            scene.must(fault, "the fault could not be done")
            began = fault["time"] if fault else time.monotonic()
            names = _named(trial, trial.victim)
            scene.check_errors(stage, trial.others, began, SOON, names)
            scene.check_bits(stage)
        self.check_resumed(scene, SAVES[:2])
        left = [path.name for path in scene.disk.rglob("*") if ".pt." in path.name]
        scene.must(not left, f"the killed run left {left}")


class DamagedFile(Checkpoints):
    name = "damaged file"
    promise = "nothing changes before the file is refused; the checkpoint before it is whole"

    def play(self, scene: Scene) -> None:
        trial = scene.trial
        everyone = range(trial.world)
        with scene.stage(SAVES[1] + 8, saves=True) as stage:
            stage.begin()
            scene.check_done(stage)
        newest = max(scene.disk.glob("step-*"))
        is_raw = trial.choice % 3 == 0
        self._damage(newest, trial, is_raw)
        how = "raw" if is_raw else "checked"
        with scene.stage(SHORT, faulty=False, resumes=how) as stage:
            stage.begin()
            stage.wait_for(lambda: stage.has_ended(*everyone))
            scene.must(stage.has_ended(*everyone), "not all ranks have ended")
            refused = [r for rank in everyone if (r := stage.find(rank, "refused"))]
            if not refused and is_raw:  # the bit is one that the file does not use
                scene.check_done(stage)
                return
            scene.must(refused, "no rank refused the file")
            scene.must(all(each["same"] for each in refused), "a rank changed before it refused")
            local = trial.how.round - 1  # steps that a rank takes without the others
            stepped = [rank for rank in everyone if len(stage.all_of(rank, "step")) > local]
            scene.must(not stepped, f"ranks {stepped} trained on")
            scene.check_codes(stage, everyone, 1, 3)
        shutil.rmtree(newest)
        self.check_resumed(scene, SAVES[:1])

    def _damage(self, folder: Path, trial: Trial, is_raw: bool) -> None:
        """Change one file in one of four ways."""
        chance = random.Random(trial.choice)
        wires = sorted(folder.glob("wire-*"))
        victim = wires[trial.victim] if is_raw else chance.choice(sorted(folder.iterdir()))
        content = bytearray(victim.read_bytes())
        how = chance.randrange(4)
        if how == 0:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        elif how == 1:
            del content[chance.randrange(len(content)) :]
        elif how == 2:
            start = chance.randrange(len(content))
            content[start : start + 512] = bytes(len(content[start : start + 512]))
        elif victim in wires:
            content = bytearray(wires[trial.other].read_bytes())
        else:
            content = bytearray()
        victim.write_bytes(content)


FAULTS: list[Fault] = [
    Kill(),
    KillAtAttach(),
    Leave(),
    UserException(),
    Interrupt(),
    Freeze(),
    Pause(),
    StoreKilled(),
    StoreFrozen(),
    Slow(),
    Late(),
    Cut(),
    HalfCut(),
    ShortCut(),
    NaN(),
    Corrupt(),
    Disagreement(),
    Drift(),
    FullDisk(),
    DamagedFile(),
    KillWhileSaving(),
]
