"""What installing relies on: pins that PyPI has, the Makefile, and the packages for an index."""

from __future__ import annotations

import email
import email.message
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
RELATIVE_LINK = re.compile(r"\]\((?!https://)")


def run(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with its output captured; `environment` is added to this process's own."""
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def module(path: str) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# -- constraints -----------------------------------------------------------------------------------


@pytest.fixture
def pypi() -> None:
    """Skip where PyPI cannot be reached."""
    try:
        urllib.request.urlopen("https://pypi.org/simple/torch/", timeout=20).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"PyPI cannot be reached: {error}")


@pytest.mark.slow  # it asks PyPI for a hundred packages, four Pythons and two kinds of machine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("pypi")
def test_pypi_has_what_the_constraints_pin() -> None:
    """Also on a machine with an index of its own, which must not be asked."""
    index = "https://index.invalid/simple"
    ended = run(sys.executable, "tools/resolve.py", UV_INDEX=index, PIP_EXTRA_INDEX_URL=index)
    assert ended.returncode == 0, ended.stderr
    assert PYTHONS
    for python in PYTHONS:
        for machine in ("x86_64", "aarch64"):
            assert f"Python {python}, {machine}: " in ended.stdout


@pytest.mark.slow  # as above, for one of each
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("pypi")
def test_constraints_that_collide_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This line made every installation from PyPI fail: its torch 2.13.0 wants triton 3.7.1."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text((ROOT / "constraints.txt").read_text() + "triton==3.9.0\n")
    tool = module("tools/resolve.py")
    assert tool.pythons() == PYTHONS
    monkeypatch.setattr(tool, "pythons", lambda: PYTHONS[:1])
    monkeypatch.setattr(tool, "PLATFORMS", tool.PLATFORMS[:1])
    assert tool.main([str(constraints)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Python 3.11, x86_64: ")
    assert "triton" in told
    assert "3.7.1" in told


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / name).read_text().split())


def test_oldest_constraints_are_the_lowest_versions_that_are_claimed() -> None:
    claimed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["fast"]]
    lowest = dict(requirement.split(">=") for requirement in claimed)
    oldest = pins("constraints-oldest.txt")
    assert oldest.keys() == lowest.keys()
    for name, version in oldest.items():
        assert version in (lowest[name], f"{lowest[name]}.0")


def test_supported_versions_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    rows = dict(re.findall(r"^\| (\w+)[^|]*\| ([^|]+?) \|", page, re.MULTILINE))
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert rows["Python"] == ", ".join(PYTHONS)
    dev = PROJECT["optional-dependencies"]["dev"]
    triton = next(line for line in dev if line.startswith("triton")).partition(";")[0]
    fast = PROJECT["optional-dependencies"]["fast"]
    for requirement in (*PROJECT["dependencies"], *fast, triton):
        name, lowest = requirement.split(">=")
        shown = {"torch": "PyTorch", "numpy": "NumPy"}.get(name, name.capitalize())
        assert rows[shown] == f"{lowest} or newer"
    for name in ("constraints.txt", "constraints-oldest.txt"):
        assert f"PyTorch {pins(name)['torch']}" in page


# -- make ------------------------------------------------------------------------------------------


def test_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    shown = [
        line.split()[0] for line in run("make", "--no-print-directory", "help").stdout.splitlines()
    ]
    assert sorted(shown) == sorted(phony[1].split())


def test_make_names_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    program = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$2"\n')
    old.chmod(0o755)
    ended = run("make", f"VENV={tmp_path}/venv", f"PYTHON={old}", f"{tmp_path}/venv/.installed")
    assert ended.returncode
    assert f"sparsewire needs Python 3.11 or newer, and {old} is 3.10: " in ended.stderr
    assert not (tmp_path / "venv").exists()


BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_editable(folder, settings=None):
    info = Path(folder, "first-1.dist-info")
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: first\\nVersion: 1\\n"
    (info / "METADATA").write_text(text + "Provides-Extra: cli\\nRequires-Dist: second==1\\n")
    return info.name

def build_editable(folder, settings=None, metadata=None):
    raise AssertionError("nothing to build")
