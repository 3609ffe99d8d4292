"""What the laws are tried on: an example of every part, all schemes made of them, and a crew.

Instances are made from the families' `ALL`, so a new part meets every law as soon as it is named.
`EXAMPLES` only says which arguments are worth trying; `test_cases.py` holds it complete.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

import sparsewire as sw
from sparsewire.desk import Call
from sparsewire.engine import Exchange, Unsound, agree
from sparsewire.kernels.cards import owned
from sparsewire.ledger import Ledger
from sparsewire.memory import LEDGER
from sparsewire.meter import Meter
from sparsewire.scheme import AnyScheme, as_scheme
from sparsewire.segments import Segments, Span
from sparsewire.selectors import Draw, Selector
from sparsewire.shards import OWNED
from sparsewire.values import Place, ValueCodec
from sparsewire.workspace import Workspace

EXAMPLES: dict[type, tuple[Any, ...]] = {
    sw.TopK: (sw.TopK(0.1), sw.TopK(count=3)),
    sw.Threshold: (sw.Threshold(0.1), sw.Threshold(0.05, sample=100)),
    sw.RandomK: (sw.RandomK(0.1), sw.RandomK(0.1, shared=False)),
    sw.BlockRandomK: (sw.BlockRandomK(0.1), sw.BlockRandomK(0.1, shared=True)),
    sw.TopBlock: (sw.TopBlock(0.1, block=8), sw.TopBlock(count=20, block=3)),
    sw.LeaderTopK: (sw.LeaderTopK(0.1), sw.LeaderTopK(count=3)),
    sw.UnionTopK: (sw.UnionTopK(0.1), sw.UnionTopK(count=2)),
    sw.OneBit: (sw.OneBit(), sw.OneBit("threshold"), sw.OneBit("column")),
    sw.KBit: (sw.KBit(3),),
    sw.QSGD: (sw.QSGD(), sw.QSGD(8, bucket=64)),
    sw.Sharded: (sw.Sharded(), sw.Sharded(1.0)),
    sw.ErrorFeedback: (sw.ErrorFeedback(), sw.ErrorFeedback(dtype="bfloat16")),
    sw.MomentumCorrection: (
        sw.MomentumCorrection(),
        sw.MomentumCorrection(0.5, nesterov=True),
        sw.MomentumCorrection(masking=False, clip=1.0),
    ),
}

SCOPES: tuple[Any, ...] = ("layer", "global", 50)
WORLDS = (1, 2, 3, 4)
WHOLE = 64  # so that these small tensors are sparsified

# two tensors to sparsify, and every odd kind between them
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (4, 3, 3, 3),
    "bias": (7,),
    "scalar": (),
    "nothing": (0, 5),
    "matrix": (24, 13),
    "single": (1, 1),
}

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
LAWFUL = settings(derandomize=True, deadline=None, max_examples=40)


def examples(family: str) -> list[Any]:
    """Instances of every part that the family names."""
    return [one for kind in sw.FAMILIES[family] for one in EXAMPLES.get(kind) or (kind(),)]


def random_selectors() -> list[Selector]:
    """Selectors that choose by chance: seeded, and not everything."""
    return [
        s for s in examples("selectors") if s.coordination.is_seeded and s.contraction(1000) < 1
    ]


def is_cast(codec: ValueCodec) -> bool:
    """Whether every value is written as a number of its own."""
    return codec.linear


def rolls_dice(codec: ValueCodec) -> bool:
    """Whether what is written depends on the key, and so on the rank."""
    segments = alone(sw.TopK(count=99), 100)
    values = torch.linspace(0.1, 1, 99)
    first, second = (Place(torch.arange(99), segments, key) for key in (1, 2))
    return not torch.equal(codec.encode(values, first), codec.encode(values, second))


def combinations() -> Iterator[sw.Scheme]:
    """Every selector, value codec, collective and scope that go together, with error feedback.

    Index codecs take turns, so that each of them meets every selector that it goes with.
    """
    codecs = examples("values")
    for selector, values, collective, scope in itertools.product(
        examples("selectors"), codecs, examples("collectives"), SCOPES
    ):
        allowed = []
        for indices in examples("indices"):
            with contextlib.suppress(sw.SchemeError):
                allowed.append(
                    sw.Scheme(
                        selector,
                        values=values,
                        indices=indices,
                        collective=collective,
                        scope=scope,
                        whole=WHOLE,
                    )
                )
        if allowed:
            turn = codecs.index(values) + 2 * SCOPES.index(scope)
            yield allowed[turn % len(allowed)]


def way(scheme: sw.Scheme) -> tuple[object, object]:
    """What decides how a scheme's messages meet."""
    return scheme.selector, scheme.collective


def latin(schemes: Sequence[sw.Scheme]) -> list[sw.Scheme]:
    """A third of the schemes, as in a Latin square: every way meets every value codec and every
    scope, for laws that do not need all three at once."""
    ways: dict[object, int] = {}
    codecs = examples("values")
    chosen = []
    for scheme in schemes:
        number = ways.setdefault(way(scheme), len(ways))
        if (number + codecs.index(scheme.values) + SCOPES.index(scheme.scope)) % 3 == 0:
            chosen.append(scheme)
    return chosen


DIRECT, OWNED_WAYS = [], []
for one in combinations():
    (OWNED_WAYS if one.collective.fields else DIRECT).append(one)
