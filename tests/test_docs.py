"""The documentation says what is true: names, arguments, links, error texts, and examples that run.

A comment before a code block says what is done with it; readers do not see it.

    <!-- run -->               run in one process, in a fresh namespace
    <!-- run on two ranks -->  run on two processes, with the names that `_on_rank` gives
    <!-- script NAME -->       saved under that name and started with torchrun
    <!-- prints -->            what the block before it prints; … stands for the rest of a line
    <!-- selector -->          a new selector, which must obey the laws
    <!-- values -->            a new value codec, likewise
    <!-- collective -->        a new collective, likewise
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsewire as sw
from sparsewire.adapters.base import Attached
from sparsewire.codecs import Place, ValueCodec
from sparsewire.collectives import Collective
from sparsewire.notation import read
from sparsewire.randomness import RandomKey
from sparsewire.selectors import Selector
from sparsewire.workspace import Workspace

from .cluster import Cluster
from .test_architecture import MODULES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RESULTS = ("benchmarks/results", "benchmarks/results/*", "papers/*/results")
PARTS = {kind.__name__: kind for family in sw.scheme.FAMILIES.values() for kind in family}
INTERNAL = {  # members of public classes that are public by their names alone
    "centres",
    "low_bits",
    "model",
    "process_group",
    "quantize",
    "restore",
    "take",
    "width",
}


@dataclass
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    mark: str
    text: str
    prints: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def compiled(self) -> Any:
        """The code, with the page's own line numbers in tracebacks."""
        return compile("\n" * self.line + self.text, str(self), "exec")


