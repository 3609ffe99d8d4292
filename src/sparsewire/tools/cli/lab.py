"""`sparsewire lab`: a command on every host of a cluster that lives for as long as it runs."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sparsewire.report import plural

from ..lab import Lab, LabError, Link, Loopback, running, set_rate, show_rate
from . import ranks
from .errors import USAGE, CommandError, explaining
from .options import Lab as Options
from .progress import Progress
from .site import check_lab

_PORT = 29500  # free in a network that is new


def lab(options: Options) -> int:
    """Change a running lab, or build one, measure it, run the command, and remove it."""
    if options.set:
        return _set(options)
    if options.lab:
        raise CommandError("--lab says which lab --set is for: give both, or neither", USAGE)
    if options.command and shutil.which(options.command[0], path=ranks.search_path()) is None:
        raise CommandError(f"there is no command {options.command[0]!r} to run", USAGE)
    place = _place(options)
    if isinstance(place, Lab):
        check_lab("add --loopback to run over 127.0.0.1, with no shaping")
    with place:
        if isinstance(place, Loopback):
            _say(f"{plural(place.hosts, 'rank')} over 127.0.0.1, with no shaping")
        elif options.check or not options.command:
            _check(place, Console(stderr=bool(options.command)))
        if options.command:
            port = _free_port() if options.loopback else _PORT
            ranks.run(place, options.command, port, _folder(options.logs))
    return 0


def _place(options: Options) -> Lab | Loopback:
    """Return where the ranks will run; nothing is built yet."""
    if options.loopback and not options.command:
        raise CommandError("--loopback runs a command: write it behind --", USAGE)
    usual, others = _rates(options.rate, "--rate")
    try:
        if options.loopback:
            return Loopback(options.hosts)
        return Lab(options.hosts, usual, others, options.oversubscribe)
    except LabError as error:
        raise CommandError(str(error), USAGE) from None


def _rates(words: Sequence[str], flag: str) -> tuple[str | None, dict[int, str]]:
    """Return the rate of all hosts and the rates of some: "1gbit" "0=100mbit"."""
    usual, others = None, {}
    for word in words:
        host, named, rate = word.rpartition("=")
        if not named:
            if usual is not None:
                raise CommandError(
                    f"{flag} was given as {usual} and as {rate}: "
                    f"write HOST=RATE for all but one, like {flag} 0={rate}",
                    USAGE,
                )
            usual = rate
        elif host.isdecimal():
            others[int(host)] = rate
        else:
            raise CommandError(f"{flag} takes RATE or HOST=RATE, not {word!r}", USAGE)
    return usual, others


def _set(options: Options) -> int:
    """Change the rates of another process's lab."""
    usual, others = _rates(options.set, "--set")
    labs = [plan.id for plan in running()]
    if not labs:
        raise CommandError("no lab of yours runs on this machine")
    if options.lab and options.lab not in labs:
        raise CommandError(f"no lab {options.lab} of yours runs here: there is {', '.join(labs)}")
    if not options.lab and len(labs) > 1:
        raise CommandError(f"several labs run: choose one of --lab {', '.join(labs)}", USAGE)
    lab = options.lab or labs[0]
    if usual:
        set_rate(lab, usual)
    for host, rate in others.items():
        set_rate(lab, rate, host)
    print(f"lab {lab}: {', '.join(options.set)}")
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check(made: Lab, console: Console) -> None:
    """Measure and show all links, and warn if one is off its rate."""
    with Progress(lines=False) as shown:
        shown.begin("measuring links")
        links = made.check(lambda done, total: shown.update(done, f"{done}/{total}", total=total))
    console.print(f"lab {made.id}: what TCP gets through", highlight=False)
    console.print(_table(links))
    for link in links:
        if not link.fits:
            console.print(
                f"warning: {link.name} is off by more than 10 %: "
                "this machine is busy, or too slow for that rate",
                style="yellow",
                highlight=False,
            )


def _table(links: Sequence[Link]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("link")
    for heading in ("asked", "up", "down"):
        table.add_column(heading, justify="right")
    for link in links:
        asked = show_rate(link.asked) if link.asked else "unshaped"
        table.add_row(link.name, asked, show_rate(link.up), show_rate(link.down))
    return table


def _folder(asked: Path | None) -> Path:
    """A folder for logs: as asked, else a new one in ./runs, else in the temporary folder."""
    folder = asked or Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")
    try:
        with explaining("write logs to"):
            folder.mkdir(parents=True, exist_ok=asked is not None)
    except CommandError:
        if asked:
            raise
        folder = Path(tempfile.mkdtemp(prefix="sparsewire-lab-"))
    _say(f"logs: {folder}")
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