OWNED_WAYS = latin(OWNED_WAYS)  # a sample is enough: what is written is written as elsewhere
SCHEMES = (*DIRECT, *OWNED_WAYS)
SAMPLE = [*latin(DIRECT), *OWNED_WAYS]


def label(part: object) -> str:
    """A part's notation, as a test's name."""
    return repr(part).replace(" ", "")


def alone(selector: Selector, length: int, scope: Any = "layer") -> Segments:
    """One tensor of this length, all of it to be selected from."""
    return Segments.cut({"x": (length,)}, selector, scope, whole=None)


def draw(step: int, rank: int = 0, seed: int = 0) -> Draw:
    return Draw(seed, step, rank)


def noise(world: int, size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One gradient per rank, with heavy tails so that coordinates differ in weight."""
    generator = torch.Generator().manual_seed(1000 * step + size)
    return [(torch.randn(size, generator=generator) ** 3).to(dtype) for _ in range(world)]


def named_noise(
    shapes: Mapping[str, tuple[int, ...]], step: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """One rank's gradients by name."""
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def within(actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> bool:
    """Whether every coordinate agrees to its own tolerance; NaN never does."""
    return bool(((actual.double() - expected.double()).abs() <= tolerance).all())


class Crew:
    """W ranks in one process, run through the simulated group, each seen with its own eyes."""

    def __init__(
        self,
        scheme: AnyScheme | Selector | str,
        world: int = 2,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        skips_unused: bool = False,
    ) -> None:
        self.scheme = as_scheme(scheme)
        self.world = world
        self.shapes = dict(shapes)
        self.dtype = dtype
        self.step = 0
        self.ledgers = [Ledger(self.scheme.fields, self.shapes, r, world) for r in range(world)]
        self.meters = [Meter() for _ in range(world)]
        self.work = [Workspace() for _ in range(world)]
        self.skips_unused = skips_unused

    @property
    def engine(self) -> Exchange:
        """The exchange of the next step."""
        scheme = self.scheme.at(self.step)
        return Exchange(scheme, scheme.cut(self.shapes), self.dtype, self.skips_unused)

    @property
    def size(self) -> int:
        """Length of the flat gradient."""
        return self.engine.segments.size

    def attempt(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Unsound | None]:
        """One exchange of flat gradients: what every rank holds then, and the verdict."""
        engine = self.engine
        flats = [gradient.clone() for gradient in gradients]
        runs = []
        kept = self.scheme.memory.kept_as(self.dtype)
        for rank, flat in enumerate(flats):
            shard = engine.shard(rank, self.world)
            before, after = self.ledgers[rank].open(0, engine.segments, kept, flat.device, shard)
            call = Call(self.step, rank, self.world)
            runs.append(engine.run(flat, before, after, call, self.meters[rank], self.work[rank]))
        group = sw.SimulatedGroup(self.world)
        findings = group.drive(runs, self.meters)
        closing = [agree([finding], rank) for rank, finding in enumerate(findings)]
        verdict, *others = group.drive(closing, self.meters)
        assert all(other == verdict for other in others)
        for ledger in self.ledgers:
            ledger.commit() if verdict is None else ledger.discard()
        self.step += verdict is None
        return flats, verdict

    def exchange(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of sound gradients as every rank holds it."""
        means, verdict = self.attempt(gradients)
        assert verdict is None
        return means

    def remembered(self, rank: int, field: str = LEDGER) -> Tensor:
        """What one rank remembers, flat and in double precision; zeros before the first step."""
        return torch.cat(
            [
                self.ledgers[rank].recall(span.name)[field].reshape(-1).double()
                if field in self.ledgers[rank].recall(span.name)
                else torch.zeros(span.length, dtype=torch.float64)
                for span in self.engine.segments.spans
            ]
        )

    def owned(self) -> Tensor:
        """What all ranks together hold back as owners, flat; in the unit of the mean."""
        held = torch.zeros(self.size, dtype=torch.float64)
        for rank, ledger in enumerate(self.ledgers):
            for span in self.engine.segments.spans:
                kept = ledger.recall(span.name).get(OWNED)
                if kept is not None:
                    places = torch.tensor(owned_places(span, rank, self.world), dtype=torch.int64)
                    held[span.start + places] += kept.double()
        return held

    def owed(self) -> Tensor:
        """What all ranks together still hold back, as workers and as owners."""
        kept = torch.stack([self.remembered(rank) for rank in range(self.world)]).sum(dim=0)
        return kept + self.world * self.owned()


def owned_places(span: Span, rank: int, world: int) -> list[int]:
    """The coordinates of a parameter that a rank owns, counted out one by one."""
    counts = [owned(span.name, length, rank, world) for length in range(span.length + 1)]
    return [place for place in range(span.length) if counts[place + 1] > counts[place]]


def owed_by(states: Sequence[sw.State], name: str) -> Tensor:
    """What all ranks hold back of one parameter, as workers and as owners."""
    kept = [state.memory[name] for state in states]
    owed = torch.stack([fields[LEDGER].double() for fields in kept]).sum(dim=0)
    flat, span = owed.view(-1), Span(name, tuple(owed.shape), 0)
    for rank, fields in enumerate(kept):
        if OWNED in fields:
            places = torch.tensor(owned_places(span, rank, len(states)), dtype=torch.int64)
            flat[places] += len(states) * fields[OWNED].double()
    return owed


def flatten(gradients: Mapping[str, Tensor], segments: Segments) -> Tensor:
    """Gradients by name as one flat tensor."""
    return torch.cat([gradients[span.name].reshape(-1) for span in segments.spans])
