"""From command-line words to one of the dataclasses in `options`, by way of tyro.

tyro draws its complaints as boxes; here they become one sentence and exit code 2, like every
other mistake that the command line reports.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import NoReturn

import tyro

from .errors import USAGE, CommandError
from .options import COMMANDS, GROUPS, Command, Lab

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
{examples}"""
_WANTED = {
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"could not convert string to float: (.*)": "a number",
    r"Could not find valid parse for arguments: \[(.*)\]": "whole numbers",
}


def parse(words: Sequence[str]) -> Command:
    """Read the command line; help and version are printed and end the program.

    Raises:
        CommandError: the words make no command.
    """
    name = words[0] if words else "--help"
    if name == "--version":
        print(f"sparsewire {version()}")
        raise SystemExit(0)
    if name in ("--help", "-h"):
        alone = {name: text for name, (_, text) in COMMANDS.items() if " " not in name}
        print(_HELP.format(commands=_listed({**alone, **GROUPS})), end="")
        raise SystemExit(0)
    if name in GROUPS:
        second = words[1] if len(words) > 1 else "--help"
        if second in ("--help", "-h"):
            _help_with_group(name)
        name = f"{name} {second}"
    if name not in COMMANDS:
        raise CommandError(_unknown(name), USAGE)
    options, description = COMMANDS[name]
    own, others = list(words[len(name.split()) :]), list[str]()
    if options is Lab and "--" in own:
        place = own.index("--")
        own, others = own[:place], own[place + 1 :]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command = tyro.cli(
                options,
                prog=f"sparsewire {name}",
                description=description,
                args=own,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise CommandError(_condense(complaint.getvalue(), name), USAGE) from None
    return replace(command, command=tuple(others)) if isinstance(command, Lab) else command


def _listed(commands: Mapping[str, str]) -> str:
    width = max(map(len, commands)) + 2
    return "\n".join(f"  {name:<{width}}{text.splitlines()[0]}" for name, text in commands.items())


def _help_with_group(group: str) -> NoReturn:
    """Print what commands a group has, with all their examples."""
    members = {
        name.split()[1]: text
        for name, (_, text) in COMMANDS.items()
        if name.startswith(f"{group} ")
    }
    examples = "".join(text.partition("examples:\n")[2] for text in members.values())
    print(
        _GROUP_HELP.format(
            group=group, about=GROUPS[group], commands=_listed(members), examples=examples
        ),
        end="",
    )
    raise SystemExit(0)


def _unknown(name: str) -> str:
    """What to say to a command that is none."""
    group, _, second = name.rpartition(" ")
    choices = [
        command.split()[-1] for command in COMMANDS if command.rpartition(" ")[0] == group
    ] + ([] if group else list(GROUPS))
    near = difflib.get_close_matches(second, choices, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
    return f"there is no command {name!r}: {hint}"


def version() -> str:
    """The version of the installed package, without importing it."""
    try:
        return metadata.version("sparsewire")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _condense(box: str, command: str) -> str:
    """The first statement in tyro's `box`, its suggestion if it has one, and where to read on."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [" ".join(part.split()) for part in re.split("[─-]{5,}", "\n".join(lines))]
    # Where the terminal has no line-drawing characters, the title is a section of its own.
    sentence = sections["╭" not in box].rstrip(".")
    flag = re.match(r"Error parsing ([^:]+): (.*)", sentence)
    if flag:
        sentence = sentence.removeprefix("Error parsing ")
        for pattern, wanted in _WANTED.items():
            given = re.search(f"{pattern}$", flag[2])
            if given:
                sentence = f"{flag[1]} takes {wanted}, not {given[1]}"
    choice = re.match(r"invalid choice (.*) for argument '(.*)'\. Expected (.*)", sentence)
    if choice:
        # Where a flag may be left out, tyro lists None among the rest, in another order each time.
        choices = sorted(set(re.findall("'(.*?)'", choice[3])) - {"None"})
        sentence = f"{choice[2]} takes {' or '.join(choices)}, not {choice[1]}"
    missing = re.match(r"Missing value for argument '(.*)'\.", sentence)
    if missing:
        sentence = f"{missing[1]} needs a value"
    meant = re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(sections))
    if meant:
        sentence += f"; perhaps you meant {meant[1]}"
    return f"{sentence[:1].lower()}{sentence[1:]} (see `sparsewire {command} --help`)"
