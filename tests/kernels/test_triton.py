"""The Triton kernels against the reference: on a GPU if there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so its tests run in their own process.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from sparsewire.kernels import Kernels, reference
from sparsewire.workspace import Workspace

from . import agreement as agree

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU and not IS_INTERPRETED else "cpu")

on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="see test_in_the_interpreter")
anywhere = pytest.mark.skipif(
    DEVICE.type == "cpu" and not IS_INTERPRETED, reason="see test_in_the_interpreter"
)


@pytest.fixture
def cuda() -> ModuleType:
    from sparsewire.kernels import cuda

    return cuda


@pytest.fixture
def small_tiles(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and groups even in small segments."""
    monkeypatch.setattr("sparsewire.kernels.cuda.plan.TILE", 128)
    monkeypatch.setattr("sparsewire.kernels.cuda.plan.GROUP", 2)
    for module in ("extract", "sums"):
        monkeypatch.setattr(f"sparsewire.kernels.cuda.{module}.LANES", 16)


@pytest.mark.slow  # an interpreter runs every program of every launch
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    IS_INTERPRETED or HAS_GPU or not find_spec("triton"), reason="is it, or runs for real"
)
def test_in_the_interpreter() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@on_gpu
@pytest.mark.parametrize("size", [300, 10_000])
@pytest.mark.parametrize("check", agree.CHECKS, ids=lambda check: check.__name__)
def test_agrees(cuda: Kernels, check: agree.Check, size: int) -> None:
    check(cuda, DEVICE, size)


SMALL = [
    agree.check_chosen_nowhere,
    agree.check_put_back,
    agree.check_unpack_random_bytes,
    agree.check_set_flags,
    agree.check_digest,
    agree.check_is_ascending,
    agree.check_inspect,
]


@interpreted
@pytest.mark.parametrize("check", SMALL, ids=lambda check: check.__name__)
def test_agrees_in_the_interpreter(cuda: Kernels, check: agree.Check) -> None:
    check(cuda, DEVICE, 70)


@interpreted
def test_bytes_agree_in_the_interpreter(cuda: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    for width, count in ((1, 9), (3, 64), (8, 65), (13, 40), (33, 8), (62, 7)):
        numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator)
        packed = reference.pack(numbers, width)
        agree.same(packed, cuda.pack(numbers, width), f"pack {width}")
        agree.same(
            reference.unpack(packed, count, width), cuda.unpack(packed, count, width), "unpack"
        )
    for bits in (0, 3, 255):
        data = torch.randint(0, 256, (40,), dtype=torch.uint8, generator=generator) & bits
        for count in (1, 40, 325):
            agree.same(reference.find_flags(data, count), cuda.find_flags(data, count), "flags")
    wide = agree.rows(101)["NaNs and infinities"]
    ours, theirs = (torch.empty(101, dtype=torch.bfloat16) for _ in range(2))
    reference.narrow(wide, ours, 7)
    cuda.narrow(wide, theirs, 7)
    agree.same(ours, theirs, "narrow")


@interpreted
def test_the_taps_of_a_convolution_do_not_mislead_a_guess(cuda: Kernels) -> None:
    from sparsewire.kernels.cuda.plan import plan_of
    from sparsewire.kernels.cuda.rank import ALL, PATH

    taps = torch.tensor([1, 2, 1, 2, 4, 2, 1, 2, 1.0])
    for sizes in (taps, 1 / taps):
        segments = agree.partition([(64, 64, 3, 3)], 0.01)
        pair = agree.Pair(cuda, DEVICE, segments, "convolution")
        agree._step(pair, (agree.normal(36864).view(-1, 9) * sizes).view(-1), agree._top_k, 0)
        pair.compare()
        assert (plan_of(segments, DEVICE, pair.work).state[:, PATH.value] < ALL.value).all()


