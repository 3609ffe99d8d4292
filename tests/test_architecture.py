"""Who may import whom, what is public, and what an import needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparsewire as sw

ROOT = Path(sw.__file__).parent
PAPERS = Path(__file__).parents[1] / "papers"
FILES = [*sorted(ROOT.rglob("*.py")), *sorted(PAPERS.rglob("*.py"))]

# An area imports from lower levels only, and from itself where it is a folder.
LEVELS = {
    "errors": 0,
    "randomness": 0,
    "workspace": 0,
    "notation": 1,
    "segments": 1,
    "requests": 2,
    "shards": 2,
    "counters": 2,
    "kernels": 3,
    "state": 3,
    "report": 3,
    "message": 4,
    "digest": 4,
    "codecs": 5,
    "memory": 5,
    "sums": 5,
    "layout": 6,
    "intra_node": 6,
    "selectors": 7,
    "collectives": 8,
    "scheme": 9,
    "exchange": 10,
    "session": 11,
    "explanation": 11,
    "groups": 11,
    "functional": 12,
    "adapters": 12,
    "": 13,  # the package itself
    "tools": 0,  # an empty package
    "tools.lab": 1,  # although it is a tool: it needs nothing but errors
    "tools.tasks": 14,
    "tools.bench": 15,
    "tools.cli": 16,
    "papers.tasks": 17,
    "papers": 18,
}


def area_of(path: Path) -> str:
    """The module or folder directly under the package, or under `tools`; '' for its __init__."""
    stem = "" if path.stem == "__init__" else path.stem
    return area_of_name(".".join((*package_of(path), stem)))


def area_of_name(name: str) -> str:
    """The area that a full name belongs to."""
    package, first, second, *_ = *name.split("."), "", ""
    if package == "papers":
        return "papers.tasks" if first == "tasks" else "papers"
    if first == "tools":
        return f"tools.{second}" if second else first
    return first if (ROOT / first).is_dir() or (ROOT / f"{first}.py").exists() else ""


def is_library(area: str) -> bool:
    """Whether an area is in the package and no tool."""
    return area.partition(".")[0] not in ("tools", "papers")


def package_of(path: Path) -> tuple[str, ...]:
    """The names of the package that a file lies in."""
    place = ROOT if path.is_relative_to(ROOT) else PAPERS
    return path.relative_to(place.parent).parts[:-1]


def imports(source: str, package: str) -> Iterator[tuple[str, bool]]:
    """Full names of all that is imported, and whether the import is at the top level."""
    tree = ast.parse(source)
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, [base if node.level else "", node.module]))
            for alias in node.names:
                yield f"{module}.{alias.name}", node in top


def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(path.read_text(), ".".join(package_of(path))))


def inner_areas(path: Path) -> set[str]:
    """The areas of the package and of `papers` that a file imports from."""
    names = [name for name, _ in imports_of(path)]
    return {area_of_name(n) for n in names if n.split(".")[0] in ("sparsewire", "papers")}


def mentions(path: Path, *packages: str) -> bool:
    """Whether a file imports one of these packages or anything in them."""
    return any(
        name == package or name.startswith(f"{package}.")
        for name, _ in imports_of(path)
        for package in packages
    )


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def outside(*areas: str) -> list[Path]:
    """The files of all other areas."""
    return [path for path in FILES if area_of(path) not in areas]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT if path.is_relative_to(ROOT) else PAPERS.parent))


def test_import_reader() -> None:
    source = """
import a.b
from c import d, e
from . import f
from .g import h
from ..i import j
def lazily():
    import k
