"""The report page: complete, closed to everything from outside, and pleasant to use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparsewire.tools.bench import compare, report
from sparsewire.tools.bench.kinds import KINDS
from sparsewire.tools.bench.results import Results
from sparsewire.tools.bench.step.report import headlines, remarks
from sparsewire.tools.bench.timing import Timing

from . import browser
from .browser import Browser
from .conftest import contender, results, run, setting

HOME = Path(__file__).parents[3] / "benchmarks" / "results"
SINGLE = {"meta", "br"}


class _Reader(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in SINGLE:
            self.open.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href"}]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(measured: Results) -> str:
    return report.render(KINDS[measured.kind].page(measured))


def test_a_page_says_everything_and_fetches_nothing(measured: Results) -> None:
    text = render(measured)
    reader = _Reader(text)
    assert reader.open == []
    assert reader.links == []
    assert reader.handlers == []
    assert reader.tags.count("script") == 1
    assert not re.search(r"https?:|@import|url\(", text)
    for sentence in headlines(measured) + remarks(measured.runs[0]):
        assert sentence in reader.text
    assert '<p class="kicker">sparsewire bench step</p>' in text
    assert "--rates 1gbit" in reader.text
    assert "runs &amp; more" in text
    assert render(measured) == text, "the same from the same"


def test_the_script_is_the_only_one_that_may_run(measured: Results) -> None:
    """A browser computes the hash itself; see `test_a_browser_runs_nothing_else`."""
    text = render(measured)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; style-src")
    assert len(re.findall("sha256-", policy)) == 1
    assert "unsafe-eval" not in policy
    assert "script-src &#39;unsafe-inline" not in policy


def test_no_line_of_a_page_ends_inside_a_quantity_or_a_date(measured: Results) -> None:
    text = render(measured)
    for whole in ("0.69 s", "1 Gbit/s", "3.3× faster", "2020-02-02", "2020-02-02T20:20:20+00:00"):
        assert f'<span class="together">{whole}</span>' in text
        assert f" {whole} " not in text
    assert ".together { white-space: nowrap; }" in text


EVIL = "<script>alert('\"&')</script>"


def evil() -> Results:
    """Results whose every name is an attack."""
    named = run(contender("compute alone", 1.0), contender(EVIL, 2.0), contender("x", failed=EVIL))
    return results(named, name=EVIL)


def test_a_page_escapes_everything() -> None:
    text = render(evil())
    reader = _Reader(text)
    assert reader.tags.count("script") == 1
    assert reader.text.count(EVIL) >= 4
    assert "alert('\"" not in text


def test_a_failed_contender_is_named_with_the_reason(measured: Results) -> None:
    reader = _Reader(render(measured))
    assert "bf16 hook failed: the backend <gloo> cannot add bfloat16" in reader.text
    assert reader.text.count("failed") >= 3


class Trained:
    """A training of three epochs."""

    def __init__(self, name: str, accuracy: float, sent: float) -> None:
        self.name = name
        self.summary = {
            "workers": 2,
            "test_accuracy": accuracy,
            "bytes_per_step": sent,
            "reduction": 1e6 / sent,
        }
        self.timing = Timing(0.01, 0.009, 0.012)
        self.accuracies = [accuracy - 0.1, accuracy - 0.05, accuracy]
        self.times = [1.0, 2.0, 3.0]


def compared(folder: Path) -> Path:
    """The report of a comparison."""
    trained = [Trained("Dense()", 0.97, 1e6), Trained("TopK(0.01)", 0.965, 1e4)]
    compare.write(trained, None, setting("mnist"), folder)
    return folder / "report.html"


def test_a_comparison_has_the_same_page(tmp_path: Path) -> None:
    text = compared(tmp_path).read_text()
    reader = _Reader(text)
    assert "TopK(0.01) reaches 96.50% and sends 100.0× less." in reader.text
    assert "test\naccuracy" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"command": "sparsewire bench step"}, "sparsewire bench step"),
        (
            {
                "command": "sparsewire demo",
                "model": "gpt",
                "rate": "100mbit",
                "out": "a b",
                "data": None,
            },
            "sparsewire demo \\\n  --model gpt \\\n  --out 'a b'",
        ),
        (
            {"command": "x", "loopback": True, "seed": 0, "debug": True, "quiet": False},
            "x \\\n  --loopback \\\n  --seed 0",
        ),
    ],
)
def test_the_command_can_be_typed_again(arguments: dict[str, object], line: str) -> None:
    assert report.command_line(arguments) == line


# -- in a browser ----------------------------------------------------------------------------------


needs_browser = pytest.mark.skipif(browser.FOUND is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A tab of a headless browser."""
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.errors == []


@pytest.fixture
def stepped(measured: Results, tmp_path: Path) -> Path:
    """The report of a measurement of steps."""
    path = tmp_path / "report.html"
    path.write_text(render(measured), encoding="utf-8")
    return path


def shown(tab: Browser, selector: str) -> int:
    """How many elements that match take room."""
    count = f"[...document.querySelectorAll({selector!r})].filter((e) => e.offsetWidth).length"
    return int(tab.ask(count))


