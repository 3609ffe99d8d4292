"""Read command-line words into the dataclasses of `options`, with argparse.

A mistake becomes one sentence and exit code 2, like every other one that the command line reports.
It needs the standard library alone; `papers` reads its options with it too.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from ..bench.setting import version
from .errors import USAGE, CommandError
from .options import COMMANDS, GROUPS, Command, Lab
from .options.declare import Option

Options = TypeVar("Options")
_HELP = """usage: sparsewire COMMAND [OPTIONS]

Sparse gradient exchange for PyTorch DDP.

commands:
{commands}

`sparsewire COMMAND --help` shows the options of one command; `sparsewire --version` the version.

examples:
  sparsewire train mnist --scheme "TopK(0.01)" --workers 4
  sparsewire compare mnist
  sparsewire explain "TopK(0.01)" --params 11e6 --workers 8
  sparsewire bench step --model resnet18 --rate 1gbit
  sparsewire lab --hosts 4 --rate 1gbit -- sparsewire train mnist
"""
_GROUP_HELP = """usage: sparsewire {group} COMMAND [OPTIONS]

{about}

commands:
{commands}

`sparsewire {group} COMMAND --help` shows the options of one command.

examples:
{examples}
"""
_EXAMPLES = "\nexamples:\n"
_KINDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
_COUNTS = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs at least one value",
}


def parse(words: Sequence[str]) -> Command:
    """Read the command line; help and version are printed and end the program.

    Raises:
        CommandError: the words make no command.
    """
    name = words[0] if words else "--help"
    if name == "--version":
        _show(f"sparsewire {version('sparsewire')}\n")
    if name in ("--help", "-h"):
        alone = {name: _about(each) for name, each in COMMANDS.items() if " " not in name}
        _show(_HELP.format(commands=_listed({**alone, **GROUPS})))
    if name in GROUPS:
        second = words[1] if len(words) > 1 else "--help"
        if second in ("--help", "-h"):
            _show(_group_help(name))
        name = f"{name} {second}"
    if name not in COMMANDS:
        raise CommandError(_unknown(name), USAGE)
    own = list(words[len(name.split()) :])
    if COMMANDS[name] is not Lab or "--" not in own:
        return read(COMMANDS[name], f"sparsewire {name}", own)
    place = own.index("--")
    options = read(Lab, f"sparsewire {name}", own[:place])
    return replace(options, command=tuple(own[place + 1 :]))


def read(options: type[Options], program: str, words: Sequence[str]) -> Options:
    """Return the options of one program or command; `--help` is printed and ends the process.

    Args:
        options: a dataclass whose fields are declared with `option` and `argument`.
        program: what is typed before the words.

    Raises:
        CommandError: a word is no option, or a value is not allowed.
    """
    parser = _parser(options, program)
    try:
        found, unknown = parser.parse_known_args(words)
        if unknown:
            flags = [_flag(field) for field, *_ in _declared(options)]
            parser.error(_unread(unknown, flags, options is Lab))
    except argparse.ArgumentError as wrong:
        flag = (wrong.argument_name or "").partition("/")[0]
        parser.error(f"{flag} {_COUNTS.get(wrong.message, wrong.message)}".strip())
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in vars(found).items()
    }
    return options(**values)


class _Parser(argparse.ArgumentParser):
    """A parser that raises an error instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)", USAGE)