ROWS = ("normal", "zeros", "ties at the edge", "NaNs", "denormals and zeros", "heavy tail")
COURSES = ("to and fro", "begins with nothing", "through ties", "through infinity")
WHERE = (
    "one segment",
    "nearly all",
    "layers, dense between",
    "global over many spans",
    "dense only",
    "empty spans",
    "nothing",
)


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["top_k", "over_threshold"])
def test_withdrawals_agree_in_the_interpreter(cuda: Kernels, name: str, where: str) -> None:
    call, slack = (agree._top_k, 0.0) if name == "top_k" else (agree._over_threshold, 0.25)
    number = WHERE.index(where)
    segments = agree.layouts(270, slack)[where]
    for what in itertools.islice(itertools.cycle(ROWS), number, number + 2):
        row = agree.rows(segments.size)[what]
        pair = agree.Pair(cuda, DEVICE, segments, f"{name}, {where}, {what}")
        for key, addend in enumerate((row, row.flip(0).bfloat16())):
            agree._step(pair, addend, call, key)
        pair.compare()
    course = COURSES[number % len(COURSES)]
    pair = agree.Pair(cuda, DEVICE, segments, f"{name}, {where}, {course}")
    for key, addend in enumerate(agree.courses(segments.size)[course][:3]):
        agree._step(pair, addend, call, key)
    pair.compare()


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")  # as it should
def test_norms_of_blocks_agree_in_the_interpreter(cuda: Kernels) -> None:
    work = Workspace()
    for where, (segments, block) in agree.block_layouts(300).items():
        before = torch.cat([agree.normal(segments.size, 3), torch.zeros(1)])
        for what in ("normal", "NaNs and infinities", "denormals", "huge"):
            for kept, dtype in ((before, torch.float32), (None, torch.bfloat16)):
                addend = agree.rows(segments.size)[what].to(dtype)
                wanted = reference.block_norms(kept, addend, segments, block, work)
                got = cuda.block_norms(kept, addend, segments, block, work)
                agree.same(wanted, got, f"{where}, {what}")


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_random_choices_agree_in_the_interpreter(cuda: Kernels) -> None:
    for where in ("one segment", "nearly all", "layers, all sparse", "nothing"):
        segments, work = agree.layouts(150)[where], Workspace()
        for key in (0, -1, 2**63):
            expected = reference.random_k(segments, key, DEVICE, work)
            agree.same(expected, cuda.random_k(segments, key, DEVICE, work), f"{where}, {key}")
            expected = reference.block_random_k(segments, key, DEVICE, work)
            found = cuda.block_random_k(segments, key, DEVICE, work)
            agree.same(expected, found, f"{where}, {key}")


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_sums_agree_in_the_interpreter(cuda: Kernels) -> None:
    for where in ("one segment", "nearly all", "layers, dense between", "nothing"):
        segments, work = agree.layouts(270)[where], Workspace()
        for count in (0, 1, 9):
            sent = agree.messages(segments, count)
            ours, theirs = (torch.full((segments.size,), torch.nan) for _ in range(2))
            reference.add_up(ours, sent, 1 / 3, segments, work)
            cuda.add_up(theirs, sent, 1 / 3, segments, work)
            agree.same(ours, theirs, f"{where}, {count} messages")


