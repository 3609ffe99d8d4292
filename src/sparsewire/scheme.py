"""A scheme: one choice of each part, with defaults, checks and a text form.

`Scheme(TopK(0.01))` is complete: parts that are not named are derived from the others. A
combination that cannot work is refused when the scheme is built, with the reason and a remedy.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field

from . import codecs, collectives, memory, selectors
from .codecs import Bitmap, EliasFano, Float32, Implied, IndexCodec, ValueCodec
from .collectives import AllGather, AllReduce, Collective
from .errors import SchemeError
from .memory import ErrorFeedback, Memory
from .notation import Part, check_flag, read
from .segments import Scope, Segments, Shape
from .selectors import Coordination, Dense, Selector
from .state import StateField

__all__ = ["FAMILIES", "AnyScheme", "Scheme", "Warmup", "as_scheme", "parse"]


@dataclass(frozen=True, repr=False)
class Scheme(Part):
    """What to send, how to encode it, what to remember and how messages reach the other ranks.

    A scheme is a frozen value. Its `repr` is its text, which `parse` reads back.

    Arguments:
        selector: Which coordinates to send.
        values: How values are encoded.
        indices: How coordinates are encoded. If None: `Implied()` if every rank can derive the
            coordinates, else the smallest codec, which is `EliasFano()`, or `Bitmap()` if a rank
            sends more than about a quarter of the coordinates.
        memory: What happens to values that are not sent.
        collective: How messages reach the other ranks. If None: `AllReduce()` if all ranks send
            the same coordinates and values can be summed, else `AllGather()`.
        scope: What the selector works on: `'layer'` for each tensor by itself, `'global'` for the
            whole model, or a number for chunks of that length within each tensor.
        dense_below: Tensors with fewer elements than this are sent densely.
        dense_1d: If True, one-dimensional tensors of any size, such as biases and the weights of
            normalization layers, are sent densely too.
        seed: The seed of all random choices.

    Raises:
        SchemeError: The parts cannot work together. The message has a remedy.

    >>> import sparsewire as sw
    >>> scheme = sw.Scheme(sw.RandomK(0.01), values=sw.BFloat16(), scope=4096)
    >>> scheme.indices, scheme.collective
    (Implied(), AllReduce())
    >>> print(scheme)
    Scheme(RandomK(0.01), values=BFloat16(), scope=4096)
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
        """Return the part that is derived from the others if it is not named.

        :meta private:
        """
        if name == "indices":
            return _smallest(self.selector) if self._needs_indices else Implied()
        if name == "collective":
            selector = self.selector
            adds = selector.coordination.is_shared and self.values.linear
            if adds and not _is_negotiated(selector):  # negotiated values travel without indices
                adds = not self.indices.written
            return AllReduce() if adds else AllGather()
        return MISSING

    @property
    def _needs_indices(self) -> bool:
        """Whether some rank must send coordinates, because the others cannot derive them."""
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
                f"scope must be 'layer', 'global', or the length of chunks such as 4096, not "
                f"{scope!r}"
            )
        if not (_is_int(self.dense_below) and self.dense_below >= 0):
            raise SchemeError(
                f"dense_below must be the number of elements below which tensors are sent "
                f"densely, or 0, not {self.dense_below!r}"
            )
        check_flag(self, "dense_1d")
        if not _is_int(self.seed) or not abs(self.seed) < 2**63:
            raise SchemeError(
                f"seed must be a whole number that fits into 64 bits, not {self.seed!r}"
            )

    def _check_parts(self) -> None:
        chosen = type(self.selector).__name__
        if self.collective.adds and not self.selector.coordination.is_shared:
            seeded = self.selector.coordination.is_seeded
            remedy = f"{chosen}(…, shared=True)" if seeded else "TopBlock(…)"
            raise SchemeError(
                f"{self.selector!r} does not work with {self.collective!r}: ranks pick different "
                f"coordinates, so their values cannot be summed in transit. Write "
                f"collective=AllGather(), or use {remedy}, whose coordinates all ranks share"
            )
        if self.collective.adds and not self.values.linear:
            raise SchemeError(
                f"{self.values!r} does not work with {self.collective!r}: its values cannot be "
                f"summed in transit. Write collective=AllGather(), or values=Float32()"
            )
        if self.values.quantizes and self.selector.sends_all:
            raise SchemeError(
                f"{self.values!r} does not work with {self.selector!r}: it quantizes selected "
                f"values, and here everything is sent densely. Write a ratio below 1 such as "
                f"TopK(0.01), or values=BFloat16() for a dense exchange in fewer bytes"
            )
        keys = [field.key for field in self.fields]
        if len(set(keys)) < len(keys):
            raise SchemeError(
                f"two parts of {self!r} keep a tensor under the same key: {', '.join(keys)}. Give "
                f"the StateField of one of them another key"
            )
        if _is_negotiated(self.selector):
            self._check_negotiated()
        elif self.collective.adds and self.indices.written:
            raise SchemeError(
                f"{self.indices!r} does not work with {self.collective!r}: indices cannot be "
                f"summed in transit. Leave indices out: all ranks know them"
            )
        if not self.indices.written and self._needs_indices:
            raise SchemeError(
                f"{self.selector!r} needs its indices sent, because they depend on the gradient. "
                f"Leave indices out, or write indices=EliasFano()"
            )

    def _check_negotiated(self) -> None:
        selector, scope = self.selector, self.scope
        if self.collective.fields:
            raise SchemeError(
                f"{selector!r} does not work with {self.collective!r}: ranks have agreed on the "
                f"coordinates already, so owners have nothing left to choose. Leave collective "
                f"out, and values are summed in transit"
            )
        if self.indices.written and selector.proposers == "none":
            raise SchemeError(
                f"{self.indices!r} has nothing to encode with {selector!r}, whose ranks agree on "
                f"the coordinates without sending any. Leave indices out"
            )
        block = getattr(selector, "block", 0)
        if not isinstance(scope, str) and scope <= block:
            raise SchemeError(
                f"scope={scope!r} leaves {selector!r} nothing to choose: its blocks of {block} are "
                f"as long as a segment. Write a scope of several blocks, or a smaller block="
            )

    @property
    def fields(self) -> tuple[StateField, ...]:
        """The state that the parts keep for each parameter, as `StateField` objects.

        Without a memory, shard owners keep none either.
        """
        fields = self.memory.fields + self.selector.fields
        if self.memory.fields:
            fields += self.collective.fields
        owner = self.collective.owner_selector(self.selector)
        if owner is not None:
            fields += tuple(field.for_owner for field in owner.fields)
        return fields

    def at(self, step: int) -> Scheme:
        """Return the scheme of a given step; for a `Scheme` always itself."""
        return self

    def partition(self, shapes: Mapping[str, Shape]) -> Segments:
        """Return the partition of parameters of these shapes, as `Segments`.

        Arguments:
            shapes: The shapes of the parameters by name.
        """
        return Segments.partition(
            shapes, self.selector, self.scope, self.dense_below, self.dense_1d
        )


