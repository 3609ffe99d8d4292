"""The CUDA path, where there is a GPU: the same choices as on the CPU, and DDP on a side stream.

Also runs without pytest, on machines that only have torch: python -m tests.test_cuda
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from papers.problems import Cifar10, Mnist
from papers.recipe import Recipe
from papers.tasks import cifar10
from papers.trainer import Trainer
from sparsewire.adapters import capture
from sparsewire.adapters.simulation import Simulation
from sparsewire.counters import Counters
from sparsewire.digest import digest
from sparsewire.exchange import Call, Exchange, Finding, NonFinite, read_statuses, status_of
from sparsewire.state import StepState
from sparsewire.tools.tasks import mnist
from sparsewire.workspace import Workspace

SCHEMES = [
    f"Scheme({selector}, scope={scope})"
    for selector in (
        "TopK(0.05)",
        "Threshold(0.05)",
        "RandomK(0.05)",
        "BlockRandomK(0.05)",
        "TopBlock(0.05, block=16)",
        "LeaderTopK(0.05)",
        "UnionTopK(0.05)",
        "Dense()",
    )
    for scope in ("'layer'", "'global'", "500")
]
SCHEMES += [
    f"Scheme({selector}, values={values}, scope={scope})"
    for selector in ("TopK(0.05)", "Threshold(0.05)", "RandomK(0.05)", "TopBlock(0.05, block=7)")
    for values in (
        "OneBit()",
        "OneBit('threshold')",
        "OneBit('column')",
        "TwoBit()",
        "KBit(3)",
        "LloydMax(3)",
        "QSGD()",
    )
    for scope in ("'layer'", "'global'", "500")
]
SCHEMES += [
    f"Scheme({selector}(0.05), indices={indices}())"
    for selector in ("TopK", "Threshold", "RandomK")
    for indices in ("EliasFano", "Bitmap", "Int32")
]
SCHEMES += [
    f"Scheme({selector}(0.05), collective=Sharded({ratio}), values={values}, scope={scope})"
    for selector, values in (
        ("TopK", "Float32()"),
        ("Threshold", "TwoBit()"),
        ("BlockRandomK", "BFloat16()"),
    )
    for scope, ratio in (("'layer'", ""), ("'global'", "0.1"), ("500", "1.0"))
]
SHAPES = {"a": (300, 100), "b": (77,), "c": (50, 50, 3), "d": ()}

if "pytest" in sys.modules:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _simulate(scheme: str, device: str) -> list[torch.Tensor]:
    states = [
        sw.functional.init(scheme, {n: torch.zeros(s, device=device) for n, s in SHAPES.items()})
    ] * 3
    means = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = [
            {n: torch.randn(s, generator=generator).to(device) for n, s in SHAPES.items()}
            for _ in range(3)
        ]
        mean, states = sw.functional.simulate(gradients, states)
        means.append(torch.cat([m.reshape(-1).cpu() for m in mean.values()]))
    return means


def test_the_gpu_gives_the_cpus_bits() -> None:
    for scheme in SCHEMES:
        pairs = zip(_simulate(scheme, "cpu"), _simulate(scheme, "cuda"), strict=True)
        for step, (cpu, cuda) in enumerate(pairs):
            assert torch.equal(cpu, cuda), f"{scheme} differs at step {step}"


class Workers:
    """Simulated workers on the GPU, whose exchange nobody looks at before it is over."""

    def __init__(self, scheme: str, size: int = 3) -> None:
        chosen = sw.parse(scheme).at(0)
        self.exchange = Exchange(chosen, chosen.partition(SHAPES), size)
        length = self.exchange.segments.size
        self.gradients = [torch.zeros(length, device="cuda") for _ in range(size)]
        self.states = [StepState(self._zeros(rank), self._zeros(rank)) for rank in range(size)]
        self.all_counters = [Counters() for _ in range(size)]
        self.work = [Workspace() for _ in range(size)]

    def _zeros(self, rank: int) -> dict[str, torch.Tensor]:
        """Tensors for what a rank keeps."""
        fields = self.exchange.fields(rank)
        return {key: torch.zeros(cut.size + 1, device="cuda") for key, cut in fields.items()}

    def fill(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))

    def meet(self) -> list[Finding]:
        ranks = zip(self.gradients, self.states, self.all_counters, self.work, strict=True)
        runs = [
            self.exchange.run(gradient, state, Call(7, rank), counters, work)
            for rank, (gradient, state, counters, work) in enumerate(ranks)
        ]
        return sw.groups.SimulatedGroup(len(runs)).drive(runs, self.all_counters)

    def agree(self, findings: list[Finding]) -> NonFinite | None:
        statuses = [status_of([finding], rank) for rank, finding in enumerate(findings)]
        exchanges = [(findings[0].segments, findings[0].context)]
        return read_statuses(exchanges, torch.stack(statuses))

    def turn(self) -> None:
        for state in self.states:
            for key, kept in state.before.items():
                kept.copy_(state.after[key])


CAPTURED = (
    "TopK(0.05)",
    "Scheme(TopK(0.05), scope='global', values=TwoBit())",
    "Scheme(Threshold(0.05), values=BFloat16())",
    "Scheme(TopK(0.5), values=OneBit('column'))",
    "BlockRandomK(0.05)",
    "TopBlock(0.05, block=16)",
    "Scheme(TopBlock(0.05, block=7), values=TwoBit(), scope='global')",
    "LeaderTopK(0.05)",
    "Scheme(LeaderTopK(0.05), values=BFloat16(), indices=Bitmap())",
    "UnionTopK(0.05)",
    "Scheme(UnionTopK(count=2), indices=Int32(), scope=500)",
    "Scheme(RandomK(0.05), values=QSGD())",
    "Dense()",
    "Scheme(TopK(0.05), collective=Sharded())",
    "Scheme(Threshold(0.05), values=TwoBit(), scope='global', collective=Sharded(0.1))",
    "Scheme(BlockRandomK(0.05), collective=Sharded(1.0))",
)


def test_an_exchange_waits_for_nothing_and_can_be_captured() -> None:
    for scheme in CAPTURED:
        eager, captured = Workers(scheme), Workers(scheme)
        for step in range(3):  # kernels are compiled, tables made, headers compared
            for workers in (eager, captured):
                workers.fill(step)
                workers.meet()
                workers.turn()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.meet()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            findings = captured.meet()
        for step in range(3, 6):
            for workers in (eager, captured):
                workers.fill(step)
            eager.meet()
            graph.replay()
            assert captured.agree(findings) is None, scheme
            for one, other in zip(eager.gradients, captured.gradients, strict=True):
                assert torch.equal(one, other), f"{scheme}, step {step}"
            for workers in (eager, captured):
                workers.turn()


@contextlib.contextmanager
def _never_captured() -> Iterator[None]:
    usual, capture.EAGER = capture.EAGER, -1
    try:
        yield
    finally:
        capture.EAGER = usual


def test_a_captured_simulation_does_what_an_eager_one_does() -> None:
    for scheme in (*CAPTURED, "RandomK(0.05, shared=False)", "Warmup(TopK(0.05), steps=3)"):
        captured = Simulation(sw.parse(scheme), SHAPES, 3, torch.device("cuda"))
        with _never_captured():
            eager = Simulation(sw.parse(scheme), SHAPES, 3, torch.device("cuda"))
            eager.exchange()
        captured.exchange()
        for step in range(1, 40):  # leaders take turns, and all 12 turns are captured
            generator = torch.Generator().manual_seed(step)
            for one, other in zip(eager.gradients, captured.gradients, strict=True):
                one.copy_(torch.randn(one.shape, generator=generator))
                other.copy_(one)
            with _never_captured():
                eager.exchange()
            captured.exchange()
            for one, other in zip(eager.gradients, captured.gradients, strict=True):
                assert torch.equal(one, other), f"{scheme}, step {step}"
        assert captured.is_captured, scheme
        assert not eager.is_captured
        assert captured.flaw is None


def test_every_rank_leads_where_exchanges_are_captured() -> None:
    """Rank r is the only one with anything at place r, and 8 ranks take turns to name theirs."""
    scheme = sw.parse(
        "Scheme(LeaderTopK(count=1), memory=NoMemory(), dense_below=0, dense_1d=False)"
    )
    simulation = Simulation(scheme, {"x": (100,)}, 8, torch.device("cuda"))
    for step in range(48):
        for rank, gradient in enumerate(simulation.gradients):
            gradient.zero_()
            gradient[rank] = 1.0
        simulation.exchange()
        assert simulation.gradients[0].nonzero().view(-1).tolist() == [step % 8]
    assert simulation.is_captured


def test_training_is_captured_and_does_what_it_does_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (400, 784), generator=generator, dtype=torch.uint8)
    labels = images[:, :100].long().sum(1) % 10
    recipe = Recipe(
        "mnist",
        3,
        8,
        2,
        "sgd",
        0.05,
        momentum=0.9,
        drops=(1,),
        precision="float32",
        hidden=(64, 64),
    )
    weights = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        examples = mnist.Examples(images.to(device), labels.to(device))
        problem = Mnist(mnist.Data(examples, examples), recipe)
        trainer = Trainer(
            recipe, sw.parse("Scheme(TopK(0.05), dense_below=100)"), problem, 0, device
        )
        outcome = trainer.run(lambda look: None)
        assert outcome.captured == (device.type == "cuda")
        weights.append(trainer.weights.detach().cpu())
    # sums in another order may choose other coordinates: most weights agree, not all to a hair
    apart = (weights[0] - weights[1]).norm() / weights[0].norm()
    assert float(apart) < 1e-3


def test_batch_norm_is_captured() -> None:
    recipe = Recipe("cifar10", 4, 8, 2, "sgd", 0.01, momentum=0.9, precision="bfloat16")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (640, 32, 32, 3), generator=generator, dtype=torch.uint8).cuda()
    examples = cifar10.Examples(images, torch.arange(640).cuda() % 10)
    problem = Cifar10(cifar10.Data(examples, examples), recipe)
    device = torch.device("cuda")
    trainer = Trainer(recipe, sw.parse("BlockRandomK(0.01)"), problem, 0, device)
    outcome = trainer.run(lambda look: None)
    assert outcome.captured
    assert outcome.steps == 40
    assert not outcome.diverged
    counted = [int(b) for n, b in trainer.model.named_buffers() if n.endswith("batches_tracked")]
    assert set(counted) == {40}


def test_numbers_that_are_not_finite_are_told_at_the_end() -> None:
    workers = Workers("TopK(0.05)")
    workers.fill(0)
    assert workers.agree(workers.meet()) is None
    workers.gradients[1][5] = float("nan")
    status = workers.agree(workers.meet())
    assert status is not None
    assert status.parameters == {1: "a"}


def _train(rank: int, world_size: int, backend: str, port: int, scheme: str, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DDP(nn.Sequential(*layers).cuda(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = sw.attach(model, scheme, timeout=30)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(32, 256, generator=generator).cuda()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.save(
        torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]), f"{out}{rank}"
    )
    assert wire.steps == 6
    assert "sent per step" in str(wire.report(layers=True))
    wire.load_state_dict(wire.state_dict())
    wire.detach()
    dist.destroy_process_group()


def _spawn(world_size: int, backend: str, scheme: str) -> list[torch.Tensor]:
    import tempfile

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train, (world_size, backend, port, scheme, f"{folder}/"), world_size)
        return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(world_size)]


def test_a_digest_is_the_same_on_both_devices() -> None:
    for size in (0, 3, 8, 1001):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.arange(size, dtype=dtype)
            assert digest({"x": tensor.cuda()}) == digest({"x": tensor})


def test_ddp_on_nccl_with_one_rank() -> None:
    for scheme in ("TopK(0.05)", "RandomK(0.05)", "Scheme(TopK(0.05), scope='global')"):
        assert _spawn(1, "nccl", scheme)[0].isfinite().all()


def test_ddp_on_gloo_with_two_ranks_on_one_gpu() -> None:
    for scheme in ("TopK(0.05)", "RandomK(0.05)", "Scheme(TopK(0.05), scope='global')"):
        one, two = _spawn(2, "gloo", scheme)
        assert torch.equal(one, two)


if __name__ == "__main__":
    failed = 0
    tests = {name: test for name, test in list(globals().items()) if name.startswith("test_")}
    for name, test in tests.items():
        try:
            test()
            print("passed", name, flush=True)
        except Exception:
            failed += 1
            print("FAILED", name, traceback.format_exc()[-3000:], flush=True)
    print(f"{len(tests) - failed} passed, {failed} failed on {torch.__version__}")
    sys.exit(failed > 0)
