"""`sparsewire list` and `sparsewire explain`: the parts of schemes, and what a scheme sends."""

from __future__ import annotations

import inspect
import json

from rich.console import Console
from rich.table import Table

import sparsewire as sw
from sparsewire.adapters.model import named_parameters

from ..tasks import mnist, workloads
from .errors import USAGE, CommandError
from .options import Explain, List


def list_parts(options: List) -> int:
    """Print every family of parts, each part with the first line of its docstring."""
    families = {
        family: {part.__name__: _summary(part) for part in parts}
        for family, parts in sw.scheme.FAMILIES.items()
    }
    if options.json:
        print(json.dumps(families, indent=2))
        return 0
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for family, parts in families.items():
        table.add_row(f"[cyan]{family}[/cyan]", "")
        for name, summary in parts.items():
            table.add_row(f"  {name}", summary)
    Console().print(table)
    return 0


def explain(options: Explain) -> int:
    """Print what one scheme sends for a number of parameters or a task's model."""
    scheme = sw.parse(options.scheme)
    if options.every > 1 and options.communicate == "gradients":
        raise CommandError("--every is for --communicate updates", USAGE)
    explanation = sw.explain(
        scheme,
        _shapes(options),
        options.workers,
        communicate=options.communicate,
        every=options.every,
    )
    print(json.dumps(explanation.to_dict(), indent=2) if options.json else explanation)
    return 0


def _shapes(options: Explain) -> dict[str, tuple[int, ...]]:
    if options.model == "mnist":
        return mnist.shapes(options.hidden)
    if options.model is not None:
        model = workloads.build(options.model, None, rank=0).model
        return {key: tuple(p.shape) for key, p in named_parameters(model).items()}
    # Two dimensions, since vectors are left dense by default.
    return {"parameters": (1, int(options.params))}


def _summary(part: type) -> str:
    return (inspect.getdoc(part) or "").partition("\n")[0]
