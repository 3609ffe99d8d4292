"""Publish the results of a command: write them to --out, and print them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..bench.results import dumps
from .errors import explaining


def make_folder(folder: Path, doing: str = "write results to") -> None:
    """Create a folder and check that it can be written, before anything is measured or trained."""
    with explaining(doing, folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def publish(
    folder: Path,
    content: dict[str, Any],
    write: Callable[[Path], None],
    shown: Sequence[object],
    as_json: bool,
) -> None:
    """Write all files, and print tables and sentences, or the JSON.

    Args:
        content: the content of results.json.
        write: writes all other files into the folder.
    """
    text = dumps(content)
    with explaining("write results to"):
        (folder / "results.json").write_text(text, encoding="utf-8")
        write(folder)
    if as_json:
        print(text, end="")
        return
    console = Console()
    for one in shown:
        if isinstance(one, str):
            console.print(one, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(one)
