"""The notation: short to write, read without running anything, and helpful when misspelt."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import sparsewire as sw
from sparsewire.notation import nearest, read

from .laws.cases import LAWFUL

NAMES = {kind.__name__: kind for family in sw.scheme.FAMILIES.values() for kind in family}


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (sw.TopK(0.01), "TopK(0.01)"),
        (sw.TopK(), "TopK(0.01)"),
        (sw.TopK(1), "TopK(1.0)"),
        (sw.TopK(count=5), "TopK(count=5)"),
        (sw.RandomK(0.1, shared=True), "RandomK(0.1)"),
        (sw.RandomK(0.1, shared=False), "RandomK(0.1, shared=False)"),
        (sw.BlockRandomK(0.1, shared=False), "BlockRandomK(0.1)"),
        (sw.Threshold(0.1, sample=100_000), "Threshold(0.1)"),
        (sw.Threshold(0.1, sample=500), "Threshold(0.1, sample=500)"),
        (sw.Dense(), "Dense()"),
        (sw.Float32(), "Float32()"),
        (sw.MomentumCorrection(), "MomentumCorrection()"),
        (sw.MomentumCorrection(0.5, clip=2.0), "MomentumCorrection(0.5, clip=2.0)"),
        (sw.Scheme(sw.TopK(0.01)), "Scheme(TopK(0.01))"),
        (
            sw.Scheme(sw.TopK(0.01), values=sw.BFloat16(), scope="global", seed=-3),
            "Scheme(TopK(0.01), values=BFloat16(), scope='global', seed=-3)",
        ),
        (
            sw.Scheme(sw.RandomK(0.1), collective=sw.AllReduce(), indices=sw.Implied()),
            "Scheme(RandomK(0.1))",
        ),
        (
            sw.Scheme(sw.RandomK(0.1), collective=sw.AllGather(), dense_below=0, dense_1d=False),
            "Scheme(RandomK(0.1), collective=AllGather(), dense_below=0, dense_1d=False)",
        ),
        (
            sw.Scheme(sw.RandomK(0.1), indices=sw.Int32()),
            "Scheme(RandomK(0.1), indices=Int32())",  # AllGather() follows from that
        ),
        (sw.Warmup(sw.TopK(0.1)), "Warmup(Scheme(TopK(0.1)))"),
        (sw.Warmup(sw.TopK(0.1), 50, True), "Warmup(Scheme(TopK(0.1)), steps=50, ease=True)"),
    ],
)
def test_text_is_as_short_as_can_be(part: object, text: str) -> None:
    assert repr(part) == text
    assert read(text, NAMES) == part


@pytest.mark.parametrize(
    "text",
    [
        "TopK(0.01)",
        "TopK",
        "TopK()",
        "  TopK( ratio = 1e-2 )\n",
        "Scheme(TopK(0.01))",
        "Scheme(selector=TopK(0.01))",
        "Scheme(TopK, Float32, EliasFano, ErrorFeedback, AllGather, 'layer', 1024, True, 0)",
        'Scheme(TopK(0.01), scope="layer")',
        "(TopK(0.01))",
    ],
)
def test_ways_to_write_the_same(text: str) -> None:
    assert sw.parse(text) == sw.Scheme(sw.TopK(0.01))


HOSTILE = [
    "__import__('os').system('touch {marker}')",
    "TopK(__import__('os').system('touch {marker}'))",
    "open('{marker}', 'w')",
    "TopK(open('{marker}', 'w'))",
    "exec(\"open('{marker}', 'w')\")",
    "TopK(0.01).__class__",
    "TopK.__init__",
    "TopK(0.01).resized(0.5)",
    "sw.TopK(0.01)",
    "[TopK(0.01) for _ in range(3)]",
    "TopK(x for x in (1, 2))",
    "TopK([0.01][0])",
    "TopK((lambda: 0.01)())",
    "lambda: TopK(0.01)",
    "(scheme := TopK(0.01))",
    "TopK(ratio := 0.01)",
    "TopK(f'{open(chr(46))}')",
    "f'TopK'",
    "TopK(**{'ratio': 0.01})",
    "TopK(**dict(ratio=0.01))",
    "TopK(*[0.01])",
    "TopK(*(0.01,))",
    "TopK(0.01) if True else Dense()",
    "TopK(0.01) or Dense()",
    "TopK(0.1 * 0.1)",
    "TopK(1 - 0.5)",
    "TopK(+0.01)",
    "TopK(not 0)",
    "TopK(~1)",
    "TopK(-(-0.01))",
    "TopK(10 ** 10 ** 10)",
    "TopK(0.01j)",
    "TopK(b'0.01')",
    "TopK(...)",
    "TopK((0.01,))",
    "TopK([0.01])",
    "TopK({0.01})",
    "TopK({'ratio': 0.01})",
    "TopK(0.01)(0.01)",
    "TopK(0.01)[0]",
    "TopK(0.01); Dense()",
    "TopK(0.01)\nDense()",
    "import os",
    "x = TopK(0.01)",
    "await TopK(0.01)",
    "(yield TopK(0.01))",
    "TopK(await x)",
    "TopK(0.01",
    "TopK)0.01(",
    "TopK(0.01))",
    "TopK(\0)",
    "TopK('\ud800')",
    "TopK('\\d')",
    "",
    "   ",
    "#",
    "(" * 5000,
    "(" * 5000 + ")" * 5000,
    "[" * 4000 + "]" * 4000,
    "TopK(" * 1500 + ")" * 1500,
    "TopK(" * 90 + ")" * 90,
    "TopK(" + "-" * 9000 + "1)",
    "TopK(" + "a." * 4000 + "b)",
    "TopK(" + "1+" * 4000 + "1)",
    "TopK(" + "not " * 2000 + "1)",
    "TopK(" + "x if y else " * 800 + "z)",
    "TopK(" + "9" * 9000 + ")",
    "T" * 20_000,
    "TopK(0.01)" + " " * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text)[1:40])
def test_no_code_is_run(text: str, tmp_path: Path) -> None:
    marker = tmp_path / "run"
    with pytest.raises(sw.errors.SchemeError) as refusal:
        sw.parse(text.replace("{marker}", str(marker)))
    assert not marker.exists()
    assert str(refusal.value)


def test_hostile_strings_would_run_if_evaluated(tmp_path: Path) -> None:
    """The first of them does touch its marker where Python evaluates it."""
    marker = tmp_path / "run"
    eval(HOSTILE[0].replace("{marker}", str(marker)))
    assert marker.exists()


@given(st.text(max_size=60) | st.text("TopK(0.1,=)Schemscop'e[]{}*:-", max_size=60))
@LAWFUL
def test_any_text_is_a_scheme_or_refused(text: str) -> None:
    try:
        scheme = sw.parse(text)
    except sw.errors.SchemeError:
        return
    assert sw.parse(repr(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Topk(0.01)", "no part called Topk; did you mean TopK?"),
        ("TpoK(0.01)", "did you mean TopK?"),
        ("topk", "did you mean TopK?"),
        ("RandomTopK(0.01)", "did you mean RandomK?"),
        ("BlockRandom(0.01)", "did you mean BlockRandomK?"),
        ("Treshold(0.01)", "did you mean Threshold?"),
        ("dense", "did you mean Dense?"),
        ("Schema(TopK(0.01))", "did you mean Scheme?"),
        ("Scheme(TopK(0.01), values=BF16())", "no part called BF16; did you mean BFloat16?"),
        ("Scheme(TopK(0.01), values=float16)", "did you mean Float16?"),
        ("Scheme(TopK(0.01), memory=ErrorFeedBack())", "did you mean ErrorFeedback?"),
        ("Scheme(TopK(0.01), collective=Allgather())", "did you mean AllGather?"),
        ("Scheme(TopK(0.01), scoop='global')", "Scheme has no argument scoop; did you mean scope?"),
        ("Scheme(TopK(0.01), value=Float32())", "did you mean values?"),
        (
            "Scheme(TopK(0.01), momentum=0.9)",
            "there are: collective, dense_1d, dense_below, indices",
        ),
        ("TopK(ration=0.01)", "TopK has no argument ration; did you mean ratio?"),
        ("TopK(k=5)", "TopK has no argument k; there are: count, min_count, ratio"),
        ("Warmup(TopK(0.01), step=5)", "did you mean steps?"),
        ("Dense(0.01)", r"Dense(0.01) cannot be built: Dense takes ()"),
        ("Dense(ratio=0.01)", "Dense has no argument ratio; it takes none"),
        ("Scheme", "Scheme() cannot be built: Scheme takes (selector, values, indices"),
        ("TopK(0.01, None, 3)", "cannot be built: TopK takes (ratio, count, min_count)"),
        ("Xyzzy", "there are: AllGather, AllReduce, BFloat16, Bitmap, BlockRandomK"),
    ],
)
def test_typos_get_the_nearest_name(text: str, hint: str) -> None:
    with pytest.raises(sw.errors.SchemeError) as refusal:
        sw.parse(text)
    assert hint in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "segment"),
    [
        ("TopK(1 + 1)", "'1 + 1'"),
        ("Scheme(TopK(0.01), scope=[1])", "'[1]'"),
        ("a.b", "'a.b'"),
    ],
)
def test_what_cannot_stand_in_a_scheme_is_shown(text: str, segment: str) -> None:
    with pytest.raises(
        sw.errors.SchemeError, match="only names of parts, numbers, strings"
    ) as refusal:
        sw.parse(text)
    assert segment in str(refusal.value)


def test_text_that_is_no_python_gets_an_example() -> None:
    with pytest.raises(sw.errors.SchemeError, match=r"Write it like TopK\(0\.01\) or Scheme"):
        sw.parse("TopK(0.01")


@pytest.mark.parametrize("text", ["3", "None", "Float32()", "AllGather", "'layer'"])
def test_other_things_are_no_scheme(text: str) -> None:
    with pytest.raises(sw.errors.SchemeError):
        sw.parse(text)


def test_nearest() -> None:
    assert nearest("layr", ["layer", "global"]) == "did you mean layer?"
    assert nearest("zzz", ["b", "a"]) == "there are: a, b"
    assert nearest("zzz", []) == "it takes none"


def test_repeated_arguments_are_refused() -> None:
    with pytest.raises(sw.errors.SchemeError):
        sw.parse("TopK(ratio=0.1, ratio=0.2)")


def test_infinite_clip_has_a_notation_or_is_refused() -> None:
    try:
        scheme = sw.Scheme(sw.TopK(0.1), memory=sw.MomentumCorrection(clip=float("inf")))
    except sw.errors.SchemeError:
        return
    assert sw.parse(repr(scheme)) == scheme


@pytest.mark.parametrize("argument", ["", "count="])
def test_huge_integers_are_refused(argument: str) -> None:
    try:
        scheme = sw.parse(f"TopK({argument}0x{'f' * 9000})")
    except sw.errors.SchemeError:
        return
    assert repr(scheme)


@pytest.mark.parametrize(
    "text",
    [
        "RandomK(0.1, shared='no')",
        "Scheme(TopK(0.1), memory=MomentumCorrection(nesterov='no'))",
        "Warmup(TopK(0.1), ease='no')",
    ],
)
def test_flags_must_be_flags(text: str) -> None:
    with pytest.raises(sw.errors.SchemeError):
        sw.parse(text)