@needs_browser
def test_names_hide_rows_and_the_rest_takes_their_room(tab: Browser, stepped: Path) -> None:
    tab.open(stepped)
    width = "document.querySelector('.track[data-series=\"TopK(0.01)\"] .part').offsetWidth"
    before = tab.ask(width)
    assert shown(tab, 'tr[data-series="dense DDP"]') == 4
    tab.click('.name[data-toggle="dense DDP"]')
    assert shown(tab, 'tr[data-series="dense DDP"]') == 0
    assert shown(tab, '.track[data-series="dense DDP"]') == 0
    assert tab.ask(width) > 2 * before, "its own bar has the room of the longest"
    tab.click('.name[data-toggle="dense DDP"]')
    assert shown(tab, 'tr[data-series="dense DDP"]') == 4
    assert tab.ask(width) == before


@needs_browser
def test_parts_can_be_taken_out_of_the_bars(tab: Browser, stepped: Path) -> None:
    tab.open(stepped)
    told = "document.querySelector('.told[data-series=\"dense DDP\"] b').textContent"
    assert tab.ask(told) == "2.26 s"
    tab.click('[data-toggle="part:exchange"]')
    assert tab.ask(told) == "1.13 s"
    assert shown(tab, ".part-exchange.part") == 0
    assert shown(tab, ".verdict") == 0
    tab.click('[data-toggle="part:exchange"]')
    assert tab.ask(told) == "2.26 s"


@needs_browser
def test_values_are_told_on_hover(tab: Browser, stepped: Path) -> None:
    tab.open(stepped)
    tip = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
    assert tab.ask(tip) is None
    tab.hover('.track[data-series="dense DDP"] .part-exchange')
    assert tab.ask(tip) == "exchange 1.13 s, 50% of dense DDP"
    tab.hover("th:nth-child(8) .sort")
    assert tab.ask(tip) == "The share of the exchange that ran during backward."
    tab.hover("h1")
    assert tab.ask(tip) is None


@needs_browser
def test_tables_are_sorted_by_their_headings(tab: Browser, stepped: Path) -> None:
    tab.open(stepped)
    rows = "[...document.querySelector('table').tBodies[0].rows]"
    names = f"{rows}.map((row) => row.cells[0].innerText)"
    before = tab.ask(names)
    tab.click("th:nth-child(2) .sort")
    ascending = ["compute alone", "PowerSGD rank 1", "TopK(0.01)", "dense DDP", "bf16 hook"]
    assert tab.ask(names) == ascending != before
    tab.click("th:nth-child(2) .sort")
    assert tab.ask(names) == [*reversed(ascending[:-1]), "bf16 hook"], "the failed one stays last"
    assert tab.ask("document.querySelector('th:nth-child(2)').ariaSort") == "descending"


@needs_browser
def test_dark_and_light(tab: Browser, stepped: Path) -> None:
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    for dark in (False, True):
        tab.open(stepped, dark=dark)
        assert (tab.ask(brightness) < 128) is dark
        tab.click("#theme")
        assert (tab.ask(brightness) < 128) is not dark


@needs_browser
def test_points_of_a_chart_tell_their_values(tab: Browser, tmp_path: Path) -> None:
    tab.open(compared(tmp_path))
    dense = '.wide circle[data-series="Dense()"]'
    tab.hover(dense)
    tip = tab.ask("document.getElementById('tip').innerText")
    assert tip == "Dense()\nepoch 1: 87.00% after 1.00 s"
    tab.click('.key [data-toggle="Dense()"]')
    line = "getComputedStyle(document.querySelector('.wide g[data-series=\"Dense()\"]')).display"
    assert tab.ask(line) == "none"
    assert shown(tab, 'tr[data-series="Dense()"]') == 0


@needs_browser
@pytest.mark.parametrize("kind", ["step", "train", "scale"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_screen(
    tab: Browser, tmp_path: Path, kind: str, width: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(Results.read(HOME / kind / "results.json")), encoding="utf-8")
    tab.open(path, width)
    assert tab.ask("document.documentElement.scrollWidth") == width
    if kind != "step":
        assert shown(tab, ".chart.wide") == (width == 1280)
        assert shown(tab, ".chart.narrow") == (width == 400)
        letters = "Math.min(...[...document.querySelectorAll('.chart text')].map((text) =>"
        letters += "text.getBoundingClientRect().height || 99))"
        assert tab.ask(letters) >= 10, "the letters of a chart can be read"


@needs_browser
def test_a_browser_runs_nothing_else(tmp_path: Path) -> None:
    """Even if something got past the escaping, the page's policy keeps it from running."""
    path = tmp_path / "report.html"
    attack = "<script>document.title = 'taken'</script>"
    path.write_text(render(evil()).replace("</main>", f"{attack}</main>"), encoding="utf-8")
    with Browser(tmp_path / "profile") as opened:
        opened.open(path)
        assert opened.ask("document.title") != "taken"
        assert any("Content Security Policy" in error for error in opened.errors)
        assert opened.ask("document.getElementById('tip') !== null"), "the page's own script ran"