def _parser(options: type[Any], program: str) -> argparse.ArgumentParser:
    about, _, examples = inspect.cleandoc(options.__doc__ or "").partition(_EXAMPLES)
    width = shutil.get_terminal_size().columns - 2
    declared = list(_declared(options))
    values = "".join(
        f" {spec.value}" if field.default is MISSING else f" [{spec.value}]"
        for field, spec, _ in declared
        if spec.positional
    )
    values += " -- COMMAND [ARGUMENTS]" if options is Lab else ""
    parser = _Parser(
        prog=program,
        usage=f"{program} [OPTIONS]{values}",
        description="\n\n".join(textwrap.fill(part, width) for part in about.split("\n\n")),
        epilog=f"{_EXAMPLES.strip()}\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for field, spec, hint in declared:
        _add(parser, field, spec, hint)
    return parser


def _declared(options: type[Any]) -> Iterator[tuple[Field[Any], Option, Any]]:
    """Yield every option of a command with its type, its own options before shared ones."""
    hints = get_type_hints(options)
    homes = [inspect.get_annotations(kind) for kind in options.__mro__]
    known = {field.name: field for field in fields(options)}
    for name in dict.fromkeys(name for home in homes for name in home):
        if "option" in known[name].metadata:
            yield known[name], known[name].metadata["option"], hints[name]


def _flag(field: Field[Any]) -> str:
    """Return the flag of an option; one that is on by default has a flag to switch it off."""
    return f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"


def _add(parser: argparse.ArgumentParser, field: Field[Any], spec: Option, hint: Any) -> None:
    """Add one option to the parser; its type gives the kind and the number of its values."""
    if hint is bool:
        action = "store_false" if field.default else "store_true"
        parser.add_argument(_flag(field), dest=field.name, action=action, help=_help(spec))
        return
    if NoneType in get_args(hint):  # the default
        hint = get_args(hint)[0]
    several = get_origin(hint) is tuple
    kind = get_args(hint)[0] if several else hint
    keywords: dict[str, Any] = {"type": _converter(kind, spec), "metavar": spec.value}
    if get_origin(kind) is Literal and not spec.value:
        keywords["metavar"] = f"{{{','.join(get_args(kind))}}}"
    if several and spec.repeated:
        keywords["action"] = "append"
    elif several:
        keywords["nargs"] = "*" if spec.may_be_empty else "+"
    if spec.positional:
        if field.default is not MISSING:
            keywords |= {"nargs": "?", "default": field.default}
        parser.add_argument(field.name, help=_help(spec), **keywords)
        return
    usual = spec.usual
    if usual is None:
        values: Any = field.default if several else [field.default]
        usual = shlex.join(map(str, values))
    default = [] if spec.repeated else field.default
    parser.add_argument(
        _flag(field),
        *spec.also,
        dest=field.name,
        default=default,
        help=_help(spec, usual),
        **keywords,
    )


def _help(spec: Option, usual: str = "") -> str:
    """Return the help of an option, with percent signs escaped for argparse."""
    return (spec.help + (f" (default: {usual})" if usual else "")).replace("%", "%%")


def _converter(kind: Any, spec: Option) -> Callable[[str], Any]:
    """Return a function that converts and checks the text of a value."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()

    def convert(text: str) -> Any:
        if choices:
            if text not in choices:
                raise argparse.ArgumentTypeError(f"must be {' or '.join(choices)}, not {text!r}")
            return text
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {_KINDS[kind]}, not {text!r}") from None
        if spec.limit and not spec.limit.holds(value):
            raise argparse.ArgumentTypeError(f"must be {spec.limit.words}, not {text}")
        return value

    return convert


def _show(text: str) -> NoReturn:
    """Print a help text, and end the program."""
    print(text, end="")
    raise SystemExit(0)


def _about(options: type[Command]) -> str:
    """Return the first line of a command's help."""
    return inspect.cleandoc(options.__doc__ or "").partition("\n")[0]


def _listed(commands: Mapping[str, str]) -> str:
    width = max(map(len, commands)) + 2
    return "\n".join(f"  {name:<{width}}{about}" for name, about in commands.items())


def _group_help(group: str) -> str:
    """Return the help of a group: its commands, with all their examples."""
    members = {
        name.removeprefix(f"{group} "): each
        for name, each in COMMANDS.items()
        if name.startswith(f"{group} ")
    }
    texts = [inspect.cleandoc(each.__doc__ or "") for each in members.values()]
    return _GROUP_HELP.format(
        group=group,
        about=GROUPS[group],
        commands=_listed({name: _about(each) for name, each in members.items()}),
        examples="\n".join(text.partition(_EXAMPLES)[2] for text in texts),
    )


def _unknown(name: str) -> str:
    """Return the error message for an unknown command."""
    group, _, second = name.rpartition(" ")
    choices = [
        command.split()[-1] for command in COMMANDS if command.rpartition(" ")[0] == group
    ] + ([] if group else list(GROUPS))
    near = difflib.get_close_matches(second, choices, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
    return f"there is no command {name!r}: {hint}"


def _unread(unknown: Sequence[str], flags: Sequence[str], is_lab: bool) -> str:
    """Return the error message for unknown options and arguments."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if flag is None:
        hint = "; write the command to run behind --" if is_lab else ""
        return f"unrecognized argument {unknown[0]!r}{hint}"
    near = difflib.get_close_matches(flag, flags, n=1)
    return f"unrecognized option {flag}" + (f"; did you mean {near[0]}?" if near else "")
