"""Tables: columns that know where they come from, for the terminal, for reports and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    def cell(self, row: Row) -> Cell:
        """Return this column's cell of a row."""
        value = self.value(row)
        return Cell(self.missing(row) if value is None else self.show(value), value)


@dataclass(frozen=True)
class Cell:
    """A text, and the value by which a report sorts it."""

    text: str
    value: Any = None


@dataclass(frozen=True)
class Heading:
    """The heading of a column, and its meaning."""

    title: str
    about: str = ""


@dataclass(frozen=True)
class Line:
    """One row; `note` takes the place of its cells, `is_weak` dims it."""

    name: str
    cells: tuple[Cell, ...] = ()
    note: str = ""
    is_weak: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table whose first column names the rows."""

    title: str
    headings: tuple[Heading, ...]
    lines: tuple[Line, ...]
    template = "table.html"

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[Column[Row]],
        rows: Iterable[tuple[str, Row]],
        more: Iterable[Line] = (),
    ) -> Table:
        """Return a table of those columns that have a heading, with a line for each named row."""
        shown = [column for column in columns if column.title]
        return cls(
            title,
            tuple(Heading(column.title, column.about) for column in shown),
            (
                *(Line(name, tuple(column.cell(row) for column in shown)) for name, row in rows),
                *more,
            ),
        )

    def __rich__(self) -> RichTable:
        """Return it for the terminal, where rich prints it."""
        found = RichTable(
            title=self.title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False
        )
        found.add_column("", style="bold", overflow="fold", max_width=36)
        lines = max((heading.title.count("\n") for heading in self.headings), default=0)
        for heading in self.headings:
            above = "\n" * (lines - heading.title.count("\n"))
            found.add_column(above + heading.title, justify="right", no_wrap=True)
        before = None
        for line in self.lines:
            cells = [cell.text for cell in line.cells] or [line.note]
            name = "" if line.name == before else line.name
            found.add_row(name, *cells, style="yellow" if line.is_weak else None)
            before = line.name
        return found


def summary(columns: Sequence[Column[Row]], row: Row) -> dict[str, Any]:
    """Return the values of all columns by their keys, for results.json."""
    return {column.key: column.value(row) for column in columns}
