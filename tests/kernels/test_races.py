"""Threads of one program may not clear what others still read: held for the compiled kernels.

Triton gives a load and a store layouts of their own, so one thread may write what another one has
yet to read, and only a barrier keeps them apart. The interpreter has no threads and cannot show it;
compiled code can, and needs no GPU to be looked at.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from sparsewire.segments import Segments
from sparsewire.selectors import TopK
from sparsewire.workspace import Workspace

pytestmark = [
    pytest.mark.slow,  # a compiler at work
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not find_spec("triton") or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs Triton's compiler",
    ),
]

_NAME = re.compile(r"%[\w#]+")
_ACCESS = re.compile(r"tt\.(load|store|atomic_rmw)\b.*tensor<\d[^#]*(#\S+?)>")
_SAME_BUFFER = re.compile(r"= (tt\.(addptr|splat|broadcast|expand_dims)|ttg\.convert_layout) ")


@dataclass(frozen=True)
class Load:
    """One that no barrier has ended yet."""

    name: str
    buffer: str
    layout: str
    line: str


def hazards(code: str) -> list[str]:
    """Loads whose place another thread may overwrite before they happen.

    A store is safe behind a barrier, by the same thread, or if it depends on what was loaded: what
    goes from thread to thread goes through a barrier.
    """
    buffers: dict[str, str] = {}
    origins: dict[str, set[str]] = {}  # all that a value depends on
    loads: list[Load] = []
    found = []
    for line in map(str.strip, code.splitlines()):
        if re.search(r"\bbarrier\b", line):
            loads.clear()
        names = _NAME.findall(line)
        if not names:
            continue
        result, used = (names[0], names[1:]) if " = " in line else ("", names)
        depends = {*used}.union(*(origins.get(name, ()) for name in used))
        origins[result] = depends
        if _SAME_BUFFER.search(line):
            buffers[result] = buffers.get(used[0], used[0])
        access = _ACCESS.search(line)
        if access is None:
            continue
        kind, layout = access.groups()
        buffer = buffers.get(used[0], used[0])
        if kind == "load":
            loads.append(Load(result, buffer, layout, line))
            continue
        found += [
            f"{load.line}\n{line}"
            for load in loads
            if load.buffer == buffer and load.layout != layout and load.name not in depends
        ]
    return found


class Compiler:
    """Takes the place of a launch: compiles the kernel for a GPU of that kind, and keeps it."""

    def __init__(self) -> None:
        self.code: dict[str, str] = {}

    def __call__(self, kernel: Any, grid: object, given: Any, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names, kinds, known, aligned = kernel.arg_names, {}, {}, {}
        for number, name in enumerate(names):
            if name in options:
                kinds[name], known[number,] = "constexpr", options.pop(name)
                continue
            kinds[name] = _kind(given.args[number])
            if isinstance(given.args[number], torch.Tensor):
                aligned[number,] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=kinds, constexprs=known, attrs=aligned)
        options["enable_fp_fusion"] = False  # as a launch does
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.code[f"{kernel.__name__}{tuple(known.values())}"] = made.asm["ttgir"]


def _kind(value: object) -> str:
    names = {
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.uint8: "u8",
    }
    if isinstance(value, torch.Tensor):
        return f"*{names[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


@pytest.fixture
def cuda() -> ModuleType:
    from sparsewire.kernels import cuda

    return cuda


@pytest.fixture
def compiler(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr("sparsewire.kernels.cuda.launch.again", compiler)
    monkeypatch.setattr("sparsewire.kernels.cuda.extract.again", compiler)
    return compiler


def test_no_thread_clears_what_another_one_reads(cuda: ModuleType, compiler: Compiler) -> None:
    segments = Segments.partition({"a": (300, 1000), "b": (20,)}, TopK(0.01))
    before, addend, after = (torch.zeros(segments.size + 1) for _ in range(3))
    addend, work = addend[:-1].clone(), Workspace()
    cuda.top_k(before, addend, after, segments, work)
    cuda.over_threshold(before, addend, after, segments, 100_000, 1, work)
    indices = cuda.random_k(segments, 1, torch.device("cpu"), work)
    selection = cuda.chosen(before, addend, after, segments, indices, work)
    cuda.put_back(after, indices, selection.values, segments, work)
    cuda.block_norms(before, addend, segments, 128, work)
    cuda.block_norms(None, addend, segments, 100, work)
    assert {name.partition("(")[0] for name in compiler.code} >= {
        "rank",
        "extract",
        "rank_sample",
        "gather",
        "put_entries",
        "draw_round",
        "add_squares",
    }
    for name, code in compiler.code.items():
        assert not hazards(code), f"{name}:\n" + "\n".join(hazards(code))


def test_a_hazard_is_seen() -> None:
    code = """
      %1 = tt.splat %out : !tt.ptr<i32> -> tensor<256x!tt.ptr<i32>, #blocked1>
      %2 = tt.splat %out : !tt.ptr<i32> -> tensor<256x!tt.ptr<i32>, #blocked2>
      %3 = tt.load %1 cacheModifier = cg : tensor<256x!tt.ptr<i32>, #blocked1>
      BETWEEN
      tt.store %2, %cst : tensor<256x!tt.ptr<i32>, #blocked2>
    """
    assert len(hazards(code)) == 1
    assert not hazards(code.replace("BETWEEN", "gpu.barrier"))
    assert not hazards(code.replace("#blocked2", "#blocked1"))
    assert not hazards(code.replace("BETWEEN", "%cst = arith.addi %3, %3"))
