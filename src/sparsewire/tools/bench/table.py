"""Tables: columns that know where they come from, for the terminal, for reports and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.box import SIMPLE
from rich.table import Table as RichTable

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table, and one entry of a contender's `summary` in results.json.

    Args:
        key: its name in results.json.
        title: its heading; empty for a column that only results.json has.
        unit: of the values in results.json.
        about: its meaning and how it is computed, in one or two sentences.
        value: computes it from a row; None where there is nothing to say.
        show: the value as text.
        missing: the text of a row without a value.
    """

    key: str
    title: str
    unit: str
    about: str
    value: Callable[[Row], Any]
    show: Callable[[Any], str] = str
    missing: Callable[[Row], str] = lambda row: ""

    def text(self, row: Row) -> str:
        """Return the text of a row."""
        value = self.value(row)
        return self.missing(row) if value is None else self.show(value)


@dataclass(frozen=True)
class Table:
    """A titled table whose first column names the rows.

    Args:
        title: above the table.
        columns: of these it shows those that have a heading.
        rows: the name of each row, and what the columns read.
        failed: the names of contenders that have no row.
    """

    title: str
    columns: Sequence[Column[Any]]
    rows: Sequence[tuple[str, Any]]
    failed: Sequence[str] = ()
    template = "table.html"

    @property
    def shown(self) -> list[Column[Any]]:
        """The columns that have a heading."""
        return [column for column in self.columns if column.title]

    def __rich__(self) -> RichTable:
        """Return it for the terminal, where rich prints it."""
        found = RichTable(
            title=self.title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False
        )
        found.add_column("", style="bold", overflow="fold", max_width=36)
        lines = max((column.title.count("\n") for column in self.shown), default=0)
        for column in self.shown:
            above = "\n" * (lines - column.title.count("\n"))
            found.add_column(above + column.title, justify="right", no_wrap=True)
        before = None
        for name, row in self.rows:
            texts = [column.text(row) for column in self.shown]
            found.add_row("" if name == before else name, *texts)
            before = name
        for name in self.failed:
            found.add_row(name, "failed", style="yellow")
        return found


def summary(columns: Sequence[Column[Row]], row: Row) -> dict[str, Any]:
    """Return the values of all columns by their keys, for results.json."""
    return {column.key: column.value(row) for column in columns}
