"""Ranks that train and exchange updates, in one process: real optimizers and `Updates`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import sparsewire as sw
from sparsewire.adapters.updates import StepAhead, Updates
from sparsewire.exchange import NonFinite
from sparsewire.groups.simulated import SimulatedGroup
from sparsewire.message import MAGIC
from sparsewire.requests import Request, Routine
from sparsewire.scheme import AnyScheme
from sparsewire.session import Session, Topology
from sparsewire.state import RESIDUAL

from .cases import SHAPES, owed_by

Result = TypeVar("Result")
Shapes = Mapping[str, tuple[int, ...]]
Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
Pull = Callable[[Tensor, int, int], Tensor]  # weights, rank and local step to a gradient


def sgd(rate: float = 0.1, **options: Any) -> Make:
    """SGD, for `Team`."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


def adamw(rate: float = 0.01, **options: Any) -> Make:
    """AdamW, for `Team`."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, **options)


def start(shapes: Shapes) -> dict[str, Tensor]:
    """The weights that all ranks begin with."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def pull(weights: Tensor, rank: int, step: int) -> Tensor:
    """A gradient towards a centre of the rank's own, which moves from step to step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return weights - torch.randn(weights.shape, generator=generator) ** 3


class Network(SimulatedGroup):
    """Flips a byte of one message of every round: number `corrupt`, headers not counted."""

    def __init__(self, size: int, **groups: Sequence[Sequence[int]]) -> None:
        super().__init__(size, **groups)
        self.corrupt: int | None = None
        self.count = 0

    def carry(self, ranks: Sequence[int], requests: Sequence[Request]) -> list[Any]:
        first = requests[0]
        if first.group != "intra_node" and first.payload.numel() and not _is_header(first.payload):
            if self.count == self.corrupt:
                sender = first.root if first.op == "broadcast" else 0
                payload = requests[sender].payload.clone()
                payload.view(torch.uint8).view(-1)[-1] ^= 1  # of an all-to-all for the last rank
                requests = list(requests)
                requests[sender] = replace(requests[sender], payload=payload)
            self.count += 1
        return super().carry(ranks, requests)


def _is_header(payload: Tensor) -> bool:
    return bytes(payload.view(torch.uint8).view(-1)[: len(MAGIC)].tolist()) == MAGIC


class Rank:
    """One rank: its model, its optimizer, and its part in the exchange of updates."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        updates: Updates,
        pull: Pull,
        number: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.updates = updates
        self.pull = pull
        self.number = number
        self.steps = 0
        self.update = torch.zeros(0)

    @property
    def names(self) -> list[str]:
        return list(self.updates.weights.parameters)

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name as one vector, in the model's order and the type of sums."""
        flats = [tensors[name].detach().reshape(-1) for name in self.names]
        return torch.cat(flats).to(self.updates.weights.dtype)

    @property
    def live(self) -> Tensor:
        """The weights that this rank trains with."""
        return self.flat(self.updates.weights.parameters)

    @property
    def shared(self) -> Tensor:
        """The weights that all ranks agree on."""
        weights = self.updates.weights
        return self.flat(weights.values(weights.shared))

    @property
    def residual(self) -> Tensor:
        """What this rank has not sent, zeros before the first round."""
        store, zeros = self.updates.session.store, torch.zeros
        shapes = self.updates.weights.shapes
        held = {name: store.get(name).get(RESIDUAL, zeros(shapes[name])) for name in self.names}
        return self.flat(held)

    def train(self, steps: int) -> None:
        """Take local steps of the rank's own optimizer, and note what they subtracted."""
        before = self.live
        for _ in range(steps):
            for name, gradient in self._gradients().items():
                self.updates.weights.parameters[name].grad = gradient
            self.optimizer.step()
            self.steps += 1
        self.update = before - self.live

    def _gradients(self) -> dict[str, Tensor]:
        parameters = self.updates.weights.parameters
        flat = self.pull(self.live, self.number, self.steps)
        parts = flat.split([parameters[name].numel() for name in self.names])
        return {
            name: part.view(parameters[name].shape).to(parameters[name].dtype)
            for name, part in zip(self.names, parts, strict=True)
        }

    def round(self) -> Routine[NonFinite | sw.errors.CorruptMessageError | None]:
        """End a round; a corrupt message is returned, so that all ranks are seen to end."""
        return (yield from _caught(self.updates.round()))


