"""The power goes while a checkpoint is written, at every operation: the newest whole one is found.

What was synced survives, files and folders each for itself. Of all else, chance decides: a file
may be cut short, and a folder may have its old entries or its new ones.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsewire.tools.cli import checkpoint

RANKS = 2
LAST = 4
Entries = dict[str, int]  # inodes by name


class PowerCut(BaseException):
    """Nothing goes on."""


class Disk:
    """Knows what has been synced, and cuts the power before one of the operations.

    Arguments:
        cut: the number of that operation; None for none.
    """

    def __init__(self, root: Path, cut: int | None) -> None:
        self.root = root
        self.operations = 0
        self._cut = cut
        self._contents: dict[int, bytes] = {}
        self._folders: dict[int, Entries] = {}
        self._open: list[int] = []  # so that no inode is used again
        self._sync = os.fsync

    def __enter__(self) -> Disk:
        self._patch = patch = pytest.MonkeyPatch()
        for owner, name in (
            (os, "open"),
            (os, "replace"),
            (Path, "replace"),
            (Path, "mkdir"),
            (Path, "unlink"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        patch.setattr(os, "fsync", self._counted(self.sync))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        for descriptor in self._open:
            os.close(descriptor)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.operations == self._cut:
                raise PowerCut
            self.operations += 1
            return call(*arguments, **options)

        return counted

    def sync(self, descriptor: int) -> None:
        """Have a file or a folder on disk."""
        self._sync(descriptor)
        self._open.append(os.dup(descriptor))
        inode, path = os.fstat(descriptor).st_ino, Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._folders[inode] = _entries(path)
        else:
            self._contents[inode] = path.read_bytes()

    def survive(self, into: Path, chance: random.Random) -> None:
        """Write what is there when the power comes back."""
        self._survive(os.stat(self.root).st_ino, self.root, into, chance)

    def _survive(self, inode: int, live: Path | None, into: Path, chance: random.Random) -> None:
        into.mkdir()
        now = _entries(live) if live is not None and live.exists() else {}
        synced = self._folders.get(inode, {})
        for name in sorted({*now, *synced}):
            found = chance.choice((now, synced)).get(name)
            if found is None:
                continue
            path = live / name if live is not None and now.get(name) == found else None
            if found in self._folders or (path is not None and path.is_dir()):
                self._survive(found, path, into / name, chance)
            elif found in self._contents:
                (into / name).write_bytes(self._contents[found])
            else:  # never synced
                content = path.read_bytes() if path is not None else b""
                (into / name).write_bytes(content[: chance.randrange(len(content) + 1)])


def _entries(folder: Path) -> Entries:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


class NoPlan:
    """Of a plan, checkpoints take the identity only."""

    def identity(self) -> dict[str, Any]:
        return {}


def _state(step: int, rank: int) -> dict[str, Any]:
    return {"step": step, "memory": torch.full((50,), 10.0 * step + rank)}


def _write(directory: Path, completed: list[int]) -> None:
    for step in range(1, LAST + 1):
        files = {
            checkpoint.wire_file(rank): checkpoint.write_file(
                directory, step, checkpoint.wire_file(rank), _state(step, rank)
            )
            for rank in range(RANKS)
        }
        checkpoint.complete(directory, step, files, NoPlan(), RANKS)  # type: ignore[arg-type]
        completed.append(step)


def test_the_newest_whole_checkpoint_survives(tmp_path: Path) -> None:
    live = tmp_path / "whole"
    live.mkdir()
    with Disk(live, None) as disk:
        _write(live, [])
    assert disk.operations > 40
    for cut in range(disk.operations):
        for seed in range(4):
            live, after = tmp_path / f"{cut}-{seed}", tmp_path / f"{cut}-{seed}-after"
            live.mkdir()
            completed: list[int] = []
            with Disk(live, cut) as torn:
                with pytest.raises(PowerCut):
                    _write(live, completed)
                torn._patch.undo()
                torn.survive(after, random.Random(f"{cut} {seed}"))
            found = checkpoint.newest(after)
            where = f"cut {cut}, seed {seed}, after checkpoints {completed}"
            if not completed and found is None:
                continue
            assert found is not None, where
            begun = len(completed) + 1
            assert found.step in (len(completed), begun), where
            for rank in range(RANKS):
                state, expected = found.load(checkpoint.wire_file(rank)), _state(found.step, rank)
                assert state["step"] == expected["step"], where
                assert torch.equal(state["memory"], expected["memory"]), where
            shutil.rmtree(live)
            shutil.rmtree(after)
