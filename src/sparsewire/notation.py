"""The text form of a scheme, the same in Python source, reprs, command lines and logs.

`Part` gives every part a repr without default values; `read` turns such a text back into the
object. It parses the text as a syntax tree and calls only the classes that it is given: no code is
run.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar

from .errors import SchemeError


class Part:
    """Base class of everything that a scheme is made of: a frozen dataclass with a short repr.

    Attributes:
        id: The part's name in messages and files, by default the name of the class. It must never
            change. After renaming a class, set `id` to the old name; after renaming one of its
            fields, write `field(metadata={"id": old})`. Declare a field that is added later as
            `field(default=…, metadata={"later": True})`, so that existing identities stay the same.
    """

    id: ClassVar[str]

    @property
    def identity(self) -> str:
        """The text that fingerprints, checkpoints and stored results are keyed by.

        It has every argument, defaults included, under names that survive renaming.

        >>> from sparsewire.selectors import TopK
        >>> TopK().identity
        'TopK(ratio=0.01, count=None)'
        """
        kind = type(self)
        values = ((each, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        said = (
            f"{each.metadata.get('id', each.name)}="
            f"{value.identity if isinstance(value, Part) else repr(value)}"
            for each, value in values
            if not (each.metadata.get("later") and value == each.default)
        )
        return f"{vars(kind).get('id', kind.__name__)}({', '.join(said)})"

    def __repr__(self) -> str:
        shown = []
        for number, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value == field.default or value == self.implied(field.name):
                continue
            shown.append(repr(value) if number == 0 else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def implied(self, name: str) -> object:
        """Return the value of field `name` if it is not given; MISSING if it has no such value."""
        return MISSING


def short(scheme: str) -> str:
    """Return a scheme's text without `Scheme(…)` where a selector alone is enough.

    >>> short("Scheme(TopK(0.01))")
    'TopK(0.01)'
    """
    inner = scheme.removeprefix("Scheme(").removesuffix(")")
    alone = scheme.startswith("Scheme(") and inner.endswith(")") and inner.count("(") == 1
    return inner if alone else scheme


def check_flag(part: Part, name: str) -> None:
    """Raise unless the field is True or False: 'no' would count as true."""
    value = getattr(part, name)
    if not isinstance(value, bool):
        raise SchemeError(f"{type(part).__name__}'s {name} must be True or False, not {value!r}")


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return 'did you mean …?', or the list of choices."""
    choices = sorted(choices)
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    if close:
        return f"did you mean {folded[close[0]]}?"
    return f"there are: {', '.join(choices)}" if choices else "it takes none"


def read(text: str, classes: Mapping[str, type]) -> Any:
    """Return the object that a text describes.

    >>> from sparsewire.selectors import TopK
    >>> read("TopK(0.01)", {"TopK": TopK})
    TopK(0.01)
    """
    if len(text) > 10_000:
        raise SchemeError("this text is over 10,000 characters long. A scheme is one short line")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SchemeError(
            f"cannot read {text!r} as a scheme. Write it like TopK(0.01) or "
            f"Scheme(TopK(0.01), scope='global')"
        ) from error
    return _value(tree, text, classes)


def _value(node: ast.expr, text: str, classes: Mapping[str, type]) -> Any:
    match node:
        case ast.Constant(value=None | bool() | str()):
            return node.value
        case ast.Constant(value=int() | float() as number):
            return _number(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -_number(number)
        case ast.Name(id=name):
            return _call(name, [], {}, classes)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            words = [keyword.arg for keyword in keywords]
            if None in words:
                raise SchemeError(f"cannot read {text!r}: ** has no meaning in a scheme")
            if len(set(words)) < len(words):
                raise SchemeError(f"cannot read {text!r}: {name} is given an argument twice")
            values = [_value(argument, text, classes) for argument in arguments]
            named = {str(k.arg): _value(k.value, text, classes) for k in keywords}
            return _call(name, values, named, classes)
    source = ast.get_source_segment(text.strip(), node) or text
    raise SchemeError(
        f"cannot read {source!r} in a scheme: only names of parts, numbers, strings, "
        f"True, False and None are allowed"
    )


def _number(number: float) -> float:
    """Return the number, if its repr can be read again."""
    if (isinstance(number, int) and number.bit_length() > 256) or abs(number) == float("inf"):
        raise SchemeError("a number in this scheme is too large")
    return number


def _call(name: str, values: list[Any], named: dict[str, Any], classes: Mapping[str, type]) -> Any:
    if name not in classes:
        raise SchemeError(f"there is no part called {name}; {nearest(name, classes)}")
    kind = classes[name]
    known = {field.name: field for field in fields(kind) if field.init}
    for word in named:
        if word not in known:
            raise SchemeError(f"{name} has no argument {word}; {nearest(word, known)}")
    try:
        return kind(*values, **named)
    except TypeError as error:
        takes = ", ".join(known)
        given = ", ".join([*map(repr, values), *(f"{k}={v!r}" for k, v in named.items())])
        raise SchemeError(f"{name}({given}) cannot be built: {name} takes ({takes})") from error
