"""The table, picture and report of `sparsewire compare`.

The command line trains; a `Result` has the records of one training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsewire.notation import short
from sparsewire.report import human_bytes, plural

from . import drawing, report
from .report import Bar, Bars, Page, Part, Section
from .report.chart import Chart, Panel, Series, draw
from .setting import Setting
from .table import Column, Table
from .timing import RULE, Timing
from .words import milliseconds, say_seconds

_METHOD = (
    "Every scheme trains from the same initial weights on the same batches in the same order, one "
    "after the other.",
    "A step's time is the median over all steps on rank 0, and the quartiles are its spread.",
    RULE,
    "Bytes sent are the message bytes of one worker: the mean over all workers and steps.",
)


@dataclass(frozen=True)
class Result:
    """The summary of one run, and its record of each epoch."""

    summary: dict[str, Any]
    epochs: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The scheme as people write it."""
        return short(str(self.summary["scheme"]))

    @property
    def timing(self) -> Timing:
        """The time of a step, and its spread."""
        return Timing(self.summary["step_seconds"], *self.summary["step_quartiles"])

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy after every epoch."""
        return [epoch["test_accuracy"] for epoch in self.epochs]

    @property
    def times(self) -> list[float]:
        """Seconds of training until the end of every epoch, tests left out."""
        return [epoch["train_seconds"] for epoch in self.epochs]


@dataclass(frozen=True)
class Row:
    """One training, and the one that all are compared with."""

    one: Result
    first: Result


def _against_first(row: Row) -> str | None:
    return None if row.one is row.first else row.one.timing.verdict(row.first.timing)


def _accuracy_gained(row: Row) -> float | None:
    if row.one is row.first:
        return None
    return 100 * float(row.one.summary["test_accuracy"] - row.first.summary["test_accuracy"])


COLUMNS: tuple[Column[Row], ...] = (
    Column(
        "test_accuracy",
        "test\naccuracy",
        "share",
        "On the whole test set, after the last epoch.",
        lambda row: row.one.summary["test_accuracy"],
        "{:.2%}".format,
    ),
    Column(
        "accuracy_gained",
        "against\nthe first",
        "points",
        "The test accuracy minus that of the first scheme, in points.",
        _accuracy_gained,
        "{:+.2f}".format,
    ),
    Column(
        "bytes_per_step",
        "sent per\nstep",
        "bytes",
        "Bytes of messages that a worker sends in a step.",
        lambda row: row.one.summary["bytes_per_step"],
        human_bytes,
    ),
    Column(
        "reduction",
        "less than\ndense",
        "",
        "The bytes that dense DDP would send, divided by those sent.",
        lambda row: row.one.summary["reduction"],
        "{:.1f}×".format,
    ),
    Column(
        "step_seconds",
        "median\nstep",
        "seconds",
        "The median over all steps.",
        lambda row: row.one.timing.seconds,
        lambda value: f"{1000 * value:.1f} ms",
    ),
    Column(
        "against_first",
        "against\nthe first",
        "",
        "The time of a step beside that of the first scheme.",
        _against_first,
    ),
)


def table(results: Sequence[Result], rate: str | None) -> Table:
    """Return a line for each training."""
    title = f"MNIST, {plural(results[0].summary['workers'], 'worker')}"
    title += f" at {rate}" if rate else ""
    return Table(title, COLUMNS, [(one.name, Row(one, results[0])) for one in results])


def write(results: Sequence[Result], rate: str | None, setting: Setting, folder: Path) -> None:
    """Write report.html and comparison.png."""
    drawing.write(draw(chart(results, rate)), folder / "comparison.png")
    report.save(page(results, rate, setting), folder / "report.html")


def page(results: Sequence[Result], rate: str | None, setting: Setting) -> Page:
    """Return the report."""
    workers = results[0].summary["workers"]
    shown = table(results, rate)
    return Page(
        shown.title,
        setting,
        _headline(results),
        f"{shown.title}.",
        (
            Section("Test accuracy", (chart(results, rate), shown)),
            Section("Sent per step and worker", (_bytes(results),)),
            Section("Time of a step", (_seconds(results),)),
        ),
        (*_METHOD, *report.shared_cores(setting, workers)),
    )


def chart(results: Sequence[Result], rate: str | None) -> Chart:
    """Return the accuracy over seconds where links have a rate, else over epochs."""
    title, below = "Test accuracy, %", "epoch"
    if rate is not None:
        title, below = f"Test accuracy, %, with links of {rate}", "seconds of training"
    series = []
    for number, one in enumerate(results):
        epochs = range(1, len(one.accuracies) + 1)
        sent, reduction = human_bytes(one.summary["bytes_per_step"]), one.summary["reduction"]
        series.append(
            Series(
                one.name,
                number,
                list(epochs) if rate is None else one.times,
                [100 * accuracy for accuracy in one.accuracies],
                [
                    f"{one.name}\nepoch {epoch}: {accuracy:.2%} after {say_seconds(seconds)}"
                    for epoch, accuracy, seconds in zip(
                        epochs, one.accuracies, one.times, strict=True
                    )
                ],
                told_in_legend=f"{one.name}: {one.summary['test_accuracy']:.2%}, {sent} per step"
                + (f", {reduction:.0f}× less than dense" if reduction > 1.5 else ""),
            )
        )
    ticks = tuple(range(1, 1 + max(len(one.accuracies) for one in results)))
    panel = Panel(title, below, tuple(series), ticks=ticks if rate is None else ())
    return Chart(_headline(results), (panel,))


def _headline(results: Sequence[Result]) -> str:
    first, others = results[0], results[1:]
    reached = f"{first.name} reaches {first.summary['test_accuracy']:.2%} on MNIST"
    if not others:
        return f"{reached}."
    least = min(others, key=lambda one: float(one.summary["bytes_per_step"]))
    times = first.summary["bytes_per_step"] / max(least.summary["bytes_per_step"], 1)
    return (
        f"{reached}; {least.name} reaches {least.summary['test_accuracy']:.2%} "
        f"and sends {times:.1f}× less."
    )


def _bytes(results: Sequence[Result]) -> Bars:
    bars = []
    for one in results:
        sent, reduction = one.summary["bytes_per_step"], one.summary["reduction"]
        told, less = human_bytes(sent), f"{reduction:.1f}× less" if reduction > 1.05 else ""
        bars.append(Bar(one.name, told, (Part("exchange", sent, f"{one.name}: {told}"),), less))
    return Bars("Sent per step and worker", tuple(bars))


def _seconds(results: Sequence[Result]) -> Bars:
    bars = []
    for one in results:
        timing = one.timing
        told = say_seconds(timing.seconds)
        spread = f"{milliseconds(timing.low)}–{milliseconds(timing.high)} ms"
        part = Part("backward", timing.seconds, f"{one.name}: {told}, quartiles {spread}")
        verdict = _against_first(Row(one, results[0])) or ""
        bars.append(Bar(one.name, told, (part,), verdict, timing.low, timing.high))
    return Bars("Time of a step", tuple(bars))
