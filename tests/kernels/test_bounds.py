"""Whether a Triton kernel accesses memory outside the tensors it was given; see `bounds`.

The tests run in Triton's interpreter, in their own process, like those in `test_triton`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

import sparsewire as sw
from sparsewire import kernels
from sparsewire.adapters.simulation import Simulation
from sparsewire.kernels import reference
from sparsewire.workspace import Workspace

from . import agreement as agree
from .bounds import Bounds, checked

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="see test_in_the_interpreter")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Triton kernels, with several tiles, groups and blocks even in small tensors."""
    from sparsewire.kernels import cuda

    monkeypatch.setattr("sparsewire.kernels.cuda.plan.TILE", 128)
    monkeypatch.setattr("sparsewire.kernels.cuda.plan.GROUP", 2)
    for module in ("extract", "sums"):
        monkeypatch.setattr(f"sparsewire.kernels.cuda.{module}.LANES", 16)
    for module in ("extract", "plan"):
        monkeypatch.setattr(f"sparsewire.kernels.cuda.{module}.HELD", 64)
    return cuda


@pytest.fixture
def bounds(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bounds]:
    with checked(monkeypatch) as bounds:
        yield bounds


@pytest.mark.slow  # an interpreter runs every program of every launch
@pytest.mark.timeout(300)
@pytest.mark.skipif(IS_INTERPRETED or not find_spec("triton"), reason="is it")
def test_in_the_interpreter() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


WHERE = ("nearly all", "layers, dense between", "global over many spans", "empty spans")
ROWS = ("normal", "NaNs", "ties at the edge", "zeros", "heavy tail")


@interpreted
@pytest.mark.parametrize("name", ["top_k", "over_threshold", "chosen"])
def test_extraction(cuda: ModuleType, bounds: Bounds, name: str) -> None:
    rows = itertools.cycle(ROWS)
    for segments in (agree.layouts(150, 0.25)[where] for where in WHERE):
        work = Workspace()
        before, after = (torch.zeros(segments.size + 1) for _ in range(2))
        for key in range(3):
            addend = agree.rows(segments.size)[next(rows)]
            if name == "top_k":
                cuda.top_k(before, addend, after, segments, work)
            elif name == "over_threshold":
                sample = 20 if key % 2 else 1000
                cuda.over_threshold(before, addend, after, segments, sample, key, work)
            else:
                indices = cuda.random_k(segments, key, CPU, work)
                cuda.chosen(before if key else None, addend, after, segments, indices, work)
            before, after = after, before
    expected = {
        "top_k": {"accumulate", "rank", "deposit_again", "count_over", "extract"},
        "over_threshold": {"bisect_sample", "rank_sample", "extract"},
        "chosen": {"draw_round", "draw_rest", "count_drawn", "write_drawn", "accumulate", "gather"},
    }
    assert expected[name] <= bounds.launches.keys()


@interpreted
def test_runs_and_blocks(cuda: ModuleType, bounds: Bounds) -> None:
    for where, (segments, block) in itertools.islice(agree.block_layouts(150).items(), 0, None, 3):
        work, addend = Workspace(), agree.rows(segments.size)["NaNs"]
        cuda.block_random_k(segments, len(where), CPU, work)
        cuda.block_norms(None, addend, segments, block, work)
        cuda.block_norms(torch.ones(segments.size + 1), addend, segments, block, work)
    assert {"write_runs", "add_squares"} <= bounds.launches.keys()


@interpreted
@pytest.mark.parametrize("is_selected", [False, True])
def test_sums(cuda: ModuleType, bounds: Bounds, is_selected: bool) -> None:
    """More messages than one launch searches, some empty, with and without dense values."""
    for where, segments in agree.layouts(150).items():
        segments = replace(segments, dense=()) if is_selected else segments
        work, flat = Workspace(), torch.empty(segments.size)
        for count in (1, 33) if where in WHERE else (3,):
            sent = agree.messages(segments, count)
            expected = torch.empty(segments.size)
            reference.add_up(expected, sent, 0.5, segments, work)
            cuda.add_up(flat, sent, 0.5, segments, work)
            agree.same(expected, flat, where)
            cuda.put_back(torch.zeros(segments.size + 1), *sent[0], segments, work)
    segments, flat = agree.partition([(90,)], 0.1), torch.zeros(92)
    wild = torch.tensor([-(2**40), -1, 5, 3, 3, 89, 90, 91, 2**40])
    cuda.add_up(flat[1:91], [(wild, torch.ones(9)), (wild[:0], torch.ones(0))], 1.0, segments, work)
    cuda.put_back(flat[:91], wild, torch.ones(9), segments, work)
    assert {"find_bounds", "add_messages", "put_entries"} <= bounds.launches.keys()