def _blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, each with the comment before it."""
    mark, opened = "", None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opened is not None:
            if line.strip() == "```":
                yield Block(page, opened[0], opened[1], mark, textwrap.dedent(opened[2]))
                mark, opened = "", None
            else:
                opened = (opened[0], opened[1], opened[2] + line + "\n")
        elif match := re.fullmatch(r"\s*```(\w*|\{[\w-]+\})", line):
            opened = (number, match[1], "")
        elif match := re.fullmatch(r"\s*<!-- (.*) -->", line):
            mark = match[1]
        elif line.strip():
            mark = ""
    assert opened is None, f"{page}: the block from line {opened and opened[0]} does not end"


def _all_blocks() -> list[Block]:
    blocks: list[Block] = []
    for page in PAGES:
        for block in _blocks(page):
            if block.mark == "prints":
                blocks[-1].prints = block.text
            blocks.append(block)
    return blocks


BLOCKS = _all_blocks()


def marked(mark: str) -> list[Block]:
    return [block for block in BLOCKS if re.fullmatch(mark, block.mark)]


def _prose(page: Path) -> str:
    """The page without its blocks, which keeps its line numbers."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.strip().startswith("```")
        lines.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(lines)


def _check_output(expected: str | None, printed: str) -> None:
    if expected is None:
        return
    lines = printed.splitlines()
    for line in expected.splitlines():
        exact, start = line in lines, line.removesuffix("…")
        rest = line.endswith("…") and any(other.startswith(start) for other in lines)
        assert exact or rest, f"{line!r} is not in what was printed:\n{printed}"


# -- the blocks ------------------------------------------------------------------------------------


def test_marks_are_known() -> None:
    known = r"|run|run on two ranks|script \S+|prints|selector|values|collective"
    for block in BLOCKS:
        assert re.fullmatch(known, block.mark), f"{block}: {block.mark}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles(block: Block) -> None:
    block.compiled()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "diff"], ids=str)
def test_both_sides_of_a_diff_compile(block: Block) -> None:
    lines = block.text.splitlines()
    for side in "-+":
        compile("\n".join(ln[1:] for ln in lines if ln[:1] in ("", " ", side)), str(block), "exec")


@pytest.mark.parametrize("block", marked("run"), ids=str)
def test_examples_run(block: Block) -> None:
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        exec(block.compiled(), {"__name__": "example"})
    _check_output(block.prints, printed.getvalue())


def _on_rank(block: Block, folder: Path) -> str:
    """Run a block on this rank as if it stood in a user's DDP script."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DDP(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    names = {
        "__name__": "example",
        "net": net,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_function": nn.functional.cross_entropy,
        "inputs": torch.randn(8, 32, generator=generator),
        "targets": torch.randint(0, 10, (8,), generator=generator),
    }
    printed, home = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            exec(block.compiled(), names)
    finally:
        os.chdir(home)
        for value in names.values():
            if isinstance(value, Attached):
                value.detach()
    return printed.getvalue()


@pytest.mark.xdist_group("ranks 0")  # where two ranks are kept running
@pytest.mark.parametrize("block", marked("run on two ranks"), ids=str)
def test_examples_run_on_two_ranks(two: Cluster, block: Block, tmp_path: Path) -> None:
    printed = two.run(_on_rank, block, tmp_path)
    _check_output(block.prints, printed[0])


@pytest.mark.parametrize("block", marked(r"script \S+"), ids=str)
def test_scripts_run_under_torchrun(block: Block, tmp_path: Path) -> None:
    script = tmp_path / block.mark.removeprefix("script ")
    script.write_text(block.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [after for after in BLOCKS if after.mark == "prints" and after.page == block.page]
    _check_output(next(b.text for b in expected if b.line > block.line), done.stdout)


def test_quickstart_has_a_script() -> None:
    assert [block.page.name for block in marked(r"script \S+")].count("quickstart.md") == 1


# -- what the text names ---------------------------------------------------------------------------


def _slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return {_slug(heading) for heading in re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _prose(page)
    images = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in (*re.findall(r"\]\(([^)\s]+)\)", text), *images):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target} does not exist"
        assert path.is_relative_to(ROOT), f"{page.name}: {target} lies outside"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target} has no such heading"


def test_drawings_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    pictures = importlib.import_module("pictures")
    drawn = dict(pictures.files())
    images = set((ROOT / "docs" / "images").glob("*.svg"))
    results = {path for folder in RESULTS for path in ROOT.glob(f"{folder}/*-dark.svg")}
    assert set(drawn) == images | results
    assert len(images) == 2 * len(pictures.PICTURES)
    for path, text in drawn.items():
        assert path.read_text() == text, f"{path.name} is old: run python docs/pictures.py"


def test_the_description_on_an_index_has_each_picture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    readme = (ROOT / "README.md").read_text()
    text = importlib.import_module("hatch_build").standalone(readme, "https://example.org/us", "v1")
    assert "<picture>" in readme
    assert "<" not in re.sub(r"(?s)```.*?```|`[^`]*`", "", text)
    assert text.count("![") == readme.count("<picture>")
    assert "](https://example.org/us/raw/v1/benchmarks/results/train/train.png)" in text


def test_files_that_are_named_exist() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        for name in re.findall(
            r"`((?:src|tests|docs|data|benchmarks|papers(?!/PAPER))/[\w./]*)`", _prose(page)
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name} does not exist"
        assert tests >= set(re.findall(r"`(test_\w+\.py)`", _prose(page)))


def test_every_page_is_in_the_index() -> None:
    listed, site = (
        (ROOT / "docs" / name).read_text().splitlines() for name in ("README.md", "index.md")
    )
    for page in (ROOT / "docs").glob("*.md"):
        if page.name in ("README.md", "index.md"):
            continue
        assert page.stem in site
        is_elsewhere = page.read_text().startswith("This page of the site is ")
        assert is_elsewhere or any(f"]({page.name})" in line for line in listed)


def _scheme_texts() -> Iterator[tuple[str, str]]:
    """Everything in the pages that looks like a part of a scheme with its arguments."""
    call = rf"(?:{'|'.join(PARTS)})\([^`\n]*\)"
    for page in PAGES:
        for line in _prose(page).splitlines():
            if not line.startswith("#"):
                for text in re.findall(rf"`({call})`", line):
                    yield page.name, text
        for block in _blocks(page):
            for text in re.findall(rf'"({call.replace("`", chr(34))})"', block.text):
                yield str(block), text


REFUSED_ON_PURPOSE = {"Scheme(TopK(0.01), collective=AllReduce())"}


@pytest.mark.parametrize(("where", "text"), sorted(set(_scheme_texts())))
def test_scheme_texts_can_be_read(where: str, text: str) -> None:
    if text in REFUSED_ON_PURPOSE:
        with pytest.raises(sw.errors.SchemeError):
            sw.parse(text)
    else:
        read(text, PARTS)


def _commands(name: str) -> Iterator[tuple[str, list[str]]]:
    """Every command line of a program that a page shows, without the program's name."""
    for page in (*PAGES, *sorted(ROOT.glob("papers/*/README.md"))):
        shown = re.findall(rf"`({name} [^`]+)`", _prose(page))
        for block in _blocks(page):
            if block.language == "bash":
                shown += [ln for ln in block.text.splitlines() if re.match(rf"{name}\b", ln)]
        for line in shown:
            first, _, _ = line.partition("&&")
            words = shlex.split(first, comments=True)[len(name.split()) :]
            yield str(page.relative_to(ROOT)), words


def test_command_lines_are_understood() -> None:
    from sparsewire.tools.cli.options import COMMANDS, GROUPS
    from sparsewire.tools.cli.parse import parse

    for page, words in _commands("sparsewire"):
        if words[0] == "COMMAND" or words[0].startswith("-"):
            continue
        assert words[0] in {**COMMANDS, **GROUPS}, f"{page}: there is no command {words[0]}"
        if len(words) > 1 and "--help" not in words:
            try:
                parse(words)
            except Exception as error:
                pytest.fail(f"{page}: sparsewire {shlex.join(words)}: {error}")


def test_study_commands_are_understood() -> None:
    from papers.request import Request
    from papers.studies import STUDIES
    from sparsewire.tools.cli.parse import read as read_options

    commands = list(_commands("python -m papers"))
    assert len(commands) > 20
    for page, words in commands:
        if "--help" in words:
            continue
        given = read_options(Request, "python -m papers", words)
        assert given.name is None or given.name in STUDIES, f"{page}: no study {given.name}"
        if given.name is not None and given.recipe is not None:
            assert given.recipe in STUDIES[given.name].recipes, f"{page}: no recipe {given.recipe}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, words in _commands("make"):
        for target in (word for word in words if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"


def _source() -> str:
    """The library's source with texts that are split over lines joined again."""
    whole = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", whole)


def test_error_texts_are_those_of_the_library() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page.split("## Error texts", 1)[1].split("\n## ", 1)[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    source = _source()
    assert len(quoted) > 20
    for text in quoted:
        for segment in text.split("…"):
            assert segment.strip() in source, f"no error says {segment!r}"


# -- the reference ---------------------------------------------------------------------------------


@dataclass
class Entry:
    """One name that a page of the reference shows by its docstring."""

    page: Path
    heading: str
    kind: str
    name: str
    options: dict[str, str]

    def __str__(self) -> str:
        return self.name

    @property
    def thing(self) -> Any:
        module, _, name = f"sparsewire.{self.name}".rpartition(".")
        return getattr(importlib.import_module(module), name)

    @property
    def is_data(self) -> bool:
        return self.kind == "autodata"

    def members(self) -> set[str]:
        """The members that the entry shows."""
        if "members" not in self.options:
            return set()
        listed = _words(self.options["members"])
        inherits = "inherited-members" in self.options
        shown = listed or _public(self.thing, inherits)
        return shown - _words(self.options.get("exclude-members", ""))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _entries() -> Iterator[Entry]:
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        heading, entry = "", None
        for line in page.read_text().splitlines():
            if match := re.match(r"#+ (.*)", line):
                heading = match[1]
            elif match := re.match(r"\.\. (auto\w+):: sparsewire\.([\w.]+)$", line):
                entry = Entry(page, heading, match[1], match[2], {})
                yield entry
            elif entry and (match := re.match(r"   :([\w-]+):(.*)", line)):
                entry.options[match[1]] = match[2].strip()


ENTRIES = list(_entries())
OBJECTS = [entry for entry in ENTRIES if not entry.is_data]
CLASSES = [entry for entry in OBJECTS if isinstance(entry.thing, type)]
FAMILIES = ("codecs", "collectives", "selectors")  # whose base classes others derive from
SECTIONS = r"(?:Arguments|Attributes|Options for \w+):"


def _public(kind: type, inherits: bool = True) -> set[str]:
    """The members of a class that a user may use, or only those that it defines itself."""
    found: set[str] = set()
    for base in kind.__mro__ if inherits else (kind,):
        if base.__module__.startswith("sparsewire"):
            found |= {*vars(base), *vars(base).get("__annotations__", ())}
    return {
        name
        for name in found
        if not name.startswith("_")
        and ":meta private:" not in (inspect.getdoc(getattr(kind, name, None)) or "")
    }


def _described(text: str, section: str) -> list[str]:
    """The names that a docstring's sections describe, each with some words."""
    names, inside = [], False
    for line in inspect.cleandoc(text).splitlines():
        if line and not line.startswith(" "):
            inside = re.fullmatch(section, line) is not None
        elif inside and (match := re.match(r" {4}(\w+): \S", line)):
            names.append(match[1])
    return names


def _arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments that a user may give, those of all overloads for one that has some."""
    if overloads := typing.get_overloads(function):
        alike = [list(inspect.signature(each).parameters) for each in overloads]
        return sorted({name for names in alike for name in names} - {"options"})
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if not p.name.startswith("_")]


def _public_names() -> dict[str, Any]:
    """Every public name by where it is first found: in the package, then in its modules."""
    found = {name: getattr(sw, name) for name in sw.__all__}
    for module in sorted({*MODULES, *FAMILIES}):
        home = importlib.import_module(f"sparsewire.{module}")
        names = home.__all__
        if module in FAMILIES and module not in MODULES:
            names = [name for name in names if isinstance(getattr(home, name), type)]
        for name in names:
            if not any(thing is getattr(home, name) for thing in found.values()):
                found[f"{module}.{name}"] = getattr(home, name)
    return found


def test_every_public_name_is_in_the_reference() -> None:
    shown = [entry.name for entry in ENTRIES]
    assert len(shown) == len(set(shown)), "a name is shown twice"
    missing = {name for name in _public_names() if name not in shown}
    assert not missing, f"not in docs/api/: {', '.join(sorted(missing))}"


def test_every_page_of_the_reference_is_in_its_table() -> None:
    table = (ROOT / "docs" / "api.md").read_text()
    for entry in ENTRIES:
        text = f"[`{entry.name}`](api/{entry.page.name}#{_slug(entry.heading)})"
        row = rf"^\| {re.escape(text)} \| (.*) \|$"
        summary = re.search(row, table, re.MULTILINE)
        assert summary, f"docs/api.md lacks: | {text} | … |"
        if not entry.is_data:
            doc = " ".join((inspect.getdoc(entry.thing) or "").split("\n\n")[0].split())
            assert summary[1] == doc, f"docs/api.md should say: | {text} | {doc} |"
    for page in {entry.page for entry in ENTRIES}:
        assert f"\napi/{page.stem}\n" in table


@pytest.mark.parametrize("entry", OBJECTS, ids=str)
def test_docstrings_describe_all_arguments(entry: Entry) -> None:
    thing, doc = entry.thing, entry.thing.__doc__
    assert doc, f"{entry} has no docstring"
    if isinstance(thing, type):
        if issubclass(thing, Exception | enum.Enum) or inspect.isabstract(thing):
            return
        if getattr(thing, "_is_protocol", False):
            return
    wanted = _arguments(thing)
    described = _described(doc, r"(?:Arguments|Options for \w+):")
    if not described and wanted:  # nobody makes one, so they are attributes to users
        described = _described(doc, "Attributes:")
    if typing.get_overloads(thing):
        described.sort()
    assert described == wanted


@pytest.mark.parametrize("entry", CLASSES, ids=str)
def test_docstrings_describe_all_members(entry: Entry) -> None:
    """Everything that a class shows has a docstring, and nothing public is left out."""
    kind = entry.thing
    described = {
        name for base in kind.__mro__ if base.__doc__ for name in _described(base.__doc__, SECTIONS)
    }
    shown = entry.members()
    for name in shown - described:
        member = inspect.getattr_static(kind, name)
        if isinstance(member, enum.Enum):
            continue  # autodoc shows the text behind it
        doc = inspect.getdoc(member)
        assert doc, f"{entry.name}.{name} has no docstring"
        wanted = _described(doc, "Arguments:")
        if wanted and callable(getattr(kind, name)):
            given = _arguments(getattr(kind, name))
            assert wanted == [argument for argument in given if argument != "self"]
    bases = {each.thing: each for each in CLASSES if each.thing is not kind}
    elsewhere = {name for base in kind.__mro__ if base in bases for name in bases[base].members()}
    excluded = _words(entry.options.get("exclude-members", ""))
    left_out = _public(kind) - described - shown - elsewhere - excluded - INTERNAL
    assert not left_out, f"{entry}: document {', '.join(sorted(left_out))}, or say it is internal"


@pytest.mark.parametrize("name", sorted(sw.__all__))
def test_every_name_has_an_example(name: str) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    on_page = [block.text for block in BLOCKS if block.page == entry.page]
    in_docstring = entry.thing.__doc__.partition(">>>")[2]
    assert name in in_docstring or any(f"sw.{name}" in text for text in on_page)


# -- how to add a part -----------------------------------------------------------------------------


def _example(mark: str, base: type) -> type:
    """The class that CONTRIBUTING.md adds to a family."""
    (block,) = marked(mark)
    module = inspect.getmodule(base)
    assert module is not None
    names = dict(vars(module))
    exec(block.compiled(), names)
    (kind,) = (
        thing
        for name, thing in names.items()
        if isinstance(thing, type) and issubclass(thing, base) and name not in vars(module)
    )
    return kind


def _conserves(scheme: sw.Scheme, workers: int = 3, steps: int = 6) -> None:
    """What was paid in = what was applied + what is still in memory, over all workers."""
    shapes = {"matrix": (40, 50), "bias": (7,), "conv": (8, 4, 3, 3)}
    generator = torch.Generator().manual_seed(0)
    states = [sw.functional.init(scheme, {n: torch.zeros(s) for n, s in shapes.items()})] * workers
    paid = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    applied = {name: total.clone() for name, total in paid.items()}
    for _ in range(steps):
        gradients = [
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            for _ in range(workers)
        ]
        mean, states = sw.functional.simulate(gradients, states)
        for name in shapes:
            paid[name] += sum(gradient[name].double() for gradient in gradients)
            applied[name] += workers * mean[name].double()
    for name in shapes:
        kept = sum(state.memory[name]["residual"].double() for state in states)
        torch.testing.assert_close(applied[name] + kept, paid[name], rtol=0, atol=1e-4)
        assert applied[name].any()


def _read_back(monkeypatch: pytest.MonkeyPatch, family: str, part: Any, scheme: sw.Scheme) -> None:
    """Named in its family, the part has its place in the notation."""
    monkeypatch.setitem(sw.scheme.FAMILIES, family, (*sw.scheme.FAMILIES[family], type(part)))
    assert sw.parse(repr(scheme)) == scheme


def test_the_selector_in_contributing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _example("selector", Selector)
    selector = kind(0.05)
    scheme = sw.Scheme(selector)
    assert scheme.collective == sw.AllReduce()
    _conserves(scheme)
    _conserves(sw.Scheme(selector, collective=sw.AllGather()))
    _conserves(
        sw.Scheme(selector, values=sw.BFloat16(), scope="global", dense_below=0, dense_1d=False)
    )
    _read_back(monkeypatch, "selectors", selector, scheme)
    length, hits, trials, work = 37, torch.zeros(37), 4000, Workspace()
    segments = sw.segments.Segments.partition(
        {"x": (length,)}, kind(0.1), dense_below=0, dense_1d=False
    )
    for step in range(trials):
        key = RandomKey(0, step, 0)
        indices = kind(0.1).coordinates(segments, key, torch.device("cpu"), work)
        assert indices.tolist() == sorted(set(indices.tolist()))
        hits[indices] += 1
    share = kind(0.1).contraction(length)
    assert share == 4 / length
    assert (hits / trials - share).abs().max() < 0.03  # five deviations, for all coordinates alike


def test_the_collective_in_contributing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _example("collective", Collective)
    for selector in (sw.TopK(0.05), sw.RandomK(0.05), sw.BlockRandomK(0.05), sw.Dense()):
        scheme = sw.Scheme(selector, collective=kind())
        _conserves(scheme)
        _read_back(monkeypatch, "collectives", kind(), scheme)
    gradients = [{"x": torch.randn(40, 50)} for _ in range(3)]
    states = [sw.functional.init(scheme, gradients[0]) for _ in range(3)]
    _, states = sw.functional.simulate(gradients, states)
    assert states[0].counters.bytes_sent == sw.explain(scheme, {"x": (40, 50)}, 3).sent_bytes
    _conserves(sw.Scheme(sw.TopK(0.05), values=sw.TwoBit(), collective=kind()))


def test_the_value_codec_in_contributing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _example("values", ValueCodec)
    codec = kind()
    for selector in (sw.TopK(0.05), sw.Threshold(0.05), sw.RandomK(0.05), sw.Dense()):
        scheme = sw.Scheme(selector, values=codec)
        assert scheme.collective == sw.AllGather()
        _conserves(scheme)
        _read_back(monkeypatch, "values", codec, scheme)
    for values in (torch.randn(33), torch.zeros(5), torch.empty(0), torch.tensor([1e38, -1e-38])):
        segments = sw.segments.Segments.partition({"x": (values.numel(),)}, sw.Dense())
        place = Place(torch.empty(0, dtype=torch.int64), segments, 0, Workspace())
        data = codec.encode(values, place)
        assert (data.dtype, data.numel()) == (torch.uint8, codec.nbytes(segments))
        again = codec.decode(data, place, values.dtype)
        assert again.isfinite().all()
        assert not again[values == 0].any()
        error = (again - values).abs().max() if values.numel() else torch.zeros(())
        assert error <= (values.abs().max() if values.numel() else 0) / 127
