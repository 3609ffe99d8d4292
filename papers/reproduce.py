"""Train the cells of a study and show its results.

Every finished training is stored immediately, so an interrupted study resumes with the trainings
that are missing. Progress goes to standard error, the table to standard output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import cast

import torch

from sparsewire import __version__
from sparsewire.errors import SparsewireError
from sparsewire.report import human_bytes, plural
from sparsewire.scheme import Scheme, Warmup, parse
from sparsewire.tools.bench.setting import Setting

from . import picture, table
from .problems import Problem, Shelf
from .recipe import Cell, Study
from .replicas import Replicas
from .request import Request
from .store import SCHEMA, Store, StoreError, usual_store
from .studies import STUDIES
from .tasks import cifar10, translation
from .trainer import Trainer
from .training import Look, Outcome, Steps, Training, free


class RequestError(SparsewireError, ValueError):
    """Raised for a request that names an unknown study, cell, recipe or device."""


def run(request: Request) -> None:
    """Run a request: train the missing cells of a study and show its results, or list all studies.

    Raises:
        RequestError: the request is invalid or names something that does not exist.
        DataError: data are missing or damaged.
        StoreError: the results cannot be read.
        LibraryError: an optional library that this study requires is missing.
    """
    if request.minutes is not None and request.minutes < 0:
        raise RequestError(f"--minutes must be at least 0, not {request.minutes:g}")
    if request.beside < 1:
        raise RequestError(f"--beside must be at least 1, not {request.beside}")
    if request.name is None:
        print(overview())
        return
    study = _named(request.name)
    recipe = request.recipe or study.usual
    if recipe not in study.recipes:
        raise RequestError(
            f"{study.name} has no recipe {recipe!r}: there are {', '.join(study.recipes)}"
        )
    device = _device(request.device)
    store = Store(request.store) if request.store else usual_store(study.paper, study.name)
    cells = list(study.recipes[recipe]())
    seeds = study.seeds[recipe] if request.seeds is None else request.seeds
    meant = _meant(cells, request.only)
    if request.download and any(cell.recipe.problem in translation.CORPORA for cell in meant):
        raise RequestError(
            f"--download fetches CIFAR-10 alone: the texts of {study.name} have no lasting address "
            "with a checksum; put them where --data points"
        )
    _Filling(study, recipe, store, device, request).fill(meant, seeds)
    title = f"{study.name}, recipe {recipe}"
    mark = "" if recipe == study.usual else f"-{recipe}"
    path = store.path.with_name(f"{store.path.stem}{mark}.png")
    show(study, title, cells, store, path, is_quick=recipe == "quick")


def overview() -> str:
    """Return a list of all studies with their claims and progress."""
    lines = []
    for study in STUDIES.values():
        store = usual_store(study.paper, study.name)
        lines += [f"{study.name}: {study.claim}", f"  in {store.path}"]
        for name, cells in study.recipes.items():
            try:
                seeds, made = study.seeds[name], cells()
            except StoreError as error:
                lines.append(f"  {name:<8}{error}")
                continue
            done = store.count_done(made, seeds)
            lines.append(f"  {name:<8}{done} of {plural(len(made) * len(seeds), 'training')} done")
    return "\n".join(lines)


def show(
    study: Study,
    title: str,
    cells: Sequence[Cell],
    store: Store,
    path: Path,
    is_quick: bool = False,
) -> None:
    """Print the table and the conclusions, and save the picture as PNG and SVG.

    A quick recipe has no conclusions; it only checks that everything runs.
    """
    board = table.Board(cells, store, study.score)
    print(f"{title}: {study.claim}\nresults in {store.path}\n\n{table.render(board)}")
    if not board.scores:
        return
    remarks = ["too short to judge the claim: everything runs"] if is_quick else []
    remarks += [] if is_quick else study.remarks(board.scores)
    if study.on_curves is not None and not is_quick:
        remarks += study.on_curves({p: found for p, found in board.results.items() if found})
    results = [result for found in board.results.values() for result in found]
    counted = sorted({result["signature"] for result in results if result.get("signature")})
    remarks += [f"{study.score.name} as sacrebleu counts it: {text}" for text in counted]
    print("", *remarks, "", sep="\n")
    try:
        if study.shows_bytes:
            picture.save_against_bytes(title, board, path, path.with_suffix(".svg"))
        else:
            picture.save(title, board, path, path.with_suffix(".svg"), drawn=study.drawn)
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed", file=sys.stderr)
    else:
        print(f"picture: {path}")


@dataclass(frozen=True)
class _Training:
    """A training in progress."""

    cell: Cell
    seed: int
    name: str
    problem: Problem
    trainer: Training
    steps: Steps
    began: float

    def go_on(self) -> Outcome | None:
        """Take one step. Return the outcome if the training is complete."""
        try:
            self.trainer.go_on(self.steps)
        except StopIteration as end:
            return cast(Outcome, end.value)
        return None


class _Filling:
    """Trains the missing cells of a study within the time limit."""

    def __init__(
        self, study: Study, recipe: str, store: Store, device: torch.device, request: Request
    ) -> None:
        self._study, self._recipe, self._store, self._device = study, recipe, store, device
        self._request = request
        self._commit = Setting.here({}).commit  # read now: files may change during a run
        if request.download:
            cifar10.download(request.data or Path("data/cifar10"))
        self._shelf = Shelf(request.data, device)

    def fill(self, cells: Sequence[Cell], seeds: Sequence[int]) -> None:
        """Train all cells with the first seed, then all with the next, and so on."""
        todo = [(cell, seed) for seed in seeds for cell in cells]
        todo = [(cell, seed) for cell, seed in todo if not self._store.is_done(cell, seed)]
        self._many, self._began, self._longest = len(todo), time.monotonic(), 0.0
        if todo and self._request.minutes != 0:
            self._store.prepare()
            for recipe in {cell.recipe.problem: cell.recipe for cell, _ in todo}.values():
                self._shelf.check(recipe)
        try:
            self._train(todo)
        except KeyboardInterrupt:
            self._tell(f"what is finished is in {self._store.path}, and the same command goes on")
            raise

    def _train(self, todo: list[tuple[Cell, int]]) -> None:
        running: list[_Training] = []
        while todo or running:
            while todo and len(running) < self._request.beside:
                if not self._is_time_left():  # at least one runs, except with --minutes 0
                    is_asked = self._request.minutes != 0
                    self._tell(
                        f"{'time is up: ' if is_asked else ''}{plural(len(todo), 'training')} left"
                    )
                    todo.clear()
                    break
                running.append(self._begin(*todo.pop(0), self._many - len(todo)))
            outcomes = [training.go_on() for training in running]
            for number in reversed(range(len(running))):  # no variable may keep a training alive
                outcome = outcomes[number]
                if outcome is not None:
                    self._keep(running[number], outcome)
                    self._longest = max(self._longest, time.monotonic() - running[number].began)
                    del running[number]
                    free(self._device)
                    self._estimate(len(todo) + len(running))

    def _estimate(self, left: int) -> None:
        """Print the estimated remaining time if it is at least a minute."""
        passed = time.monotonic() - self._began
        minutes = passed / (self._many - left) * left / 60
        if minutes >= 1:
            self._tell(f"about {minutes:.0f} minutes for the other {left}, if they take as long")

    def _is_time_left(self) -> bool:
        """Return whether a training as long as the longest so far would end within the limit."""
        minutes = self._request.minutes
        if minutes is None:
            return True
        return minutes > 0 and time.monotonic() - self._began + self._longest <= 60 * minutes

    def _begin(self, cell: Cell, seed: int, number: int) -> _Training:
        name = f"[{number}/{self._many}] {cell.name}, seed {seed}"
        self._tell(f"{name}: {cell.scheme}")
        recipe, problem = cell.recipe, self._shelf.get(cell.recipe)
        kind = Replicas if recipe.communicate == "updates" else Trainer
        trainer = kind(recipe, _seeded(cell.scheme, seed), problem, seed, self._device)
        every = max(1, recipe.epochs // 5)

        def tell(look: Look) -> None:
            if look.epoch % every == 0 or look.epoch == recipe.epochs:
                self._tell(
                    f"{name}: epoch {look.epoch:g}/{recipe.epochs}  loss {look.loss:.4f}  "
                    f"{self._found(look)}{_pace(look)}"
                )

        steps = trainer.steps(tell)
        return _Training(cell, seed, name, problem, trainer, steps, time.monotonic())

    def _keep(self, training: _Training, outcome: Outcome) -> None:
        sent = f"{human_bytes(outcome.sent)} sent per step"
        how = "" if outcome.captured or self._device.type == "cpu" else ", not captured"
        if self._request.beside > 1:  # step times then include the other trainings
            outcome = replace(outcome, exchange_share=None)
        if outcome.exchange_share is not None:
            how += f", the exchange takes {100 * outcome.exchange_share:.0f} % of a step"
        how += f", {outcome.flaw}" if outcome.flaw else ""
        self._tell(f"{training.name}: {'diverged, ' if outcome.diverged else ''}{sent}{how}")
        self._store.append(
            {
                "schema": SCHEMA,
                "study": self._study.name,
                "recipe_name": self._recipe,
                "cell": training.cell.name,
                "scheme": training.cell.scheme,
                "identity": parse(training.cell.scheme).identity,
                "seed": training.seed,
                "recipe": training.cell.recipe.to_dict(),
                **outcome.to_dict(),
                **training.problem.facts(),
                "beside": self._request.beside,
                **self._setting(),
            }
        )

    def _found(self, look: Look) -> str:
        """Format the results that appear in the table or the picture."""
        shown = {measure.field: measure for measure in (*self._study.drawn, self._study.score)}
        return "".join(
            f"{measure.name} {measure.unit * look.found[field]:.2f}  "
            for field, measure in shown.items()
            if field in look.found
        )

    def _setting(self) -> dict[str, object]:
        setting = asdict(Setting.here({}))
        del setting["arguments"]
        setting["commit"] = self._commit
        if self._device.type == "cuda":
            setting["machine"]["gpu"] = torch.cuda.get_device_name(self._device)
        setting["versions"]["sparsewire"] = __version__
        for package in ("numba", "triton", "sentencepiece", "sacrebleu"):
            try:
                setting["versions"][package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return {**setting, "device": self._device.type}

    def _tell(self, line: str) -> None:
        if not self._request.quiet:
            print(line, file=sys.stderr, flush=True)


def _pace(look: Look) -> str:
    rate = look.step / look.seconds
    return f"{rate:.0f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s a step"


def _seeded(text: str, seed: int) -> Scheme | Warmup:
    """Parse a scheme and set the seed of its random choices."""
    scheme = parse(text)
    if isinstance(scheme, Warmup):
        return replace(scheme, scheme=replace(scheme.scheme, seed=seed))
    return replace(scheme, seed=seed)


def _named(name: str) -> Study:
    if name not in STUDIES:
        near = [study for study in STUDIES if study.startswith(name)]
        near = near or get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(STUDIES)}"
        raise RequestError(f"there is no study {name!r}: {hint}")
    return STUDIES[name]


def _meant(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    chosen = [c for c in cells if not patterns or any(c.is_meant(p) for p in patterns)]
    if not chosen:
        raise RequestError(
            f"no cell is called {' or '.join(patterns)}: there are "
            f"{', '.join(cell.name for cell in cells)}"
        )
    return chosen


def _device(name: str | None) -> torch.device:
    is_there = torch.cuda.is_available()
    if name == "cuda" and not is_there:
        raise RequestError("--device cuda: torch sees no GPU here; use --device cpu")
    return torch.device(name or ("cuda" if is_there else "cpu"))