class Team:
    """W ranks that train one model together.

    Arguments:
        scheme, world_size: what they exchange and how many they are.
        make: every rank's own optimizer.
        every: H, local steps in a round.
        shapes: of the model; `dtypes` of its parameters where they are not float32.
        values: the weights to begin with.
        pull: the gradients.
        outer: an outer optimizer, or none.
        buffers: of the model, by name, filled with another number on every rank.
        step_ahead, is_delayed: see `Updates`.
        machines: on how many the ranks run, each of which takes part as one.
    """

    def __init__(
        self,
        scheme: AnyScheme | str,
        world_size: int = 3,
        make: Make | None = None,
        *,
        every: int = 1,
        shapes: Shapes = SHAPES,
        dtypes: Mapping[str, torch.dtype] | None = None,
        values: Mapping[str, Tensor] | None = None,
        pull: Pull = pull,
        outer: Make | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        step_ahead: StepAhead = 0.0,
        is_delayed: bool = False,
        machines: int | None = None,
    ) -> None:
        self.scheme = sw.parse(scheme) if isinstance(scheme, str) else scheme
        self.world_size = world_size
        self.every = every
        self.is_delayed = is_delayed
        self.is_pending = False
        self.network = Network(world_size, **_groups(world_size, machines))
        self.ranks: list[Rank] = []
        for number in range(world_size):
            model = nn.Module()
            for name, value in (values or start(shapes)).items():
                kept = value.to((dtypes or {}).get(name, value.dtype), copy=True)
                model.register_parameter(name, nn.Parameter(kept))
            for name, value in (buffers or {}).items():
                model.register_buffer(name, torch.full_like(value, number + 1))
            parameters = dict(model.named_parameters())
            stepped = list(parameters.values())
            updates = Updates(
                Session(self.scheme, shapes, _place(number, world_size, machines)),
                parameters,
                step_ahead=step_ahead,
                outer=None if outer is None else outer(stepped),
                buffers=list(model.buffers()),
                is_delayed=is_delayed,
            )
            optimizer = (make or sgd())(stepped)
            self.ranks.append(Rank(model, optimizer, updates, pull, number))
        self.first = self.ranks[0]

    def train(self) -> None:
        """The local steps of a round, on all ranks."""
        for rank in self.ranks:
            rank.train(self.every)

    def round(self) -> NonFinite | sw.errors.CorruptMessageError | None:
        """Train, and exchange: what this round found, or the round before if it is delayed."""
        self.train()
        return self._end_late() if self.is_delayed else self.exchange()

    def exchange(self) -> NonFinite | sw.errors.CorruptMessageError | None:
        """End a round on all ranks."""
        return _same(self._drive([rank.round() for rank in self.ranks]))

    def _end_late(self) -> NonFinite | None:
        """End a round as with a delay: the last one's exchange ends, this one's begins."""
        found = self.finish()
        for rank in self.ranks:
            rank.updates.collect()
            with torch.no_grad():
                rank.updates.begin_early()
        self.is_pending = True
        return found

    def finish(self) -> NonFinite | None:
        """Carry out the exchange that is under way, if there is one."""
        if not self.is_pending:
            return None
        self.is_pending = False
        ends = self._drive([rank.updates.exchange() for rank in self.ranks])
        for rank, end in zip(self.ranks, ends, strict=True):
            with torch.no_grad():
                rank.updates.apply(*end)
        return _same([found for found, _ in ends])

    def _drive(self, routines: Sequence[Routine[Any]]) -> list[Any]:
        self.network.count = 0
        counters = [rank.updates.session.counters for rank in self.ranks]
        return self.network.drive(routines, counters)

    def take_down(self) -> None:
        """The exchange under way ends with a corrupt message, and a round begins without it."""
        assert self.is_pending
        self.is_pending = False
        for end in self._drive([_caught(rank.updates.exchange()) for rank in self.ranks]):
            assert isinstance(end, sw.errors.CorruptMessageError)
        for rank in self.ranks:
            with torch.no_grad():
                rank.updates.begin()

    def owed(self) -> Tensor:
        """What all ranks together have not sent, as workers and as owners of shards."""
        states = []
        for rank in self.ranks:
            store, shapes = rank.updates.session.store, rank.updates.weights.shapes
            held = {n: {RESIDUAL: torch.zeros(s), **store.get(n)} for n, s in shapes.items()}
            states.append(sw.functional.State(self.scheme, 0, held))
        return torch.cat([owed_by(states, name).view(-1) for name in self.first.names])


def _place(number: int, world_size: int, machines: int | None) -> Topology:
    if machines is None:
        return Topology(number, world_size)
    size = world_size // machines
    return Topology(number // size, machines, number % size, size)


def _groups(world_size: int, machines: int | None) -> dict[str, list[list[int]]]:
    if machines is None:
        return {}
    size = world_size // machines
    leaders = [list(range(0, world_size, size))]
    insides = [list(range(at, at + size)) for at in range(0, world_size, size)]
    return {"exchange": leaders, "status": leaders, "intra_node": insides}


def _same(found: Sequence[Any]) -> Any:
    """What all ranks found, which is the same."""
    said = {str(each) for each in found}
    assert len(said) == 1, said
    return found[0]


def _caught(routine: Routine[Result]) -> Routine[Result | sw.errors.CorruptMessageError]:
    try:
        return (yield from routine)
    except sw.errors.CorruptMessageError as error:
        return error
