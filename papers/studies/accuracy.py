"""The accuracy of sparse against dense training, each at its best learning rate on the same grid.

Two tasks that a GPU trains in seconds and a laptop in minutes: ResNet-10 on CIFAR-10 with SGD and
momentum, and a GPT of 0.8 million parameters on tiny shakespeare with AdamW. Differences to dense
are taken per seed, with the same initial weights and the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from sparsewire.adapters.updates import StepAhead

from ..recipe import ACCURACY, Cell, Measure, Place, Recipe, Study, at_their_best
from .eghlidi2020 import LAPTOP, corrected, recipe_of

WORKERS = 8
DENSE = "dense"
_UPDATES = {"communicate": "updates"}
_AHEAD = {"communicate": "updates", "step_ahead": "auto"}


@dataclass(frozen=True)
class Row:
    """A row of the table: a scheme, and its changes to the recipe."""

    name: str
    scheme: str
    how: Mapping[str, Any] = field(default_factory=dict)
    is_corrected: bool = False

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this row's changes."""
        return replace(corrected(recipe) if self.is_corrected else recipe, **self.how)


def _ahead(share: float) -> dict[str, Any]:
    return {**_UPDATES, "step_ahead": share}


def _two_bits(selector: str, more: str = "", values: str = "TwoBit()") -> str:
    return f"Scheme({selector}, values={values}{more})"


_EVERYTHING = ", dense_below=0, dense_1d=False"
_GLOBAL = ", scope='global'"
_AT_LEAST = ", min_count=16"
_LLOYD, _LLOYD_3 = "LloydMax()", "LloydMax(3)"


def _early(first: float, then: float, more: str = "", values: str = "TwoBit()") -> str:
    """Return a scheme whose ratio changes after the first half of the exchanges, `{half}`."""
    selector = f"TopK({then}{'' if _GLOBAL in more else _AT_LEAST})"
    scheme = _two_bits(selector, _EVERYTHING + more, values)
    return f"Warmup({scheme}, steps={{half}}, ratio={first})"


def _local(every: int, **how: Any) -> dict[str, Any]:
    return {**_UPDATES, "every": every, **how}


_ALL = ", dense_1d=False"
_OWNERS = ", collective=Sharded(0.05), dense_1d=False"
_EQUAL_OWNERS = ", collective=Sharded()"  # send back as many coordinates as a rank sends
_GLOBAL_1 = _two_bits("TopK(0.01)", _EVERYTHING + _GLOBAL)
_AT_LEAST_1 = _two_bits(f"TopK(0.01{_AT_LEAST})", _EVERYTHING)