@dataclass(frozen=True, repr=False)
class Warmup(Part):
    """A scheme that sends more during its first steps. It works wherever a scheme does.

    Arguments:
        scheme: The scheme to use afterwards: a `Scheme` or a selector.
        steps: The length of the warm-up in steps. If updates are exchanged, it counts exchanges,
            not local steps.
        ease: If False, everything is sent until then. If True, the ratio is eased in: step t,
            counted from 0, drops a share R^(steps/(1+t)) of the coordinates, where R = 1 − ratio.
        ratio: The selector's ratio during the warm-up, in place of sending everything.

    >>> import sparsewire as sw
    >>> sw.Warmup(sw.TopK(0.01), steps=100).at(99).selector
    Dense()
    >>> warmup = sw.Warmup(sw.TopK(0.01), steps=100, ease=True)
    >>> [round(warmup.at(step).selector.ratio, 3) for step in (0, 9, 49, 99, 1000)]
    [0.634, 0.096, 0.02, 0.01, 0.01]
    >>> sw.Warmup(sw.TopK(0.003), steps=1000, ratio=0.03).at(999).selector
    TopK(0.03)

    Reference: Aji & Heafield's later Marian code; Lin et al. 2018.
    """

    scheme: Scheme
    steps: int = 1000
    ease: bool = False
    ratio: float | None = field(default=None, metadata={"later": True})

    def __post_init__(self) -> None:
        if isinstance(self.scheme, Selector):
            object.__setattr__(self, "scheme", Scheme(self.scheme))
        if not isinstance(self.scheme, Scheme):
            raise SchemeError(
                "Warmup's first argument must be a scheme or a selector, as in "
                "Warmup(TopK(0.01), steps=1000)"
            )
        check_flag(self, "ease")
        if not _is_int(self.steps) or self.steps < 1:
            raise SchemeError("Warmup's steps must be a whole number of at least 1")
        if self.ease and getattr(self.scheme.selector, "ratio", None) is None:
            raise SchemeError(
                f"the ratio of {self.scheme.selector!r} cannot be eased in, since it has none. "
                f"Write a ratio such as TopK(0.01), or leave ease out for a dense start"
            )
        if self.ratio is None:
            return
        if self.ease:
            raise SchemeError("Warmup takes ease or a ratio, not both: a ratio stays the same")
        if getattr(self.scheme.selector, "ratio", None) is None:
            raise SchemeError(
                f"Warmup's ratio replaces that of a selector, and {self.scheme.selector!r} has "
                f"none. Write a selector with a ratio, such as TopK(0.003)"
            )
        is_number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        if not is_number or not 0 < self.ratio <= 1:
            raise SchemeError(
                f"Warmup's ratio must be a number above 0 and at most 1, not {self.ratio!r}. "
                f"Write ratio=0.04 to send 4 % in the first steps"
            )
        object.__setattr__(self, "ratio", float(self.ratio))
        self.at(0)  # raises if a part does not fit this ratio

    @property
    def memory(self) -> Memory:
        """The memory of the scheme."""
        return self.scheme.memory

    @property
    def fields(self) -> tuple[StateField, ...]:
        """The state that the scheme keeps for each parameter."""
        return self.scheme.fields

    @property
    def scope(self) -> Scope:
        """The scope of the scheme."""
        return self.scheme.scope

    def at(self, step: int) -> Scheme:
        """Return the scheme of a given step."""
        if step >= self.steps:
            return self.scheme
        full = self.scheme
        ratio = self._eased(step) if self.ease else 1.0 if self.ratio is None else self.ratio
        if ratio != 1 or (self.ease and not full.values.quantizes):
            return self._resized(ratio)
        return Scheme(
            Dense(),
            values=full.values if full.values.linear else Float32(),
            memory=full.memory,
            scope=full.scope,
            dense_below=full.dense_below,
            dense_1d=full.dense_1d,
            seed=full.seed,
        )

    def _resized(self, ratio: float) -> Scheme:
        """Return the scheme with another ratio."""
        full = self.scheme
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
        """Return the ratio of a step during the warm-up."""
        full = self.scheme.selector
        assert isinstance(full, selectors.Sized)
        assert full.ratio is not None
        # 1 − (1 − ratio)^(steps/(1+t)), without losing a small ratio beside the 1
        dropped = math.log1p(-full.ratio) if full.ratio < 1 else -math.inf
        return -math.expm1(dropped * self.steps / (1 + step))


