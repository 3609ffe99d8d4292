"""Aji and Heafield 2017: gradient dropping on translation, and quantization after it.

Corpora and models are smaller than the paper's WMT16 ones, so BLEU is not comparable with the
paper's. Each scheme is compared with dense training of the same model on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ..recipe import Cell, Measure, Place, Recipe, Study

Results = Mapping[Place, Sequence[Mapping[str, Any]]]

DENSE, LOCAL, GLOBAL = "0 % dropped", "99 % dropped, local", "99 % dropped, global"
FEWER = "99.9 % dropped, local"
UPDATES = "99 % of updates dropped, 2 bits"
SCHEMES = {
    DENSE: ("dense", "Scheme(Dense())"),
    LOCAL: ("99/local", "Scheme(Threshold(0.01))"),
    GLOBAL: ("99/global", "Scheme(Threshold(0.01), scope='global')"),
}
ONE_BIT = {
    f"{LOCAL}, 1 bit, {centre}": (
        f"99/local/1-bit/{centre}",
        f"Scheme(Threshold(0.01), values=OneBit({centre!r}))",
    )
    for centre in ("threshold", "column", "global")
}
TWO_BITS = f"{LOCAL}, 2 bits"
QUANTIZED = {**ONE_BIT, TWO_BITS: ("99/local/2-bit", "Scheme(Threshold(0.01), values=TwoBit())")}
ROWS = {
    **SCHEMES,
    **QUANTIZED,
    FEWER: ("99.9/local", "Scheme(Threshold(0.001))"),
    UPDATES: ("updates", "Scheme(TopK(0.01), values=TwoBit(), dense_1d=False)"),
}
CORPORA = {"multi30k": "en→de", "tatoeba-en-ro": "ro→en"}
MODELS = {"rnn": (512,), "transformer": (256, 256, 256)}
NORMS = {"plain": False, "layernorm": True}
SCORE = Measure("test_bleu", "test BLEU")
CLOSE = 0.5  # points of BLEU: smaller differences count as noise
LEARNT = 5.0  # points of BLEU: a worse model is not used for comparisons
SLOWER = 1.1  # the ratio of steps above which a scheme counts as slower
RATES = (0.001, 0.002, 0.004, 0.008)

_Making = Callable[[str, str], Recipe]  # from a corpus and a model


def short() -> list[Cell]:
    """Return the recipe of about 3,300 steps with 4 × 64 pairs: Multi30k 30 epochs, Tatoeba 45."""

    def made(corpus: str, model: str) -> Recipe:
        return _recipe(corpus, model, {"multi30k": 30, "tatoeba-en-ro": 45}[corpus])

    return list(_cells(made))


def laptop() -> list[Cell]:
    """Return small models of short sentences, 2,530 steps with 4 × 16 pairs: minutes on 2 cores."""

    def made(corpus: str, model: str) -> Recipe:
        recipe = replace(_recipe(corpus, model, epochs=10), precision="float32", batch=16)
        hidden = {"rnn": (128,), "transformer": (128, 128)}[model]
        return replace(recipe, hidden=hidden, vocabulary=3000, length=16, looks=2)

    return [cell for cell in _cells(made) if cell.recipe.problem == "tatoeba-en-ro"]


def rates() -> list[Cell]:
    """Return the laptop recipe with layer normalisation, at several learning rates."""
    rows = {
        DENSE: SCHEMES[DENSE],
        LOCAL: SCHEMES[LOCAL],
        UPDATES: ROWS[UPDATES],
        "updates dense": ("updates-dense", "Dense()"),
        "updates 1 %": ("updates-exact", "TopK(0.01)"),
        "updates 5 %, 2 bits": (
            "updates-5",
            "Scheme(TopK(0.05), values=TwoBit(), dense_1d=False)",
        ),
    }
    cells = []
    for row, (name, scheme) in rows.items():
        for cell in laptop():
            if cell.places[0][0] != DENSE or not cell.recipe.normalised:
                continue
            for rate in RATES:
                recipe = replace(cell.recipe, rate=rate)
                if name.startswith("updates"):
                    recipe = replace(recipe, communicate="updates", step_ahead="auto")
                heading = f"{recipe.model}, rate {rate:g}"
                place = (row, heading)
                cells.append(Cell(f"{name}/{recipe.model}/{rate:g}", scheme, recipe, (place,)))
    return cells


def quick() -> list[Cell]:
    """Return tiny models and a few hundred pairs, to check on a laptop that everything runs."""

    def made(corpus: str, model: str) -> Recipe:
        recipe = replace(_recipe(corpus, model, epochs=2), precision="float32", limit=400)
        return replace(recipe, batch=16, hidden=(32,), vocabulary=1000, length=24, warmup=10)

    return list(_cells(made))


def _recipe(corpus: Any, model: Any, epochs: int) -> Recipe:
    return Recipe(
        problem=corpus,
        workers=4,
        batch=64,
        epochs=epochs,
        optimizer="adam",
        rate=0.001,
        precision="bfloat16",
        hidden=MODELS[model],
        model=model,
        vocabulary=8000,
        length=32,
        warmup=400,
    )


def _cells(made: _Making) -> Iterator[Cell]:
    """Yield cells row by row, so that early results are comparable.

    Quantization is tested only with layer normalisation.
    """
    for row, (name, scheme) in ROWS.items():
        for corpus in CORPORA:
            for model in MODELS:
                for norm, normalised in NORMS.items():
                    if normalised or row not in QUANTIZED:
                        recipe = replace(made(corpus, model), normalised=normalised)
                        if row == UPDATES:
                            recipe = replace(recipe, communicate="updates", step_ahead="auto")
                        place = (row, column(corpus, model, norm))
                        yield Cell(f"{name}/{corpus}/{model}/{norm}", scheme, recipe, (place,))


def column(corpus: str, model: str, norm: str) -> str:
    """Return the heading of the column for a corpus, a model and its normalisation."""
    return f"{CORPORA[corpus]}, {model}, {norm}"


def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Return verdicts on the claims about BLEU, with their evidence."""
    return [
        _claim("dropping 99 % loses no BLEU", _behind(found, LOCAL, DENSE, NORMS), True),
        _claim("dropping 99.9 % loses no BLEU", _behind(found, FEWER, DENSE, NORMS), True),
        _claim(
            "1 % of updates in two bits loses no BLEU", _behind(found, UPDATES, DENSE, NORMS), True
        ),
        _claim(
            "without layer normalisation a global threshold is worse than a local one",
            _behind(found, GLOBAL, LOCAL, ("plain",)),
            False,
        ),
        _claim(
            "with layer normalisation a global threshold is as good as a local one",
            _behind(found, GLOBAL, LOCAL, ("layernorm",)),
            True,
        ),
    ]