COMMON = (
    Row(DENSE, "Dense()"),
    Row("gradients 1 %", "TopK(0.01)"),
    Row("updates 1 %", "TopK(0.01)", _UPDATES),
    Row("updates 1 %, ahead", "TopK(0.01)", _AHEAD),
    Row("updates 1 %, ahead 0.3", "TopK(0.01)", _ahead(0.3)),
    Row("updates 1 %, ahead 0.5", "TopK(0.01)", _ahead(0.5)),
    Row("updates 1 %, ahead 0.7", "TopK(0.01)", _ahead(0.7)),
    Row("updates 1 %, ahead 1", "TopK(0.01)", _ahead(1.0)),
    Row("updates 1 %, two bits, ahead", _two_bits("TopK(0.01)"), _AHEAD),
    Row("updates 2 %, two bits, ahead", _two_bits("TopK(0.02)"), _AHEAD),
    Row("updates 5 %", "TopK(0.05)", _UPDATES),
    Row("updates 5 %, ahead", "TopK(0.05)", _AHEAD),
    Row("updates 5 %, ahead 0.5", "TopK(0.05)", _ahead(0.5)),
    Row("updates 5 %, two bits, ahead", _two_bits("TopK(0.05)"), _AHEAD),
    Row("updates 1 %, two bits, 1-D too, ahead", _two_bits("TopK(0.01)", _ALL), _AHEAD),
    Row("updates 1 %, two bits, 1-D too, ahead 0.3", _two_bits("TopK(0.01)", _ALL), _ahead(0.3)),
    Row("updates 2 %, two bits, 1-D too, ahead", _two_bits("TopK(0.02)", _ALL), _AHEAD),
    Row("updates 5 %, two bits, owners, ahead", _two_bits("TopK(0.05)", _OWNERS), _AHEAD),
    Row("updates 2 %, two bits, owners, ahead", _two_bits("TopK(0.02)", _OWNERS), _AHEAD),
    Row(
        "updates 1 %, two bits, 1-D too, ahead, late",
        _two_bits("TopK(0.01)", _ALL),
        {**_AHEAD, "delay": 1},
    ),
    Row("updates dense", "Dense()", _UPDATES),
    Row("updates 1 %, two bits, everything, ahead", _two_bits("TopK(0.01)", _EVERYTHING), _AHEAD),
    Row("updates 2 %, two bits, everything, ahead", _two_bits("TopK(0.02)", _EVERYTHING), _AHEAD),
    Row(
        "updates 1 %, two bits, everything, ahead 0.3",
        _two_bits("TopK(0.01)", _EVERYTHING),
        _ahead(0.3),
    ),
    Row("updates 1 %, global, two bits, ahead", _GLOBAL_1, _AHEAD),
    Row("updates 1 %, global, two bits, ahead 0", _GLOBAL_1, _UPDATES),
    Row("updates 1 %, global, two bits, ahead 0.3", _GLOBAL_1, _ahead(0.3)),
    Row("updates 4 then 0.3 %, global, two bits, ahead", _early(0.04, 0.003, _GLOBAL), _AHEAD),
    Row("updates 4 then 0.3 %, global, two bits, ahead 0", _early(0.04, 0.003, _GLOBAL), _UPDATES),
    Row("updates 1 %, 16 at least, two bits, ahead", _AT_LEAST_1, _AHEAD),
    Row("updates 1 %, 16 at least, two bits, ahead 0.5", _AT_LEAST_1, _ahead(0.5)),
    Row(
        "updates 1 %, 16 at least, two bits, ahead, drift 50",
        _AT_LEAST_1,
        {**_AHEAD, "drift": 50.0},
    ),
    Row(
        "updates 5 %, 16 at least, two bits, ahead",
        _two_bits(f"TopK(0.05{_AT_LEAST})", _EVERYTHING),
        _AHEAD,
    ),
    Row("updates 3 then 0.3 %, two bits, ahead", _early(0.03, 0.003), _AHEAD),
    Row("updates 5 then 0.3 %, two bits, ahead", _early(0.05, 0.003), _AHEAD),
    Row(
        "updates 3 then 0.3 %, two bits, ahead, drift 20",
        _early(0.03, 0.003),
        {**_AHEAD, "drift": 20.0},
    ),
    Row(
        "updates 5 %, two bits, everything, owners, ahead",
        _two_bits("TopK(0.05)", _OWNERS + ", dense_below=0"),
        _AHEAD,
    ),
    Row(
        "updates 1 %, global, Lloyd, ahead",
        _two_bits("TopK(0.01)", _EVERYTHING + _GLOBAL, _LLOYD),
        _AHEAD,
    ),
    Row(
        "updates 4 then 0.3 %, global, Lloyd, ahead",
        _early(0.04, 0.003, _GLOBAL, _LLOYD),
        _AHEAD,
    ),
    Row(
        "updates 15 then 1 %, global, Lloyd 3, owners, ahead",
        _early(0.15, 0.01, _GLOBAL + _EQUAL_OWNERS, _LLOYD_3),
        _AHEAD,
    ),
    Row(
        "updates 10 then 5 %, global, Lloyd 3, owners, ahead",
        _early(0.1, 0.05, _GLOBAL + _EQUAL_OWNERS, _LLOYD_3),
        _AHEAD,
    ),
    Row(
        "updates 10 then 2 %, global, Lloyd 3, owners, ahead",
        _early(0.1, 0.02, _GLOBAL + _EQUAL_OWNERS, _LLOYD_3),
        _AHEAD,
    ),
    Row(
        "updates 20 then 0.5 %, global, two bits, owners, ahead",
        _early(0.2, 0.005, _GLOBAL + _EQUAL_OWNERS),
        _AHEAD,
    ),
    Row(
        "updates 20 then 0.5 %, global, two bits, owners, ahead 0",
        _early(0.2, 0.005, _GLOBAL + _EQUAL_OWNERS),
        _UPDATES,
    ),
    Row(
        "updates 10 then 3 %, global, two bits, owners, ahead",
        _early(0.1, 0.03, _GLOBAL + _EQUAL_OWNERS),
        _AHEAD,
    ),
    Row(
        "updates 15 then 2 %, two bits, owners, ahead",
        _early(0.15, 0.02, _EQUAL_OWNERS),
        _AHEAD,
    ),
)
PHOTOS = (
    *COMMON[:2],
    Row("gradients 1 %, corrected", "Scheme(TopK(0.01), memory=MomentumCorrection())", {}, True),
    Row(
        "gradients 1 %, corrected, two bits, owners",
        _two_bits("TopK(0.01)", ", memory=MomentumCorrection(), collective=Sharded(0.05)"),
        {},
        True,
    ),
    Row(
        "gradients 2 %, corrected, two bits, owners 10 %",
        _two_bits("TopK(0.02)", ", memory=MomentumCorrection(), collective=Sharded(0.1)"),
        {},
        True,
    ),
    Row(
        "updates 1 %, two bits, everything, ahead, flushed",
        _two_bits("TopK(0.01)", _EVERYTHING),
        {**_AHEAD, "flush": True},
    ),
    *COMMON[2:],
)
LOCAL = 15
DILOCO = "dense DiLoCo, H = 15"
_LOCAL_ROWS = ("local steps", "SparseLoCo")
_CHUNKS = "Scheme(TopK(count=64), scope=4096, values=TwoBit(), memory=ErrorFeedback(decay=0.95))"
_OUTER = {"outer_rate": 0.7, "outer_momentum": 0.9}
_LOCAL_OWNERS = _two_bits("TopK(0.05)", _OWNERS)
_VELOCITY = ", memory=MomentumCorrection(0.6, masking=False)"
# percent in the first half of the rounds, and then; λ; rate and momentum of the outer optimizer
_LOCAL_GRID: tuple[tuple[float, float, StepAhead, float, float], ...] = (
    (15, 1, "auto", 0.0, 0.0),
    (15, 1, "auto", 0.7, 0.9),
    (15, 1, "auto", 1.0, 0.6),
    (10, 4, "auto", 0.0, 0.0),
    (10, 4, "auto", 1.0, 0.6),
    (10, 4, "auto", 1.0, 0.7),
    (10, 4, "auto", 1.0, 0.8),
    (10, 4, "auto", 0.7, 0.8),
    (10, 4, 0.3, 1.0, 0.6),
    (10, 4, 0.3, 1.0, 0.7),
    (8, 6, "auto", 1.0, 0.6),
    (8, 6, "auto", 1.0, 0.7),
    (8, 6, 0.3, 1.0, 0.4),
    (8, 6, 0.3, 1.0, 0.6),
    (7, 7, "auto", 1.0, 0.6),
)