AnyScheme = Scheme | Warmup
"""A `Scheme` or a `Warmup`: what `parse` returns."""

FAMILIES: dict[str, tuple[type, ...]] = {
    "scheme": (Scheme, Warmup),
    "selectors": selectors.ALL,
    "values": codecs.VALUES,
    "indices": codecs.INDICES,
    "memory": memory.ALL,
    "collectives": collectives.ALL,
}
"""The classes of each family of parts, by the family's name.

The parser, `sparsewire list` and the tests use it.
"""


def parse(text: str) -> AnyScheme:
    """Return the scheme that a text describes. No code is run.

    Arguments:
        text: A `Scheme`, a `Warmup` or a selector, written as in Python.

    Raises:
        SchemeError: The text cannot be parsed, or its parts cannot work together.

    >>> import sparsewire as sw
    >>> sw.parse("TopK(0.01)")
    Scheme(TopK(0.01))
    """
    names = {kind.__name__: kind for family in FAMILIES.values() for kind in family}
    return as_scheme(read(text, names))


def as_scheme(given: object) -> AnyScheme:
    """Return a scheme from a scheme, a selector, or the text of either.

    Arguments:
        given: What a user passed as `scheme`.

    Raises:
        SchemeError: It is none of these.
    """
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Selector):
        return Scheme(given)
    if isinstance(given, (Scheme, Warmup)):
        return given
    raise SchemeError(
        f"{_shown(given)} is not a scheme. Pass a selector such as TopK(0.01), or "
        f"Scheme(TopK(0.01), …)"
    )


def _is_negotiated(selector: Selector) -> bool:
    return selector.coordination is Coordination.NEGOTIATED


def _smallest(selector: Selector) -> IndexCodec:
    """Return the index codec with the fewest bits at the selector's density."""
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
        raise SchemeError(f"{where} must be one of {names}, not {_shown(part)}")


def _shown(thing: object) -> str:
    """Return a short repr on one line; that of a module has a line for each layer."""
    return " ".join(reprlib.repr(thing).split())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
