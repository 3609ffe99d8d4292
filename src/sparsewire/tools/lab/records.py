"""Which labs there are: one file each, written before anything is made.

A lab whose owner was killed cannot clean up after itself; its record lets the next one do so,
and lets `sparsewire lab --set` find a lab that runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .commands import LabError
from .plan import Plan

_HOME = Path("/run/sparsewire")


@dataclass(frozen=True)
class Record:
    """A lab's plan and the process it belongs to."""

    plan: Plan
    pid: int
    started: int | None  # the owner's, since its number may be another process's one day

    @classmethod
    def of_mine(cls, plan: Plan) -> Record:
        """A record of this process."""
        return cls(plan, os.getpid(), _start_of(os.getpid()))

    @property
    def owned(self) -> bool:
        """Whether the process that made the lab still runs."""
        return self.started is not None and _start_of(self.pid) == self.started

    def write(self) -> None:
        """Write or replace the file atomically."""
        path = _folder() / f"lab-{self.plan.id}.json"
        part = path.with_suffix(".part")
        content = {"pid": self.pid, "started": self.started, "plan": asdict(self.plan)}
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
        part.replace(path)

    def delete(self) -> None:
        """Forget the lab."""
        for folder in filter(_mine, _places()):
            (folder / f"lab-{self.plan.id}.json").unlink(missing_ok=True)


def read_all() -> list[Record]:
    """The records of all labs on this machine."""
    return [record for folder in _places() for record in read(folder)]


def read(folder: Path) -> list[Record]:
    """Return the records in a folder, unless other users can write there."""
    paths = sorted(folder.glob("lab-*.json")) if _mine(folder) else []
    return [record for path in paths if (record := _read(path)) is not None]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock for changing records and sweeping."""
    with open(os.open(_folder() / "lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Record | None:
    try:
        content = json.loads(path.read_text())
        fields = content["plan"]
        plan = Plan(**{**fields, "rates": tuple(fields["rates"])})
        if path.name != f"lab-{plan.id}.json":
            return None
        return Record(plan, int(content["pid"]), content["started"])
    except (OSError, ValueError, TypeError, LookupError, LabError):
        return None  # gone meanwhile, or not a record: nothing that it says is to be trusted


def _folder() -> Path:
    """Return the folder for new records."""
    for folder in _places():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if _mine(folder) and os.access(folder, os.W_OK):
                return folder
    raise LabError(f"no record of the lab can be kept: {_HOME} cannot be written")


def _places() -> tuple[Path, Path]:
    """Return the folders that may hold records."""
    return _HOME, Path(tempfile.gettempdir()) / f"sparsewire-{os.geteuid()}"


def _mine(folder: Path) -> bool:
    """Whether a folder is ours and nobody else can write to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    others = stat.S_IMODE(found.st_mode) & 0o022
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others


def _start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