def at_best_rates(found: Mapping[Place, Sequence[float]]) -> list[str]:
    """Compare every row with dense training, each at its best rate, model by model.

    Rates with one seed count only where no rate has two.
    """
    said = []
    for model in MODELS:
        best: dict[str, tuple[str, Sequence[float]]] = {}
        for (row, heading), scores in found.items():
            if heading.startswith(model):
                kept = best.get(row, (heading, ()))
                best[row] = max(kept, (heading, scores), key=lambda one: _merit(one[1]))
        for row, (heading, scores) in best.items():
            text = f"{row}: {SCORE.mean(scores)} at {heading}"
            if row != DENSE and DENSE in best:
                pairs = zip(scores, best[DENSE][1], strict=False)
                text += f"; to dense, seed by seed: {SCORE.mean([a - b for a, b in pairs], '+')}"
            said.append(text)
    return said


def _merit(scores: Sequence[float]) -> tuple[bool, float]:
    return len(scores) > 1, fmean(scores) if scores else 0.0


def on_curves(results: Results) -> list[str]:
    """Return verdicts on convergence: the steps to the same validation loss as without bits."""
    return [
        _pace("1 bit after dropping 99 % slows convergence", results, ONE_BIT),
        _pace("2 bits after dropping 99 % slow convergence", results, (TWO_BITS,)),
    ]


def _behind(
    found: Mapping[Place, Sequence[float]], row: str, other: str, norms: Sequence[str] | Any
) -> dict[str, tuple[float, bool]]:
    """Return by how many points `row` is behind `other` in each column, and if it exceeds noise."""
    gaps = {}
    for corpus in CORPORA:
        for model in MODELS:
            for norm in norms:
                heading = column(corpus, model, norm)
                ours, theirs = found.get((row, heading)), found.get((other, heading))
                if ours and theirs and fmean(theirs) >= LEARNT:
                    gap = fmean(theirs) - fmean(ours)
                    noise = max(CLOSE, *(max(values) - min(values) for values in (ours, theirs)))
                    gaps[heading] = (gap, gap > noise)
    return gaps


