"""One choice of all parts: defaults, what goes with what, and the notation for it.

`Scheme(TopK(0.01))` is complete: what is not named is derived from what is. A combination that
cannot work is refused here, where it is written, with the reason and what to write instead.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass

from . import codecs, collectives, memory, selectors
from .codecs import Bitmap, EliasFano, Float32, Implied, IndexCodec, ValueCodec
from .collectives import AllGather, AllReduce, Collective
from .errors import SchemeError
from .memory import ErrorFeedback, Memory
from .notation import Part, check_flag, read
from .segments import Scope, Segments, Shape
from .selectors import Coordination, Dense, Selector
from .state import StateField


@dataclass(frozen=True, repr=False)
class Scheme(Part):
    """What is sent, how it is written, what is kept back and how messages meet.

    Arguments:
        selector: which coordinates travel.
        values: how their values are written.
        indices: how the coordinates are written; the smallest that works if not named.
        memory: what happens to the rest.
        collective: how messages meet; derived from the other parts if not named.
        scope: 'layer', 'global', or the length of chunks within each tensor.
        dense_below: tensors of fewer elements than this are sent densely.
        dense_1d: so are 1-D tensors of any size, such as biases and norms.
        seed: of all random choices.

    >>> Scheme(selectors.TopK(0.01)).collective
    AllGather()
    >>> parse("Scheme(RandomK(0.01), scope='global')").collective
    AllReduce()
    """

    selector: Selector
    values: ValueCodec = Float32()
    indices: IndexCodec = None  # type: ignore[assignment]  # derived in __post_init__
    memory: Memory = ErrorFeedback()
    collective: Collective = None  # type: ignore[assignment]  # derived in __post_init__
    scope: Scope = "layer"
    dense_below: int = 1024
    dense_1d: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _check_kind("a scheme's first argument", self.selector, Selector, selectors.ALL)
        _check_kind("values=", self.values, ValueCodec, codecs.VALUES)
        _check_kind("memory=", self.memory, Memory, memory.ALL)
        for name in ("indices", "collective"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.implied(name))
        _check_kind("indices=", self.indices, IndexCodec, codecs.INDICES)
        _check_kind("collective=", self.collective, Collective, collectives.ALL)
        self._check_numbers()
        self._check_parts()

    def implied(self, name: str) -> object:
        if name == "indices":
            return _smallest(self.selector) if self._needs_indices else Implied()
        if name == "collective":
            selector = self.selector
            adds = selector.coordination.is_shared and self.values.linear
            if adds and not _is_negotiated(selector):  # else written indices do not go along
                adds = not self.indices.written
            return AllReduce() if adds else AllGather()
        return MISSING

    @property
    def _needs_indices(self) -> bool:
        """Whether some rank must write the coordinates for others to know them."""
        selector = self.selector
        return selector.proposers != "none" or selector.coordination is Coordination.LOCAL

    def _check_numbers(self) -> None:
        scope = self.scope
        if isinstance(scope, str):
            is_known = scope in ("layer", "global")
        else:
            is_known = _is_int(scope) and scope >= 1
        if not is_known:
            raise SchemeError(
                f"scope={scope!r} makes no sense: write 'layer', 'global', or the length of "
                f"chunks, such as 4096"
            )
        if not (_is_int(self.dense_below) and self.dense_below >= 0):
            raise SchemeError(
                f"dense_below={self.dense_below!r} makes no sense: it is the number of elements "
                f"under which tensors are sent densely, or 0"
            )
        check_flag(self, "dense_1d")
        if not _is_int(self.seed) or not abs(self.seed) < 2**63:
            raise SchemeError(
                f"seed={self.seed!r} makes no sense: a seed is a whole number of 64 bits"
            )

    def _check_parts(self) -> None:
        chosen = type(self.selector).__name__
        if self.collective.adds and not self.selector.coordination.is_shared:
            seeded = self.selector.coordination.is_seeded
            remedy = f"{chosen}(…, shared=True)" if seeded else "TopBlock(…)"
            raise SchemeError(
                f"{self.selector!r} cannot go by {self.collective!r}: ranks pick different "
                f"coordinates, so their values cannot be added on the way; write "
                f"collective=AllGather(), or {remedy}, whose coordinates all ranks share"
            )
        if self.collective.adds and not self.values.linear:
            raise SchemeError(
                f"{self.values!r} cannot go by {self.collective!r}: its messages cannot be added; "
                f"write collective=AllGather(), or values=Float32()"
            )
        if self.values.quantizes and self.selector.sends_all:
            raise SchemeError(
                f"{self.values!r} cannot go with {self.selector!r}: it quantizes what is selected, "
                f"and here everything is sent; write a ratio below 1 such as TopK(0.01), or "
                f"values=BFloat16() for a dense exchange in fewer bytes"
            )
        keys = [field.key for field in self.fields]
        if len(set(keys)) < len(keys):
            raise SchemeError(
                f"two parts of {self!r} keep a tensor with the same key: {', '.join(keys)}; give "
                f"the StateField of one of them another key"
            )
        if _is_negotiated(self.selector):
            self._check_negotiated()
        elif self.collective.adds and self.indices.written:
            raise SchemeError(
                f"{self.indices!r} cannot go by {self.collective!r}: indices cannot be added; "
                f"leave indices out, all ranks know them"
            )
        if not self.indices.written and self._needs_indices:
            raise SchemeError(
                f"{self.selector!r} needs its indices sent, since they depend on the gradient: "
                f"write indices=EliasFano() or leave indices out"
            )

    def _check_negotiated(self) -> None:
        selector, scope = self.selector, self.scope
        if self.collective.fields:
            raise SchemeError(
                f"{selector!r} cannot go by {self.collective!r}: its ranks have agreed on the "
                f"coordinates already, so owners have nothing left to choose; leave collective "
                f"out, and values are added on the way"
            )
        if self.indices.written and selector.proposers == "none":
            raise SchemeError(
                f"{self.indices!r} has nothing to write with {selector!r}: its ranks agree on the "
                f"coordinates by other numbers; leave indices out"
            )
        block = getattr(selector, "block", 0)
        if not isinstance(scope, str) and scope <= block:
            raise SchemeError(
                f"scope={scope!r} leaves {selector!r} nothing to choose: its blocks of {block} are "
                f"as long as a segment; write a scope of several blocks, or a smaller block="
            )

    @property
    def fields(self) -> tuple[StateField, ...]:
        """What the parts keep from step to step. Without memory, owners forget as well."""
        fields = self.memory.fields + self.selector.fields
        if self.memory.fields:
            fields += self.collective.fields
        owner = self.collective.owner_selector(self.selector)
        if owner is not None:
            fields += tuple(field.for_owner for field in owner.fields)
        return fields

    def at(self, step: int) -> Scheme:
        """The scheme of a given step: the same at all steps."""
        return self

    def partition(self, shapes: Mapping[str, Shape]) -> Segments:
        """Partition these parameters as the scheme says."""
        return Segments.partition(
            shapes, self.selector, self.scope, self.dense_below, self.dense_1d
        )


@dataclass(frozen=True, repr=False)
class Warmup(Part):
    """A scheme that starts dense.

    For the first `steps` steps everything is sent; with `ease=True` the ratio is eased in instead:
    at step t (from 0) a share R^(steps/(1+t)) is dropped, where R = 1 − ratio.

    >>> Warmup(selectors.TopK(0.01), steps=100).at(99).selector
    Dense()

    Reference: Aji & Heafield's later Marian code; Lin et al. 2018.
    """

    scheme: Scheme
    steps: int = 1000
    ease: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.scheme, Selector):
            object.__setattr__(self, "scheme", Scheme(self.scheme))
        if not isinstance(self.scheme, Scheme):
            raise SchemeError("Warmup wraps a scheme or a selector: Warmup(TopK(0.01), steps=1000)")
        check_flag(self, "ease")
        if not _is_int(self.steps) or self.steps < 1:
            raise SchemeError("Warmup's steps must be a whole number of at least 1")
        if self.ease and getattr(self.scheme.selector, "ratio", None) is None:
            raise SchemeError(
                f"the ratio of {self.scheme.selector!r} cannot be eased in, since it has none; "
                f"write a ratio such as TopK(0.01), or leave ease out for a dense start"
            )

    @property
    def memory(self) -> Memory:
        return self.scheme.memory

    @property
    def fields(self) -> tuple[StateField, ...]:
        return self.scheme.fields

    @property
    def scope(self) -> Scope:
        return self.scheme.scope

    def at(self, step: int) -> Scheme:
        """The scheme of a given step."""
        if step >= self.steps:
            return self.scheme
        full = self.scheme
        ratio = self._eased(step) if self.ease else 1.0
        if not self.ease or (ratio == 1.0 and full.values.quantizes):
            return Scheme(
                Dense(),
                values=full.values if full.values.linear else Float32(),
                memory=full.memory,
                scope=full.scope,
                dense_below=full.dense_below,
                dense_1d=full.dense_1d,
                seed=full.seed,
            )
        assert isinstance(full.selector, selectors.Sized)
        return Scheme(
            full.selector.resized(ratio),
            full.values,
            full.indices,
            full.memory,
            full.collective,
            full.scope,
            full.dense_below,
            full.dense_1d,
            full.seed,
        )

    def _eased(self, step: int) -> float:
        """The ratio of a step, 1.0 if nearly everything is sent."""
        full = self.scheme.selector
        assert isinstance(full, selectors.Sized)
        assert full.ratio is not None
        # 1 − (1 − ratio)^(steps/(1+t)), without losing a small ratio beside the 1
        dropped = math.log1p(-full.ratio) if full.ratio < 1 else -math.inf
        return -math.expm1(dropped * self.steps / (1 + step))


AnyScheme = Scheme | Warmup

FAMILIES: dict[str, tuple[type, ...]] = {
    "scheme": (Scheme, Warmup),
    "selectors": selectors.ALL,
    "values": codecs.VALUES,
    "indices": codecs.INDICES,
    "memory": memory.ALL,
    "collectives": collectives.ALL,
}


def parse(text: str) -> AnyScheme:
    """The scheme that `text` writes down; a selector alone is enough.

    >>> parse("TopK(0.01)")
    Scheme(TopK(0.01))
    """
    names = {kind.__name__: kind for family in FAMILIES.values() for kind in family}
    return as_scheme(read(text, names))


def as_scheme(given: object) -> AnyScheme:
    """A scheme from a scheme, a selector, or text in the notation."""
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Selector):
        return Scheme(given)
    if isinstance(given, (Scheme, Warmup)):
        return given
    raise SchemeError(
        f"{_shown(given)} is no scheme: write a selector such as TopK(0.01), or "
        f"Scheme(TopK(0.01), …)"
    )


def _is_negotiated(selector: Selector) -> bool:
    return selector.coordination is Coordination.NEGOTIATED


def _smallest(selector: Selector) -> IndexCodec:
    """The index codec with the fewest bits per coordinate at the selector's density."""
    ratio = getattr(selector, "ratio", None)
    # where all propose, each rank names few, whatever the ratio is
    if ratio is None or selector.proposers == "all":
        return EliasFano()
    low = math.floor(-math.log2(ratio))  # not of 1/ratio, which may be beyond all bounds
    # bits per coordinate of the gradient: 1, or ratio·(low + 1) + 1/2^low
    return Bitmap() if ratio * (low + 1) + 2.0**-low > 1 else EliasFano()


def _check_kind(where: str, part: object, kind: type, family: tuple[type, ...]) -> None:
    if not isinstance(part, kind):
        names = ", ".join(f"{member.__name__}()" for member in family)
        raise SchemeError(f"{where} takes one of {names}; this is {_shown(part)}")


def _shown(thing: object) -> str:
    """A short repr on one line; a module's own has a line for each layer."""
    return " ".join(reprlib.repr(thing).split())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