@interpreted
def test_bytes(cuda: ModuleType, bounds: Bounds) -> None:
    for width, count in ((1, 9), (2, 64), (8, 65), (13, 40), (62, 7)):
        packed = cuda.pack(torch.arange(count), width)
        cuda.unpack(packed, count, width)
        cuda.unpack(packed[: width // 2], count, width)
    for count in (1, 40, 3000):
        flags = cuda.set_flags(torch.arange(0, 2 * count, 7) - 3, count)
        for wanted in (1, count, 2 * count):
            cuda.find_flags(flags, wanted)
        cuda.is_ascending(torch.arange(count), count)
        cuda.narrow(torch.ones(count), torch.empty(count, dtype=torch.bfloat16), 7)
    for many, words, indices, values in ((1, 1, 0, 0), (33, 5, 3, 9), (2, 1500, 1100, 30)):
        messages = [torch.zeros(8 * words, dtype=torch.uint8) for _ in range(many)]
        entries = [(torch.arange(indices), torch.ones(values)) for _ in range(many)]
        cuda.inspect(messages, entries, 1, 0, 8 * words, 1200)
        cuda.checksum(messages[0], 1)
    assert {
        *("pack_digits", "unpack_digits", "raise_flags", "count_flags", "place_flags"),
        *("check_ascending", "round_at_random", "checksum_block", "checksum_end"),
        *("inspect_block", "inspect_end"),
    } <= bounds.launches.keys()


SHAPES = {"first": (3, 9), "bias": (4,), "weight": (13, 23), "vector": (40,), "last": (6, 30)}
SCHEMES = (
    sw.Scheme(
        sw.TopK(0.05),
        values=sw.TwoBit(),
        memory=sw.MomentumCorrection(),
        collective=sw.Sharded(0.1),
        dense_below=40,
    ),
    sw.Scheme(sw.Threshold(0.05), values=sw.QSGD(4), collective=sw.Sharded(), dense_below=10),
    sw.Scheme(
        sw.BlockRandomK(0.1), memory=sw.ErrorFeedback(dtype="bfloat16"), collective=sw.Sharded(1.0)
    ),
    sw.Scheme(sw.TopBlock(0.1, block=8), values=sw.OneBit()),
    sw.Scheme(sw.RandomK(0.1), collective=sw.AllReduce()),
    sw.Scheme(sw.TopK(0.3), indices=sw.Bitmap()),
)


@interpreted
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.usefixtures("bounds")
def test_whole_exchanges(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, scheme: sw.Scheme
) -> None:
    monkeypatch.setattr(kernels, "_fastest", lambda kind: cuda)
    monkeypatch.setattr(kernels, "prepare", lambda kind: None)
    simulation = Simulation(scheme, SHAPES, 3, CPU)
    for step in range(2):
        for rank, gradient in enumerate(simulation.gradients):
            gradient.copy_(agree.normal(gradient.numel(), 10 * step + rank))
        simulation.exchange()
    assert simulation.flaw is None


@interpreted
@pytest.mark.usefixtures("bounds")
def test_an_access_outside_a_tensor_is_seen() -> None:
    from .faulty_kernels import copy, count

    memory = torch.ones(64)
    source, target = memory[16:26], torch.zeros(10)
    copy[(1,)](source, target, 0, 10, BLOCK=16)  # what is masked out may lie outside
    copy[(1,)](source, target, -3, 0, BLOCK=16)
    with pytest.raises(Exception, match=r"copy accessed byte 40 of source of copy, which has 40 b"):
        copy[(1,)](source, target, 1, 10, BLOCK=16)  # though its storage goes on
    with pytest.raises(Exception, match="accessed byte -4 of source"):
        copy[(1,)](source, target, -1, 10, BLOCK=16)
    with pytest.raises(Exception, match="accessed byte 36 of target of copy, which has 36 b"):
        copy[(1,)](source, target[:9], 0, 10, BLOCK=16)
    with pytest.raises(Exception, match="accessed byte 8 of counter"):
        count[(1,)](torch.zeros(2, dtype=torch.int32), 2)


@interpreted
@pytest.mark.usefixtures("bounds")
def test_an_address_in_a_table_has_bounds_too() -> None:
    from .faulty_kernels import note_address, read_from_address

    table, source, target = torch.zeros(1, dtype=torch.int64), torch.ones(5), torch.zeros(1)
    note_address[(1,)](table, source)
    read_from_address[(1,)](table, target, 4)
    assert target == 1
    with pytest.raises(Exception, match="byte 20 of source of note_address, which has 20 bytes"):
        read_from_address[(1,)](table, target, 5)
    del source
    with pytest.raises(Exception, match="source of note_address, which was freed"):
        read_from_address[(1,)](table, target, 4)