def _claim(claim: str, gaps: Mapping[str, tuple[float, bool]], is_even: bool) -> str:
    """Return a verdict on a claim of equality if `is_even`, else on a claim of a loss."""
    if not gaps:
        return f"{claim}: not tested yet"
    held = sum(is_loss != is_even for _, is_loss in gaps.values())
    numbers = "; ".join(f"{heading} {-gap:+.2f}" for heading, (gap, _) in gaps.items())
    return f"{claim}: {_verdict(held, len(gaps))} (BLEU {numbers})"


def _verdict(held: int, asked: int) -> str:
    word = {0: "not reproduced", asked: "reproduced"}.get(held, "partly reproduced")
    return f"{word}, in {held} of {asked} cases"


def _pace(claim: str, results: Results, rows: Sequence[str] | Any) -> str:
    """Return a verdict on slower convergence, by the ratio of steps to the same loss."""
    ratios: dict[str, float | None] = {}
    for row in rows:
        for (name, heading), quantized in results.items():
            exact = results.get((LOCAL, heading))
            if name == row and exact and fmean(_score(one) for one in exact) >= LEARNT:
                ratios[f"{row.removeprefix(f'{LOCAL}, ')}, {heading}"] = _ratio(quantized, exact)
    if not ratios:
        return f"{claim}: not tested yet"
    held = sum(ratio is None or ratio > SLOWER for ratio in ratios.values())
    numbers = "; ".join(
        f"{name} {'never' if ratio is None else f'{ratio:.2f}'}" for name, ratio in ratios.items()
    )
    return f"{claim}: {_verdict(held, len(ratios))} (times the steps: {numbers})"


def _score(result: Mapping[str, Any]) -> float:
    return result.get(SCORE.field) or 0.0


def _ratio(
    quantized: Sequence[Mapping[str, Any]], exact: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the ratio of steps to the best loss of the exact training's first half.

    None if the quantized training never reached it.
    """
    steps, losses = _curve(exact)
    goal = min(losses[: (len(losses) + 1) // 2], default=None)
    if goal is None:
        return None
    ours, theirs = _reached(*_curve(quantized), goal), _reached(steps, losses, goal)
    return None if ours is None or theirs is None else ours / theirs


def _curve(results: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the steps and the mean validation losses over seeds, as far as all seeds have them."""
    curves = [result["curves"] for result in results]
    losses = zip(*(curve["valid_loss"] for curve in curves), strict=False)
    means = [fmean(found) for found in losses if None not in found]
    return curves[0]["step"][: len(means)], means


def _reached(steps: Sequence[float], losses: Sequence[float], goal: float) -> float | None:
    """Return the step at which the loss reaches `goal`, by linear interpolation.

    >>> _reached([10, 20, 30], [3.0, 2.0, 1.0], 1.5)
    25.0
    """
    for number, loss in enumerate(losses):
        if loss <= goal:
            if number == 0:
                return float(steps[0])
            share = (losses[number - 1] - goal) / (losses[number - 1] - loss)
            return steps[number - 1] + share * (steps[number] - steps[number - 1])
    return None


TRANSLATION = Study(
    name="aji2017-translation",
    paper="aji2017",
    claim="dropping 99 % loses no BLEU; 1 bit is slower; a global threshold needs normalisation",
    recipes={"short": short, "laptop": laptop, "quick": quick},
    seeds={"short": (0,), "laptop": (0,), "quick": (0,)},
    remarks=remarks,
    on_curves=on_curves,
    score=SCORE,
    drawn=(Measure("valid_bleu", "validation BLEU"), Measure("valid_loss", "validation loss")),
)
RATES_OF_TRANSLATION = Study(
    name="aji2017-translation-rates",
    paper="aji2017",
    claim="updates lose no BLEU if the learning rate is tuned again",
    recipes={"laptop": rates},
    seeds={"laptop": (0, 1, 2)},
    remarks=at_best_rates,
    score=SCORE,
    drawn=TRANSLATION.drawn,
)
