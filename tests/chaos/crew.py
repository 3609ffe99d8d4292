"""Plays trials one after another, and removes all that they leave."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .faults import FAULTS, REFERENCE, Scene, lacking
from .stage import Stage, Zygote
from .trials import AMPLE, Trial

COMMAND = "python -m tests.chaos"


@dataclass(frozen=True)
class Result:
    """What came of one trial.

    Arguments:
        broken: the promises that did not hold; empty if all did.
        known: seconds from the fault until all other ranks had raised; None if training went on.
        ended: seconds from the fault until the last of them had ended.
        load: of the machine, as a mean over a minute.
        skipped: why it could not be played here.
    """

    trial: Trial
    broken: tuple[str, ...] = ()
    known: float | None = None
    ended: float | None = None
    load: float = 0.0
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def held(self) -> bool:
        """Whether everything held that was promised."""
        return not self.broken and self.skipped is None

    @property
    def replay(self) -> str:
        """The command that plays this trial alone."""
        return f"{COMMAND} --seed {self.trial.seed} --only {self.trial.number}"

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Result:
        """Return what `to_dict` wrote."""
        trial, broken = Trial(**fields["trial"]), tuple(fields["broken"])
        return Result(**{**fields, "trial": trial, "broken": broken})


class References:
    """The weights after each step of runs without a fault, which several crews share."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[str]] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int], make: Callable[[], list[str]]) -> list[str]:
        """Return what is there, or what `make` returns."""
        with self._lock:
            if key not in self._found:
                self._found[key] = make()
            return self._found[key]


class Crew:
    """Plays trials; a context.

    Arguments:
        folder: where ranks write.
        keep: leave what they wrote.
        references: those that other crews use as well.
    """

    def __init__(
        self, folder: Path, keep: bool = False, references: References | None = None
    ) -> None:
        self._keep = keep
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._zygote: Zygote | None = None
        self._references = references or References()
        self._count = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and remove what they wrote."""
        self._drop_zygote()
        if not self._keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _fresh(self) -> Path:
        self._count += 1
        folder = self._folder / str(self._count)
        (folder / "disk").mkdir(parents=True)
        return folder

    def play(self, trial: Trial) -> Result:
        """Play one trial; an error of the test itself counts as a promise that did not hold."""
        fault = next(each for each in FAULTS if each.name == trial.fault)
        reason = lacking(fault.need)
        if reason:
            return Result(trial, skipped=reason)
        self._zygote = self._zygote or Zygote()
        folder = self._fresh()
        scene = Scene(trial, self._zygote, folder, partial(self.reference, trial))
        began = time.monotonic()
        try:
            fault.play(scene)
        except Exception as error:
            scene.broken.append(f"the trial itself failed: {type(error).__name__}: {error}")
            self._drop_zygote()
        seconds = time.monotonic() - began
        if not self._keep:
            shutil.rmtree(folder)
        return Result(trial, tuple(scene.broken), scene.known, scene.ended, scene.load, seconds)

    def reference(self, trial: Trial) -> Sequence[str]:
        """The weights after each step without a fault."""
        return self._references.get((trial.form, trial.world), partial(self._train, trial))

    def _train(self, trial: Trial) -> list[str]:
        assert self._zygote is not None
        quiet = replace(trial, host="agent", timeout=AMPLE)
        folder, everyone = self._fresh(), range(trial.world)
        run, disk = folder / "run", folder / "disk"
        with Stage(quiet, self._zygote, run, disk, REFERENCE, faulty=False) as stage:
            stage.begin()
            stage.wait_for(lambda: stage.has_ended(*everyone))
            rows = [[e["weights"] for e in stage.all_of(rank, "step")] for rank in everyone]
            assert all(row == rows[0] for row in rows), "a run without a fault splits"
            assert len(rows[0]) == REFERENCE, stage.log(0)
        return rows[0]
