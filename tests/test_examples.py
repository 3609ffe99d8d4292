"""The examples run as they stand, under torchrun, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
pytestmark = pytest.mark.xdist_group("examples")  # which share one run
ALL = """
import runpy, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda *_: None  # one group for all
for script in sys.argv[1:]:
    print("script", script, flush=True)
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script printed; all of them run in the same processes, the resumed one twice."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "all.py").write_text(ALL)
    scripts = [str(path) for path in (*SCRIPTS, FOLDER / "resume.py")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, "--local-ranks-filter=0", str(folder / "all.py"), *scripts],
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^script (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for path, text in zip(parts[::2], parts[1::2], strict=True):
        found[Path(path).name] = found.get(Path(path).name, "") + text
    return found


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_an_example_learns(printed: dict[str, str], script: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed[script])]
    assert len(losses) > 1
    assert losses[-1] < 1.0, "ten classes by chance are 2.3"


def test_what_they_show(printed: dict[str, str]) -> None:
    assert "steps 0 to 60" in printed["resume.py"]
    assert "steps 60 to 120" in printed["resume.py"]
    assert "40 exchanges" in printed["accumulation.py"]
    assert "after 12 exchanges" in printed["local_steps.py"]
    assert "accuracy" in printed["adamw.py"]


def test_the_page_names_all() -> None:
    named = re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text())
    assert sorted(named) == [path.name for path in SCRIPTS]