"""
    assert sorted(imports(source, "top.sub")) == [
        ("a.b", True),
        ("c.d", True),
        ("c.e", True),
        ("k", False),
        ("top.i.j", True),
        ("top.sub.f", True),
        ("top.sub.g.h", True),
    ]


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_point_downwards(path: Path) -> None:
    area = area_of(path)
    for other in inner_areas(path) - {area}:
        assert LEVELS[other] < LEVELS[area], f"{area} may not import {other}"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_the_library_knows_neither_tools_nor_papers(path: Path) -> None:
    if is_library(area_of(path)):
        assert all(is_library(other) for other in inner_areas(path))


def test_areas_have_names() -> None:
    """Of files, and of what they import."""
    assert area_of(ROOT / "__init__.py") == ""
    assert area_of(ROOT / "errors.py") == "errors"
    assert area_of(ROOT / "groups" / "__init__.py") == "groups"
    assert area_of(ROOT / "tools" / "__init__.py") == "tools"
    assert area_of(ROOT / "tools" / "bench" / "train" / "plan.py") == "tools.bench"
    assert area_of(PAPERS / "tasks" / "cifar10.py") == "papers.tasks"
    assert area_of(PAPERS / "studies" / "beyond.py") == "papers"
    assert area_of_name("sparsewire.attach") == ""
    assert area_of_name("sparsewire.tools.lab.Lab") == "tools.lab"
    assert area_of_name("papers.reproduce.run") == "papers"


def test_every_module_has_its_level() -> None:
    assert {area_of(path) for path in FILES} == set(LEVELS)


def test_core_looks_as_the_design_says() -> None:
    """The rules above would pass an empty file too; these arrows must be there."""
    arrows = {
        ("selectors", "kernels"),
        ("scheme", "selectors"),
        ("exchange", "scheme"),
        ("session", "exchange"),
        ("adapters", "session"),
        ("adapters", "groups"),
        ("tools.cli", ""),
        ("tools.cli", "tools.lab"),
        ("papers", "tools.bench"),
        ("papers", "papers.tasks"),
    }
    found = {(area_of(path), other) for path in FILES for other in inner_areas(path)}
    assert arrows <= found


@pytest.mark.parametrize(
    "path", outside("groups", "adapters", "tools.bench", "tools.cli"), ids=short
)
def test_process_groups_only_at_the_edge(path: Path) -> None:
    assert not mentions(
        path, "torch.distributed", "torch._C._distributed_c10d", "torch.nn.parallel"
    )
    used = {ast.unparse(n) for n in ast.walk(tree_of(path)) if isinstance(n, ast.Attribute)}
    assert not used & {"torch.distributed", "nn.parallel", "torch.nn.parallel"}


@pytest.mark.parametrize("path", FILES, ids=short)
def test_compilers_are_imported_only_in_their_own_folders(path: Path) -> None:
    """They are imported when they are asked for; who asks does without if it must."""
    cpu, cuda = ("kernels/cpu/",), ("kernels/cuda/", "papers/layers_cuda.py")
    homes = {"numba": cpu, "llvmlite": cpu, "triton": cuda}
    for name, _ in imports_of(path):
        home = homes.get(name.split(".")[0])
        assert home is None or short(path).startswith(home)
    for name, at_top in imports_of(path):
        if name.startswith(("sparsewire.kernels.cpu", "sparsewire.kernels.cuda")) and at_top:
            assert short(path).startswith((*cpu, *cuda))


@pytest.mark.parametrize("path", outside("tools.bench", "tools.cli", "papers"), ids=short)
def test_packages_for_people_only_in_the_command_line(path: Path) -> None:
    assert not mentions(path, "rich", "matplotlib", "jinja2", "markupsafe", "scipy")


@pytest.mark.parametrize("path", FILES, ids=short)
def test_libraries_of_one_task_are_imported_there_and_when_used(path: Path) -> None:
    for name, at_top in imports_of(path):
        if name.split(".")[0] in {"sentencepiece", "sacrebleu"}:
            assert short(path) == "papers/tasks/translation.py"
            assert not at_top


@pytest.mark.parametrize("path", outside("tools.cli", "tools.tasks", "papers.tasks"), ids=short)
def test_random_numbers_come_from_the_counter(path: Path) -> None:
    calls = {ast.unparse(n.func) for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call)}
    drawing = {"manual_seed", "rand", "randn", "randint", "randperm", "bernoulli", "multinomial"}
    assert not {call for call in calls if call.split(".")[-1] in drawing}
    assert not mentions(path, "random", "numpy.random")


def test_triton_can_compile_the_arguments_of_kernels() -> None:
    """Its launcher has locals that arguments may not hide, and it ignores misspelt names."""
    found = 0
    for path in (path for path in FILES if mentions(path, "triton")):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {argument.arg for argument in function.args.args}
            for decorator in function.decorator_list:
                if not ast.unparse(decorator).startswith("triton.jit"):
                    continue
                found += 1
                assert not names & {"params", "options", "specialization"}, function.name
                for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    assert set(ast.literal_eval(keyword.value)) <= names, function.name
    assert found > 20


@pytest.mark.parametrize("path", FILES, ids=short)
def test_files_say_what_lives_in_them(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


PUBLIC = {
    "SparseHookState",
    "SparseUpdates",
    "SparsewireError",
    "attach",
    "explain",
    "parse",
    "sparse_hook",
}
PARTS = {kind.__name__ for family in sw.scheme.FAMILIES.values() for kind in family}
MODULES = {
    "codecs",
    "errors",
    "explanation",
    "functional",
    "groups",
    "report",
    "scheme",
    "segments",
}


def test_public_names_are_these() -> None:
    """Pinned: a name that is added or taken away is a promise made or broken."""
    assert set(sw.__all__) == PUBLIC | PARTS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Topk", "did you mean TopK"),
        ("simulate", "it is sparsewire.functional.simulate"),
        ("DistributedGroup", "it is sparsewire.groups.DistributedGroup"),
        ("StateError", "it is sparsewire.errors.StateError"),
    ],
)
def test_names_that_are_elsewhere_are_found(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(sw, name)


@pytest.mark.parametrize("name", sw.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    thing = getattr(sw, name)
    assert thing.__doc__
    if isinstance(thing, type):
        doc = thing.__dict__.get("__doc__")
        assert doc, f"{name} inherits its docstring"
        assert not doc.startswith(f"{name}("), f"{name} has the docstring of a dataclass"


def test_nothing_else_is_public() -> None:
    for name in sw.__all__:
        getattr(sw, name)  # names are loaded when first used
    ours = {
        name
        for name, thing in vars(sw).items()
        if not name.startswith("_") and getattr(thing, "__module__", "").startswith("sparsewire")
    }
    assert ours == {*sw.__all__}
    assert {name for name in dir(sw) if not name.startswith("__")} == {*sw.__all__, *MODULES}
    assert "__version__" in dir(sw)
    with pytest.raises(AttributeError, match="sparsewire has no 'TopQ'"):
        sw.TopQ  # noqa: B018


def test_type_checkers_see_every_public_name() -> None:
    """They do not run the package's `__getattr__`, so the names are imported for them as well."""
    shown = {name.rsplit(".", 1)[-1] for name, _ in imports_of(ROOT / "__init__.py")}
    assert {*sw.__all__, *MODULES} <= shown


@pytest.mark.parametrize("name", sorted(MODULES))
def test_public_modules_are_loaded_when_used(name: str) -> None:
    code = f"import sparsewire as sw; print(sw.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"sparsewire.{name}", done.stderr


def test_every_part_is_public() -> None:
    kinds = [kind for family in sw.scheme.FAMILIES.values() for kind in family]
    assert all(getattr(sw, kind.__name__) is kind for kind in kinds)


def test_every_error_derives_from_one() -> None:
    errors = [getattr(sw.errors, name) for name in vars(sw.errors) if name.endswith("Error")]
    assert len(errors) == 8
    assert all(issubclass(error, sw.SparsewireError) for error in errors)


BLOCKED = """
import sys

EXTRAS = {
    "rich", "matplotlib", "jinja2", "scipy", "numba", "triton", "sentencepiece", "sacrebleu"
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import sparsewire as sw
assert "torch" not in sys.modules, "torch is loaded before it is needed"
for name in sw.__all__:
    getattr(sw, name)
print(sw.parse("TopK(0.01)"))
"""


def test_import_needs_only_torch_and_numpy() -> None:
    found = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False
    )
    assert found.stdout == "Scheme(TopK(0.01))\n", found.stderr
