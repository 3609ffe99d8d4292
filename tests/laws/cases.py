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
from sparsewire.codecs import Place, ValueCodec
from sparsewire.counters import Counters
from sparsewire.exchange import Exchange, NonFinite
from sparsewire.randomness import RandomKey
from sparsewire.requests import Routine
from sparsewire.scheme import AnyScheme, as_scheme
from sparsewire.segments import ParamSlice, Segments
from sparsewire.selectors import Selector
from sparsewire.session import Session, Topology
from sparsewire.shards import owned
from sparsewire.state import OWNED, RESIDUAL, StateStore
from sparsewire.workspace import Workspace

EXAMPLES: dict[type, tuple[Any, ...]] = {
    sw.TopK: (sw.TopK(0.1), sw.TopK(count=3)),
    sw.Threshold: (sw.Threshold(0.1), sw.Threshold(0.05, sample=100, min_count=4)),
    sw.RandomK: (sw.RandomK(0.1), sw.RandomK(0.1, shared=False, min_count=4)),
    sw.BlockRandomK: (sw.BlockRandomK(0.1), sw.BlockRandomK(0.1, shared=True)),
    sw.TopBlock: (sw.TopBlock(0.1, block=8), sw.TopBlock(count=20, block=3)),
    sw.LeaderTopK: (sw.LeaderTopK(0.1), sw.LeaderTopK(count=3)),
    sw.UnionTopK: (sw.UnionTopK(0.1, min_count=4), sw.UnionTopK(count=2)),
    sw.OneBit: (sw.OneBit(), sw.OneBit("threshold"), sw.OneBit("column")),
    sw.KBit: (sw.KBit(3),),
    sw.LloydMax: (sw.LloydMax(3),),
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


def dense(limit: int | None) -> dict[str, Any]:
    """Arguments by which 1-D tensors and those under a limit are sent densely; None: none are."""
    return {"dense_below": limit or 0, "dense_1d": limit is not None}


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
    return [one for kind in sw.scheme.FAMILIES[family] for one in EXAMPLES.get(kind) or (kind(),)]


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
    first, second = (Place(torch.arange(99), segments, key, Workspace()) for key in (1, 2))
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
            with contextlib.suppress(sw.errors.SchemeError):
                allowed.append(
                    sw.Scheme(
                        selector,
                        values=values,
                        indices=indices,
                        collective=collective,
                        scope=scope,
                        dense_below=WHOLE,
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
    return Segments.partition({"x": (length,)}, selector, scope, dense_below=0, dense_1d=False)


def random_key(step: int, rank: int = 0, seed: int = 0) -> RandomKey:
    return RandomKey(seed, step, rank)


def noise(
    world_size: int, size: int, step: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """One gradient per rank, with heavy tails so that coordinates differ in weight."""
    generator = torch.Generator().manual_seed(1000 * step + size)
    return [(torch.randn(size, generator=generator) ** 3).to(dtype) for _ in range(world_size)]


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
        world_size: int = 2,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        skips_unused: bool = False,
        group: sw.groups.SimulatedGroup | None = None,
    ) -> None:
        self.scheme = as_scheme(scheme)
        self.world_size = world_size
        self.shapes = dict(shapes)
        self.dtype = dtype
        self.group = group or sw.groups.SimulatedGroup(world_size)
        self.sessions = [
            Session(self.scheme, shapes, Topology(rank, world_size), skips_unused=skips_unused)
            for rank in range(world_size)
        ]

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.sessions[0].steps

    @step.setter
    def step(self, number: int) -> None:
        for session in self.sessions:
            session.steps = number

    @property
    def stores(self) -> list[StateStore]:
        return [session.store for session in self.sessions]

    @property
    def all_counters(self) -> list[Counters]:
        return [session.counters for session in self.sessions]

    @property
    def next_exchange(self) -> Exchange:
        """The exchange of the next step."""
        scheme = self.scheme.at(self.step)
        return self.sessions[0].find_exchange(0, scheme, self.shapes, self.dtype)

    @property
    def segments(self) -> Segments:
        """How the flat gradient is cut in the next step."""
        return self.next_exchange.segments

    @property
    def size(self) -> int:
        """Length of the flat gradient."""
        return self.segments.size

    def runs(self, flats: Sequence[Tensor]) -> list[Routine[NonFinite | None]]:
        """Every rank's routine for the next step, in which the flat gradients become the mean."""
        return [
            take_step(session, flat, self.shapes)
            for session, flat in zip(self.sessions, flats, strict=True)
        ]

    def attempt(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], NonFinite | None]:
        """One step with flat gradients: what every rank holds then, and the verdict."""
        flats = [gradient.to(self.dtype, copy=True) for gradient in gradients]
        status, *others = self.group.drive(self.runs(flats), self.all_counters)
        assert all(other == status for other in others)
        return flats, status

    def exchange(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of sound gradients as every rank holds it."""
        means, status = self.attempt(gradients)
        assert status is None
        return means

    def remembered(self, rank: int, field: str = RESIDUAL) -> Tensor:
        """What one rank remembers, flat and in double precision; zeros before the first step."""
        store = self.stores[rank]
        return torch.cat(
            [
                store.get(param.name)[field].reshape(-1).double()
                if field in store.get(param.name)
                else torch.zeros(param.length, dtype=torch.float64)
                for param in self.segments.params
            ]
        )

    def owned(self) -> Tensor:
        """What all ranks together hold back as owners, flat; in the unit of the mean."""
        held = torch.zeros(self.size, dtype=torch.float64)
        for rank, store in enumerate(self.stores):
            for param in self.segments.params:
                kept = store.get(param.name).get(OWNED)
                if kept is not None:
                    places = torch.tensor(
                        owned_places(param, rank, self.world_size), dtype=torch.int64
                    )
                    held[param.start + places] += kept.double()
        return held

    def owed(self) -> Tensor:
        """What all ranks together still hold back, as workers and as owners."""
        kept = torch.stack([self.remembered(rank) for rank in range(self.world_size)]).sum(dim=0)
        return kept + self.world_size * self.owned()


def take_step(
    session: Session, flat: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Routine[NonFinite | None]:
    """One rank's step: a flat gradient becomes the mean."""
    transaction = session.begin()
    unit = transaction.unit(0, shapes, flat.dtype, flat.device, flat)
    yield from transaction.exchange(unit)
    status = yield from transaction.agree()
    transaction.commit() if status is None else transaction.rollback()
    return status


def owned_places(param: ParamSlice, rank: int, world_size: int) -> list[int]:
    """The coordinates of a parameter that a rank owns, counted out one by one."""
    counts = [owned(param.name, length, rank, world_size) for length in range(param.length + 1)]
    return [place for place in range(param.length) if counts[place + 1] > counts[place]]


def owed_by(states: Sequence[sw.functional.State], name: str) -> Tensor:
    """What all ranks hold back of one parameter, as workers and as owners."""
    kept = [state.memory[name] for state in states]
    owed = torch.stack([fields[RESIDUAL].double() for fields in kept]).sum(dim=0)
    flat, param = owed.view(-1), ParamSlice(name, tuple(owed.shape), 0)
    for rank, fields in enumerate(kept):
        if OWNED in fields:
            places = torch.tensor(owned_places(param, rank, len(states)), dtype=torch.int64)
            flat[places] += len(states) * fields[OWNED].double()
    return owed


def flatten(gradients: Mapping[str, Tensor], segments: Segments) -> Tensor:
    """Gradients by name as one flat tensor."""
    return torch.cat([gradients[param.name].reshape(-1) for param in segments.params])
