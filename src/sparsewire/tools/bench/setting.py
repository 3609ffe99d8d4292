"""The machine, versions and command of a measurement, recorded with its results."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ..lab import cores


@dataclass(frozen=True)
class Setting:
    """The machine, the programs and the command of a measurement."""

    created: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    arguments: dict[str, Any]

    @classmethod
    def here(cls, arguments: dict[str, Any]) -> Setting:
        """This machine, now.

        Args:
            arguments: of the command, as JSON can hold them.
        """
        return cls(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine={
                "cpu": _cpu(),
                "cores": cores(),
                "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "system": platform.platform(),
            },
            versions={
                "sparsewire": version("sparsewire"),
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            commit=_commit(),
            arguments=arguments,
        )


def arguments(command: str, options: Any) -> dict[str, Any]:
    """Return a command and its options, a dataclass, as JSON can hold them."""
    given = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
    return {"command": command, **given}


def _cpu() -> str:
    """The processor's name as its maker writes it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """Return the version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _commit() -> str | None:
    """The commit of this package's source: as $COMMIT says, else as git does, if it can."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    try:
        # An installed package may lie inside a repository that does not track it.
        if not _git("ls-files", Path(__file__).name):
            return None
        return _git("rev-parse", "HEAD") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout.strip()