def _local_owners(
    first: float, then: float, ahead: StepAhead, outer_rate: float, outer_momentum: float
) -> Row:
    """Return a row with shard owners and 15 local steps, which sends 50 times less than DiLoCo."""
    share = f"{first:g} then {then:g} %" if first != then else f"{then:g} %"
    name = f"local steps, H = {LOCAL}, {share}, two bits, owners, ahead"
    name += "" if ahead == "auto" else f" {ahead:g}"
    name += f", outer {outer_rate:g}/{outer_momentum:g}" if outer_rate else ""
    scheme = _early(first / 100, then / 100, _EQUAL_OWNERS)
    if first == then:
        scheme = _two_bits(f"TopK({then / 100}{_AT_LEAST})", _EVERYTHING + _EQUAL_OWNERS)
    outer = {"outer_rate": outer_rate, "outer_momentum": outer_momentum}
    return Row(name, scheme, _local(LOCAL, step_ahead=ahead, **outer))


TEXTS = (
    *COMMON,
    Row(
        "updates 1 %, two bits, 1-D too, ahead, decay apart",
        _two_bits("TopK(0.01)", _ALL),
        {**_AHEAD, "decays_apart": True},
    ),
    Row(
        "updates 1 %, two bits, 1-D too, ahead, moments shared",
        _two_bits("TopK(0.01)", _ALL),
        {**_AHEAD, "share_moments": 100},
    ),
    Row(
        "updates 1 %, two bits, 1-D too, ahead, residuals shared",
        _two_bits("TopK(0.01)", _ALL),
        {**_AHEAD, "share_residuals": 100},
    ),
    Row(DILOCO, "Dense()", _local(LOCAL, **_OUTER)),
    Row(
        "local steps, H = 15, 5 %, two bits, global, ahead",
        _two_bits("TopK(0.05)", _EVERYTHING + _GLOBAL),
        _local(LOCAL, step_ahead="auto"),
    ),
    Row("dense local steps, H = 15", "Dense()", _local(LOCAL)),
    Row("SparseLoCo, H = 15", _CHUNKS, _local(LOCAL)),
    Row("SparseLoCo, H = 15, ahead", _CHUNKS, _local(LOCAL, step_ahead="auto")),
    Row(
        "local steps, H = 15, 5 %, two bits, ahead",
        _two_bits("TopK(0.05)"),
        _local(LOCAL, step_ahead="auto"),
    ),
    Row(
        "local steps, H = 15, 5 %, two bits, owners, ahead",
        _LOCAL_OWNERS,
        _local(LOCAL, step_ahead="auto"),
    ),
    Row(
        "local steps, H = 15, 5 %, two bits, owners, ahead 0.4",
        _LOCAL_OWNERS,
        _local(LOCAL, step_ahead=0.4),
    ),
    Row(
        "local steps, H = 15, 5 %, two bits, owners, ahead, drift 10",
        _LOCAL_OWNERS,
        {**_local(LOCAL, step_ahead="auto"), "drift": 10.0},
    ),
    Row(
        "local steps, H = 15, 5 %, two bits, owners, ahead 0.7",
        _LOCAL_OWNERS,
        _local(LOCAL, step_ahead=0.7),
    ),
    Row(
        "local steps, H = 15, 5 %, two bits, owners, ahead, outer",
        _LOCAL_OWNERS,
        _local(LOCAL, step_ahead="auto", **_OUTER),
    ),
    *(_local_owners(*choice) for choice in _LOCAL_GRID),
    Row(
        "local steps, H = 15, 15 then 1 %, two bits, owners, ahead, momentum first",
        _early(0.15, 0.01, _EQUAL_OWNERS + _VELOCITY),
        _local(LOCAL, step_ahead="auto"),
    ),
    Row(
        "local steps, H = 15, 5 %, outer",
        "TopK(0.05)",
        _local(LOCAL, **_OUTER),
    ),
    Row(
        "local steps, H = 15, 20 %, ahead",
        "TopK(0.2)",
        _local(LOCAL, step_ahead="auto"),
    ),
    Row(
        "local steps, H = 15, 20 %, ahead, outer",
        "TopK(0.2)",
        _local(LOCAL, step_ahead="auto", **_OUTER),
    ),
)


