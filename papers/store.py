"""The store of results: one line of JSON per finished training, appended and never changed.

A result counts for a cell if scheme, recipe and seed are the same. After a recipe changes, its
cells are trained again, and the old results stay in the file. Schemes are compared by their
identity, which does not change when classes or arguments are renamed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsewire.errors import SparsewireError
from sparsewire.scheme import parse

from .recipe import Cell

SCHEMA = 2
Result = dict[str, Any]


class StoreError(SparsewireError):
    """A file does not contain results."""


def usual_path(paper: str, study: str) -> Path:
    """Return the path of a study's results: in the paper's folder, beside this code."""
    return Path(__file__).parent / paper / "results" / f"{study}.jsonl"


def usual_store(paper: str, study: str) -> Store:
    """Return a study's own store. Other studies of the same paper count too."""
    own = usual_path(paper, study)
    return Store(own, [path for path in sorted(own.parent.glob("*.jsonl")) if path != own])


def is_doubted(result: Result) -> bool:
    """Return whether a message was wrong although all numbers were finite, which means a bug.

    Such a result is shown with a mark, is not used in conclusions, and is trained again.
    """
    return bool(result.get("flaw")) and not result["diverged"]


class Store:
    """The results in one file, which need not exist yet, and in other files to read."""

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self.path = path
        self._results = [result for each in (*others, path) for result in _read(each)]

    def find(self, cell: Cell, seed: int) -> Result | None:
        """Return the newest result of a cell with this seed, first from this file, then others."""
        wanted = parse(cell.scheme).identity, cell.recipe.to_dict(), seed
        for result in reversed(self._results):
            if (result["identity"], result["recipe"], result["seed"]) == wanted:
                return result
        return None

    def find_all(self, cell: Cell) -> list[Result]:
        """Return the newest result of a cell for each stored seed, by seed."""
        seeds = sorted({result["seed"] for result in self._results})
        return [found for seed in seeds if (found := self.find(cell, seed)) is not None]

    def is_done(self, cell: Cell, seed: int) -> bool:
        """Return whether this training is finished and its result is valid."""
        result = self.find(cell, seed)
        return result is not None and not is_doubted(result)

    def count_done(self, cells: Sequence[Cell], seeds: Sequence[int]) -> int:
        """Return how many of these trainings are finished."""
        return sum(self.is_done(cell, seed) for cell in cells for seed in seeds)

    def prepare(self) -> None:
        """Check, before training, that results can be stored.

        Raises:
            StoreError: The file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise StoreError(
                f"results cannot be kept in {self.path}: {error.strerror or error}; name another "
                f"file with --store"
            ) from error

    def append(self, result: Result) -> None:
        """Append a result to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(_rounded(result), ensure_ascii=False, separators=(",", ":"))
        with self.path.open("a+b") as stream:
            if stream.tell() and not _ends_with_newline(self.path):
                stream.write(b"\n")  # the last writer was interrupted
            stream.write(f"{line}\n".encode())
        self._results.append(json.loads(line))


def _read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    if path.is_dir():
        raise StoreError(f"{path} is a folder: name a file in it with --store")
    lines = path.read_bytes().split(b"\n")
    results = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            schema = result["schema"]
            is_whole = schema != SCHEMA or (
                isinstance(result["identity"], str)
                and isinstance(result["recipe"], dict)
                and isinstance(result["seed"], int)
            )
        except (ValueError, KeyError, TypeError):
            continue  # a write that was interrupted: the training is repeated
        if not is_whole:
            continue
        if schema != SCHEMA:
            raise StoreError(
                f"line {number} of {path} has schema {schema}, and this version reads {SCHEMA}: "
                f"name another file with --store"
            )
        results.append(result)
    if not results and any(line.strip() for line in lines):
        raise StoreError(f"{path} holds no results: name another file with --store")
    return results


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) == b"\n"


def _rounded(value: Any) -> Any:
    """Round floats to six digits, more than are significant. Numbers that are not finite become
    None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