"""


def test_make_shows_why_pip_failed(tmp_path: Path) -> None:
    """A project that needs second 1, with constraints that pin second 2."""
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "constraints.txt").write_text("second==2\n")
    for version in (1, 2):
        name = f"second-{version}"
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            text = f"Metadata-Version: 2.1\nName: second\nVersion: {version}\n"
            wheel.writestr(f"{name}.dist-info/METADATA", text)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    ended = run(
        *("make", "-f", ROOT / "Makefile", f"PYTHON={sys.executable}", ".venv/.installed"),
        cwd=tmp_path,
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert ended.returncode
    shown = ended.stdout + ended.stderr
    assert "depends on second==1" in shown
    assert "second==2" in shown


# -- packages for an index -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    ended = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    sdist, wheel = sorted(folder.iterdir(), key=lambda path: path.suffix)
    assert (sdist.suffix, wheel.suffix) == (".gz", ".whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(packages: Sequence[Path]) -> email.message.Message:
    with zipfile.ZipFile(packages[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


@pytest.mark.xdist_group("packages")
def test_an_index_would_take_the_packages(packages: Sequence[Path]) -> None:
    ended = run(sys.executable, "-m", "twine", "check", "--strict", *packages)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("PASSED") == 2


@pytest.mark.xdist_group("packages")
def test_metadata_is_complete(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "sparsewire"
    assert metadata["Summary"] == PROJECT["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.xdist_group("packages")
def test_the_description_leads_nowhere_wrong(metadata: email.message.Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.startswith("# sparsewire\n")
    assert not RELATIVE_LINK.search(description)


@pytest.mark.xdist_group("packages")
def test_the_wheel_holds_the_library_and_its_tools_alone(packages: Sequence[Path]) -> None:
    with zipfile.ZipFile(packages[1]) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sparsewire"}
    folders = {name.split("/")[1] for name in names if name.startswith("sparsewire/")}
    assert "tools" in folders
    home = "sparsewire/tools/bench/report/templates/"
    assert {f"{home}page.html", f"{home}style.css", f"{home}report.js"} <= set(names)
    assert not folders & {"papers", "tests", "benchmarks"}


@pytest.mark.xdist_group("packages")
def test_the_source_archive_holds_the_papers_and_the_site(packages: Sequence[Path]) -> None:
    with tarfile.open(packages[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"papers/__main__.py", "papers/aji2017/README.md"} <= names
    assert {"docs/index.md", "examples/README.md", "SECURITY.md"} <= names  # which the site reads


@pytest.mark.xdist_group("packages")
def test_the_wheel_can_be_imported(packages: Sequence[Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    words = ("install", "--no-deps", "--no-index", "--target", target, packages[1])
    ended = run(sys.executable, "-m", "pip", *words)
    assert ended.returncode == 0, ended.stderr
    program = "import sparsewire as sw; print(sw.__file__); print(sw.parse('TopK(0.01)'))"
    ended = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(target))
    expected = [str(target / "sparsewire" / "__init__.py"), "Scheme(TopK(0.01))"]
    assert ended.stdout.splitlines() == expected, ended.stderr


README = """# A title

![A
picture](a/b.png)

See [the
docs](docs/x.md#part), [above](#a-title) and [elsewhere](https://example.org).
"""


def test_links_of_the_description() -> None:
    standalone = module("hatch_build.py").standalone
    assert standalone(README, "https://example.org/us", "v1") == (
        "# A title\n\n![A\npicture](https://example.org/us/raw/v1/a/b.png)\n\n"
        "See [the\ndocs](https://example.org/us/blob/v1/docs/x.md#part), [above](#a-title) and "
        "[elsewhere](https://example.org).\n"
    )
    assert standalone(README, "", "v1") == (
        "# A title\n\nSee the\ndocs, [above](#a-title) and [elsewhere](https://example.org).\n"
    )


def test_a_repository_gives_the_package_its_links(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[more](docs/more.md)")
    hook = module("hatch_build.py").CustomMetadataHook
    metadata = {"version": "1.2.0"}
    hook(str(tmp_path), {"repository": "https://example.org/us"}).update(metadata)
    assert metadata["urls"] == {
        "Repository": "https://example.org/us",
        "Documentation": "https://example.org/us/blob/v1.2.0/docs/README.md",
        "Changelog": "https://example.org/us/blob/v1.2.0/CHANGELOG.md",
    }
    assert "(https://example.org/us/blob/v1.2.0/docs/more.md)" in metadata["readme"]["text"]