WIDE = 32  # workers
_PHOTO_STEPS, _TEXT_STEPS = 390, 122  # per epoch
_WIDE_ROWS = (
    DENSE,
    "gradients 1 %, corrected",
    "gradients 1 %, corrected, two bits, owners",
    "gradients 2 %, corrected, two bits, owners 10 %",
    "updates 1 %, two bits, 1-D too, ahead",
    "updates 5 %, two bits, owners, ahead",
)


def photos(epochs: int, workers: int = WORKERS) -> Recipe:
    """Return the recipe of ResNet-10 on CIFAR-10: 390 steps per epoch with 128 images in total."""
    return recipe_of(workers, epochs, 0.1, is_small=True)


def texts(epochs: int) -> Recipe:
    """Return the recipe of the small GPT, with 122 steps per epoch."""
    return Recipe(
        problem="shakespeare",
        workers=WORKERS,
        batch=16,
        epochs=epochs,
        optimizer="adamw",
        rate=4e-3,
        weight_decay=0.1,
        hidden=(128,) * 4,
        model="gpt",
        length=64,
        warmup=50,
        cosine=True,
    )


def _cells(rows: Sequence[Row], recipe: Recipe, rates: Sequence[float]) -> list[Cell]:
    half = recipe.epochs // 2 * (_TEXT_STEPS if recipe.length else _PHOTO_STEPS)
    cells = []
    for row in rows:
        for rate in rates:
            mine = row.recipe(replace(recipe, rate=rate))
            scheme = row.scheme.replace("{half}", str(max(1, half // mine.every)))
            cells.append(
                Cell(f"{row.name}/{rate:g}", scheme, mine, ((row.name, f"rate {rate:g}"),))
            )
    return cells


def _quick(rows: Sequence[Row], recipe: Recipe, rate: float) -> list[Cell]:
    few = replace(recipe, epochs=1, batch=4, limit=64, drops=())
    if recipe.length:
        few = replace(few, limit=64 * WORKERS * 4 + 2 * recipe.length)
    return _cells(rows, few, (rate,))


def _wide(rows: Sequence[Row], recipe: Recipe) -> list[Cell]:
    """Return the cells with four times the workers, to see the effect of their number."""
    chosen = [row for row in rows if row.name in _WIDE_ROWS]
    return _cells(chosen, recipe, (recipe.rate,))


def _remarks(measure: Measure) -> Any:
    def remarks(found: Mapping[Place, Sequence[float]]) -> list[str]:
        """Return each row's score at its best rate, and its difference to dense per seed.

        Local steps are also compared with dense local steps, DiLoCo.
        """
        best = at_their_best(found, measure)
        if DENSE not in best:
            return ["dense is not trained yet"]
        said = [f"{DENSE}: {measure.mean(best[DENSE][1])} at {best[DENSE][0]}"]
        for row, (rate, scores) in best.items():
            if row == DENSE:
                continue
            text = f"{row}: {measure.mean(scores)} at {rate}"
            others = {DENSE: "dense", DILOCO: "DiLoCo"}
            for other, name in others.items():
                if other in best and (other == DENSE or row.startswith(_LOCAL_ROWS)):
                    pairs = zip(scores, best[other][1], strict=False)
                    differences = [one - base for one, base in pairs]
                    text += f"; to {name}, seed by seed: {measure.mean(differences, '+')}"
            said.append(text)
        return said

    return remarks


def _best_on_the_way(found: Mapping[Place, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the rows that were clearly better before the end, for example because they overfit."""
    said = []
    for (row, rate), results in found.items():
        best = fmean(min(result["curves"][VALID_LOSS.field]) for result in results)
        end = fmean(result[VALID_LOSS.field] for result in results)
        if best < end - _CLEARLY:
            said.append(f"{row} at {rate}: {best:.3f} at its best look, {end:.3f} at the end")
    return said


def _where_it_is_lost(found: Mapping[Place, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return each row's training loss minus that of dense, before the first drop and at the end."""
    said = []
    for (row, rate), results in found.items():
        dense = {result["seed"]: result for result in found.get((DENSE, rate), ())}
        pairs = [(result, dense[result["seed"]]) for result in results if result["seed"] in dense]
        drops = results[0]["recipe"]["drops"]
        if row == DENSE or not pairs or not drops:
            continue
        before, end = (
            fmean(one["curves"]["loss"][at] - other["curves"]["loss"][at] for one, other in pairs)
            for at in (drops[0] - 1, -1)
        )
        said.append(
            f"{row} at {rate}: training loss {before:+.3f} to dense before the first drop, "
            f"{end:+.3f} at the end ({len(pairs)})"
        )
    return said


_CLEARLY = 0.005  # nats
VALID_LOSS = Measure("valid_loss", "validation loss, nats", is_loss=True, digits=3)
_PHOTO_RATES = (0.03, 0.1, 0.3)
_TEXT_RATES = (4e-3, 8e-3, 16e-3)

CIFAR10 = Study(
    name="accuracy-cifar10",
    paper="accuracy",
    claim="sparse SGD as good as dense at 40 times fewer bytes",
    recipes={
        "laptop": lambda: _cells(PHOTOS, photos(LAPTOP), _PHOTO_RATES),
        "long": lambda: _cells(PHOTOS, photos(3 * LAPTOP), _PHOTO_RATES),
        "wide": lambda: _wide(PHOTOS, photos(LAPTOP, WIDE)),
        "quick": lambda: _quick(PHOTOS, photos(1), 0.1),
    },
    seeds={"laptop": (0, 1, 2), "long": (0, 1, 2), "wide": (0, 1, 2), "quick": (0,)},
    remarks=_remarks(ACCURACY),
    on_curves=_where_it_is_lost,
    shows_bytes=True,
)
GPT = Study(
    name="accuracy-gpt",
    paper="accuracy",
    claim="sparse AdamW as good as dense at 40 times fewer bytes",
    recipes={
        "laptop": lambda: _cells(TEXTS, texts(16), _TEXT_RATES),
        "long": lambda: _cells(TEXTS, texts(66), _TEXT_RATES),
        "wide": lambda: _wide(TEXTS, replace(texts(16), workers=WIDE, batch=4, rate=8e-3)),
        "quick": lambda: _quick(TEXTS, texts(1), 4e-3),
    },
    seeds={"laptop": (0, 1, 2), "long": (0, 1, 2), "wide": (0, 1, 2), "quick": (0,)},
    remarks=_remarks(VALID_LOSS),
    on_curves=_best_on_the_way,
    score=VALID_LOSS,
    shows_bytes=True,
)
