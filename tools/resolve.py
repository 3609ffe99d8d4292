"""Check that PyPI alone has every package that constraints.txt pins, for each supported Python.

    python tools/resolve.py [CONSTRAINTS]

Resolves the package with all extras for each Python of pyproject.toml's classifiers, on Linux on
x86-64 and Arm. It reads metadata only, so no package is downloaded, and it ignores the indexes and
settings of this machine, so it finds what a new user would find.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
SHOWN = ("torch", "triton", "numba", "numpy")


def pythons() -> list[str]:
    """Return the supported versions of Python, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    return sorted(found, key=lambda version: int(version.split(".")[1]))


def resolve(constraints: Path, python: str, platform: str) -> dict[str, str]:
    """Return the version of every package that an installation would have.

    Raises:
        RuntimeError: no set of versions meets all requirements; the text says which collide.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml")]
    command += ["--all-extras", "--constraint", str(constraints), "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", platform]
    command += ["--default-index", "https://pypi.org/simple", "--no-config", "--system-certs"]
    command += ["--quiet", "--no-header", "--no-annotate"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("UV_")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip())
    return dict(re.findall(r"^([\w.-]+)==(\S+)", ended.stdout, re.MULTILINE))


def main(words: list[str]) -> int:
    """Resolve for every Python and platform, and return 1 if one cannot be."""
    constraints = Path(words[0]) if words else ROOT / "constraints.txt"
    targets = [(python, platform) for python in pythons() for platform in PLATFORMS]
    failed = False
    with ThreadPoolExecutor() as threads:  # they wait for PyPI most of the time
        jobs = [threads.submit(resolve, constraints, *target) for target in targets]
        for (python, platform), job in zip(targets, jobs, strict=True):
            machine = platform.partition("-")[0]
            try:
                versions = job.result()
            except RuntimeError as error:
                failed = True
                print(f"Python {python}, {machine}: {error}", file=sys.stderr)
            else:
                shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN)
                print(f"Python {python}, {machine}: {len(versions)} packages, with {shown}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
