"""Checkpoints of all ranks. A resumed run gives the same result as an uninterrupted one.

    DIR/step-00000120/model.pt     weights, optimizer and step, the same for all ranks
                      wire-3.pt    the exchange state of rank 3
                      manifest.json  written last; a checkpoint without it is ignored

Every file is written to a temporary name, synced, then renamed. The manifest holds the SHA-256 of
each file, which is verified before loading. The newest two checkpoints are kept; incomplete ones
left by a killed run are removed when the next checkpoint is complete. Symbolic links are refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsewire.report import plural

from .errors import CommandError
from .plan import Plan

_SCHEMA = 1
_KEPT = 2
_MANIFEST = "manifest.json"
MODEL = "model.pt"


def wire_file(rank: int) -> str:
    """Return the file name for the exchange state of `rank`."""
    return f"wire-{rank}.pt"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its folder and the contents of its manifest."""

    folder: Path
    step: int
    workers: int
    identity: dict[str, Any]
    files: dict[str, str]

    def load(self, name: str) -> dict[str, Any]:
        """Load one file after verifying its hash, without executing any code in it."""
        content = self._checked(name)
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        return state

    def verify(self) -> None:
        """Verify the hashes of all files."""
        for name in self.files:
            self._checked(name)

    def _checked(self, name: str) -> bytes:
        path = self.folder / name
        remedy = f"remove {self.folder} to go on from the checkpoint before it"
        _refuse_link(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {path} ({error.strerror}): {remedy}") from None
        if hashlib.sha256(content).hexdigest() != self.files.get(name):
            raise CommandError(f"{path} is damaged, its SHA-256 is not the recorded one: {remedy}")
        return content


def newest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in `directory`, or None."""
    for folder in reversed(_folders(directory)):
        if (folder / _MANIFEST).exists():
            return _read_manifest(folder)
    return None


def to_resume(plan: Plan, workers: int) -> Checkpoint:
    """Return the checkpoint that `plan` resumes from.

    Raises:
        CommandError: there is no checkpoint, or it belongs to another run.
    """
    assert plan.checkpoint is not None
    found = newest(Path(plan.checkpoint))
    if found is None:
        raise CommandError(
            f"there is no checkpoint in {plan.checkpoint}: leave --resume out to begin a run"
        )
    if found.workers != workers:
        raise CommandError(
            f"{found.folder} was written by {plural(found.workers, 'worker')} and cannot be "
            f"resumed by {workers}: each worker has a residual of its own; "
            f"run it with {found.workers}"
        )
    for name, value in plan.identity().items():
        before = found.identity.get(name)
        if before != value:
            raise CommandError(
                f"{found.folder} was written with {name.replace('_', '-')} {before}, "
                f"not {value}: resume with the same, or begin in another folder"
            )
    return found


def refuse_to_overwrite(directory: Path) -> None:
    """Raise an error if `directory` already holds a checkpoint."""
    found = newest(directory)
    if found is not None:
        raise CommandError(
            f"{directory} already holds a checkpoint of step {found.step}: "
            "add --resume to go on from it, or choose another folder"
        )


def write_file(directory: Path, step: int, name: str, state: dict[str, Any]) -> str:
    """Write one file of the checkpoint of `step` and return its SHA-256."""
    folder = _folder(directory, step)
    _refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    _write(folder / name, content)
    return hashlib.sha256(content).hexdigest()


def complete(directory: Path, step: int, files: dict[str, str], plan: Plan, workers: int) -> None:
    """Complete the checkpoint of `step` by writing its manifest, and remove old checkpoints."""
    manifest = {
        "schema": _SCHEMA,
        "step": step,
        "workers": workers,
        "identity": plan.identity(),
        "files": files,
    }
    folder = _folder(directory, step)
    _sync(directory)  # the folder may be a new entry in it
    _write(folder / _MANIFEST, json.dumps(manifest, indent=2).encode())
    for left in folder.iterdir():  # leftovers of a run killed while writing
        if left.name not in {*files, _MANIFEST}:
            left.unlink()
    # Other ranks may already be writing the next checkpoint, so only older ones are touched.
    older = [each for each in _folders(directory) if each.name < folder.name]
    done = [each for each in older if (each / _MANIFEST).exists()]
    for each in older:
        if each not in done[1 - _KEPT :]:
            # Remove the manifest first, so that a half-removed checkpoint is ignored.
            (each / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(each)


def _folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _folders(directory: Path) -> list[Path]:
    """Return all checkpoint folders, oldest first. Their names sort by step."""
    folders = sorted(directory.glob("step-" + "[0-9]" * 8))
    for folder in folders:
        _refuse_link(folder)
    return folders


def _refuse_link(path: Path) -> None:
    """Raise an error for a symbolic link, which could redirect reads and writes elsewhere."""
    if path.is_symlink():
        raise CommandError(
            f"{path} is a symbolic link, which checkpoints do not follow: remove it, or choose "
            f"another folder"
        )


def _read_manifest(folder: Path) -> Checkpoint:
    path = folder / _MANIFEST
    _refuse_link(path)
    try:
        fields = json.loads(path.read_bytes())
        if fields["schema"] != _SCHEMA:
            raise CommandError(f"{path} is of another version of sparsewire")
        return Checkpoint(
            folder=folder,
            step=int(fields["step"]),
            workers=int(fields["workers"]),
            identity=dict(fields["identity"]),
            files=dict(fields["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise CommandError(
            f"{path} is damaged: remove {folder} to go on from the checkpoint before it"
        ) from None


def _write(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, even if the machine crashes."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