@anywhere
def test_more_messages_than_one_launch_takes(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsewire.kernels.cuda.sums._MESSAGES", 2)
    segments, work = agree.layouts(100)["layers, dense between"], Workspace()
    sent = agree.messages(segments, 5)
    ours = torch.empty(segments.size)
    theirs = torch.empty(segments.size, device=DEVICE)
    reference.add_up(ours, sent, 0.2, segments, work)
    there = [(i.to(DEVICE), v.to(DEVICE)) for i, v in sent]
    cuda.add_up(theirs, there, 0.2, segments, work)
    agree.same(ours, theirs, "five messages, two at a time")


@anywhere
def test_wild_indices_touch_nothing_else(cuda: Kernels) -> None:
    """Whatever a message says, memory beyond the gradient stays as it is."""
    segments, work = agree.partition([(90,)], 0.1), Workspace()
    wild = torch.tensor([-(2**40), -1, 5, 3, 3, 89, 90, 91, 2**40], device=DEVICE)
    around = torch.full((190,), 7.0, device=DEVICE)
    cuda.add_up(around[50:140], [(wild, torch.ones(9, device=DEVICE))], 1.0, segments, work)
    residual = torch.cat([torch.zeros(91, device=DEVICE), torch.full((50,), 7.0, device=DEVICE)])
    cuda.put_back(residual[:91], wild, torch.ones(9, device=DEVICE), segments, work)
    assert (around[:50] == 7).all()
    assert (around[140:] == 7).all()
    assert (residual[91:] == 7).all()
    assert residual[90] == 0


@anywhere
def test_slices_that_are_not_aligned(cuda: Kernels) -> None:
    segments, work = agree.partition([(70, 5), (9,)], 0.1, dense_below=10), Workspace()
    addend = torch.cat([torch.zeros(1), agree.normal(segments.size)])
    before, ours = torch.zeros(segments.size + 1), torch.zeros(segments.size + 1)
    theirs = torch.zeros(segments.size + 2, device=DEVICE)
    expected = reference.top_k(before, addend[1:], ours, segments, work)
    got = cuda.top_k(before.to(DEVICE), addend.to(DEVICE)[1:], theirs[1:], segments, work)
    agree.same(expected.indices, got.indices, "indices")
    agree.same(expected.values, got.values, "values")
    agree.same(ours, theirs[1:], "after")


@anywhere
def test_guesses_are_counted(cuda: Kernels) -> None:
    """The first step knows nothing; later ones hit unless magnitudes jump."""
    from sparsewire.kernels.cuda.plan import plan_of

    segments, work = agree.partition([(2000,)], 0.05), Workspace()
    residual = [torch.zeros(segments.size + 1, device=DEVICE) for _ in range(2)]
    for step in range(6):
        addend = agree.normal(segments.size, step).to(DEVICE)
        scale = 0.01 if step == 5 else 1.0
        before = residual[0] if step < 5 else None
        cuda.top_k(before, scale * addend, residual[1], segments, work)
        residual.reverse()
    assert plan_of(segments, DEVICE, work).tally.tolist() == [[2, 6]]


@anywhere
@pytest.mark.usefixtures("cuda")
def test_coordinates_beyond_31_bits() -> None:
    """One tile of a gradient of which no other page is ever touched."""
    from sparsewire.kernels.cuda.accumulate import accumulate
    from sparsewire.kernels.cuda.launch import run
    from sparsewire.kernels.cuda.plan import STATE, TILE

    start = (2**31 // TILE + 1) * TILE
    size = start + 100
    try:
        before, addend, after = (torch.empty(size + 1, device=DEVICE) for _ in range(3))
    except RuntimeError:
        pytest.skip("no room for such tensors here")
    row = agree.normal(100).to(DEVICE)
    before[start:size], addend[start:size] = row, 1.0

    def table(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=DEVICE)

    state = torch.zeros(STATE, dtype=torch.int64, device=DEVICE)
    state[0] = torch.tensor([2.0]).view(torch.int32).item()
    listed = table(*[0] * 400, dtype=torch.int32)
    parts = table(0, 0, dtype=torch.int32)
    run(
        accumulate,
        (1,),
        before,
        addend,
        after,
        after,
        table(start, size, 0, -1),
        state,
        listed,
        parts,
        table(0, dtype=torch.int32),
        torch.zeros(1, device=DEVICE),
        table(0, dtype=torch.int32),
        0,
        100,
        100,
        HAS_BEFORE=True,
        LISTS=True,
        TILE=TILE,
        STATE=STATE,
    )
    hits = (row + 1).abs() >= 2
    assert parts.tolist() == [0, int(hits.sum())]
    count = int(hits.sum())
    assert listed[200 : 200 + count].tolist() == hits.nonzero().view(-1).tolist()
    assert torch.equal(after[start:size], torch.where(hits, 0.0, row + 1))


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device(cuda: Kernels) -> None:
    segments = agree.partition([(300, 300), (40,)], 0.01, dense_below=50, slack=0.25)
    residual = [torch.zeros(segments.size + 1, device=DEVICE) for _ in range(2)]
    addend = agree.normal(segments.size).to(DEVICE)
    flat = torch.empty_like(addend)
    data = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    work = Workspace()

    def everything() -> None:
        cuda.top_k(residual[0], addend, residual[1], segments, work)
        selection = cuda.over_threshold(residual[0], addend, residual[1], segments, 1000, 5, work)
        indices = cuda.random_k(segments, 1, DEVICE, work)
        cuda.chosen(residual[0], addend, residual[1], segments, indices, work)
        indices = cuda.block_random_k(segments, 1, DEVICE, work)
        cuda.add_up(flat, [(selection.indices, selection.values)] * 3, 0.5, segments, work)
        cuda.put_back(residual[1], selection.indices, selection.values, segments, work)
        cuda.unpack(cuda.pack(indices, 17), indices.numel(), 17)
        cuda.find_flags(cuda.set_flags(indices, segments.size), indices.numel())
        cuda.read_ascending(cuda.write_ascending(selection.indices, 6, segments), 6, segments)
        cuda.checksum(data, 3)
        cuda.is_ascending(indices, segments.size)
        cuda.narrow(addend, flat.bfloat16(), 3)

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_steps_can_be_captured_in_a_graph(cuda: Kernels) -> None:
    segments, work = agree.partition([(300, 300), (40,)], 0.01, dense_below=50), Workspace()
    before, after = (torch.zeros(segments.size + 1, device=DEVICE) for _ in range(2))
    addend = agree.normal(segments.size).to(DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cuda.top_k(before, addend, after, segments, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = cuda.top_k(before, addend, after, segments, work)
    for seed in range(1, 4):
        row = agree.normal(segments.size, seed) * 100**seed
        addend.copy_(row)
        graph.replay()
        ours = torch.zeros(segments.size + 1)
        zeros = torch.zeros(segments.size + 1)
        expected = reference.top_k(zeros, row, ours, segments, work)
        agree.same(expected.indices, selection.indices, "indices")
        agree.same(expected.values, selection.values, "values")
        agree.same(ours, after, "after")
