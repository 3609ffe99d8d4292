"""The studies hold what the papers did: schemes, recipes, published numbers, and what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import sparsewire as sw
from papers.recipe import Cell, Place, Study
from papers.store import SCHEMA, Store, StoreError
from papers.studies import STUDIES, aji2017, eghlidi2020
from papers.studies import aji2017_translation as text

MADE = [
    pytest.param(study, name, id=f"{study.name} {name}")
    for study in STUDIES.values()
    for name in study.recipes
    if name != "tuned"  # which needs results
]


@pytest.mark.parametrize(("study", "recipe"), MADE)
def test_cells(study: Study, recipe: str) -> None:
    cells = study.recipes[recipe]()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    places = [place for cell in cells for place in cell.places]
    assert len(set(places)) == len(places)
    trainings = {(cell.scheme, cell.recipe) for cell in cells}
    assert len(trainings) == len(cells), "two cells would share one result"
    assert study.seeds[recipe]
    for cell in cells:
        sw.parse(cell.scheme)


def test_mnist_is_trained_as_in_the_paper() -> None:
    cells = aji2017.paper()
    assert len(cells) == 26
    for cell in cells:
        recipe = cell.recipe
        assert (recipe.hidden, recipe.workers, recipe.batch) == ((4096, 4096, 4096), 4, 40)
        assert (recipe.optimizer, recipe.rate, recipe.epochs) == ("adagrad", 0.005, 20)
    by_name = {cell.name: cell.scheme for cell in cells}
    assert by_name["99.9/global/layernorm/pull-sparse"] == (
        "Scheme(Threshold(0.001), collective=Sharded(), scope='global')"
    )
    assert by_name["90/local/plain/pull-dense"] == (
        "Scheme(Threshold(0.1), collective=Sharded(pull_ratio=1.0))"
    )


def test_table_1_is_trained_as_in_the_paper() -> None:
    cells = {cell.name: cell for cell in eghlidi2020.paper()}
    assert len(cells) == 4 + 2 * (3 + 3 * 5)
    block = cells["block-random-k-reduce/global/8"]
    assert block.scheme == "Scheme(BlockRandomK(0.01, shared=True), scope='global')"
    assert block.published == (78.11,)
    assert block.recipe.rate == pytest.approx(0.08)
    top = cells["top-k/layer/4"].recipe
    assert (top.epochs, top.batch, top.drops) == (300, 128, (150, 250))
    assert (top.rate, top.momentum, top.weight_decay) == (pytest.approx(0.4), 0.9, 1e-4)
    assert cells["standard/2"].places == (
        ("Standard SGD", "layer, W=2"),
        ("Standard SGD", "global, W=2"),
    )
    assert cells["random-k-gather/layer/1"].published == (93.43, 93.43)


def test_short_recipe_takes_the_same_steps_whatever_the_number_of_workers() -> None:
    for cell in eghlidi2020.short():
        assert cell.recipe.batch * cell.recipe.workers == 128
        assert cell.recipe.rate == (0.01 if "/global/" in cell.name else 0.1)
        assert cell.recipe.drops == (15, 25)


def everything(cells: list[Cell], better: float = 0.0) -> dict[Place, list[float]]:
    """The paper's own table, with all of it but the dense row `better`."""
    return {
        place: [number + (better if place[0] != eghlidi2020.STANDARD else 0.0)]
        for cell in cells
        for place, number in zip(cell.places, cell.published, strict=True)
        if number is not None
    }


def test_the_papers_own_numbers_reproduce_it() -> None:
    said = eghlidi2020.remarks(everything(eghlidi2020.paper()))
    assert said[0] == "layer-wise at least as good as global: holds in 20 of 20 pairs"
    assert "top-k at least as good as random-k: holds in 12 of 16 pairs" in said[1]
    assert said[3].endswith("all-gather at least as good as all-reduce: holds in 6 of 6 pairs")
    assert said[4].endswith(
        "layer holds (0.60, 2.32, 2.47 points); global holds (2.85, 12.11, 12.34 points)"
    )
    assert len(said) == 5 + 5
    assert all(": reproduced" in sentence for sentence in said[5:])
    said = eghlidi2020.remarks(everything(eghlidi2020.paper(), better=-5))
    assert all(": not reproduced" in sentence for sentence in said[5:])
    worse = everything(eghlidi2020.paper())
    worse["Block-random-k, allReduce", "layer, W=8"] = [93.0]
    assert "layer does not hold (0.60, 2.32, 0.10 points)" in eghlidi2020.remarks(worse)[4]


def test_placement_is_judged_row_by_row() -> None:
    (study,) = (study for study in eghlidi2020.ALL if study.name == "eghlidi2020-divergence")
    cells = study.recipes["laptop"]()
    headings = dict.fromkeys(heading for cell in cells for _, heading in cell.places)
    rows = {"Top-k": (60.0, 57.0, 64.5), "Random-k": (53.0, 10.0, 52.0)}
    found = {
        (row, heading): [number]
        for row, numbers in rows.items()
        for heading, number in zip(headings, numbers, strict=True)
    }
    assert study.remarks(found) == [
        "Top-k, 1-D tensors sparsified too: -3.00 points",
        "Top-k, momentum before the exchange: +4.50 points",
        "Random-k, 1-D tensors sparsified too: learns nothing",
        "Random-k, momentum before the exchange: -1.00 points",
    ]


def test_what_is_not_there_is_not_judged() -> None:
    said = eghlidi2020.remarks({("Top-k", "layer, W=1"): [90.0]})
    assert all(sentence.endswith("not tested yet") for sentence in said)
    assert len(said) == 5


def test_dropping_is_judged_against_dense_training_of_the_same_model() -> None:
    found = {
        ("0 % dropped", "plain, pull-sparse"): [98.0, 98.2],
        ("99 % dropped, local", "plain, pull-sparse"): [98.0, 97.95],
        ("99.9 % dropped, local", "plain, pull-sparse"): [97.0, 97.2],
        ("99 % dropped, local", "layernorm, pull-sparse"): [98.0, 97.95],
    }
    assert aji2017.remarks(found) == [
        "99 % dropped, local, plain, pull-sparse: no loss that the seeds could tell",
        "99.9 % dropped, local, plain, pull-sparse: 1.00 points behind dense",
    ]


def test_the_best_rate_is_taken(tmp_path: Path) -> None:
    store = Store(tmp_path / "rates.jsonl")
    with pytest.raises(StoreError, match="eghlidi2020-rates"):
        eghlidi2020.best_rates(store)
    for cell in eghlidi2020.rates():
        best = 0.03 if "top-k/global" in cell.name else 0.1
        store.append(
            {
                "schema": SCHEMA,
                "scheme": cell.scheme,
                "identity": sw.parse(cell.scheme).identity,
                "recipe": cell.recipe.to_dict(),
                "seed": 0,
                "diverged": cell.recipe.rate == 0.3,
                "test_accuracy": 0.99
                if cell.recipe.rate == 0.3
                else 0.9 - abs(best - cell.recipe.rate),
            }
        )
    rates = eghlidi2020.best_rates(store)
    assert rates["Top-k", "global"] == 0.03
    assert rates["Top-k", "layer"] == 0.1
    assert len(rates) == 11


def test_translation_trains_every_scheme_alike() -> None:
    cells = {cell.name: cell for cell in text.short()}
    assert len(cells) == 5 * 8 + 4 * 4
    for cell in cells.values():
        same = cells[f"dense/{'/'.join(cell.name.split('/')[-3:])}"].recipe
        if cell.name.startswith("updates/"):
            same = replace(same, communicate="updates", step_ahead="auto")
        assert cell.recipe == same
        assert cell.name.split("/")[-2] in cell.places[0][1]
    dropped = cells["99/local/1-bit/column/tatoeba-en-ro/rnn/layernorm"]
    assert dropped.scheme == "Scheme(Threshold(0.01), values=OneBit('column'))"
    assert dropped.places == ((f"{text.LOCAL}, 1 bit, column", "ro→en, rnn, layernorm"),)
    assert cells["99/global/multi30k/transformer/plain"].scheme.endswith("scope='global')")


def test_rates_of_translation_differ_in_nothing_else() -> None:
    cells = {cell.name: cell for cell in text.rates()}
    assert len(cells) == 6 * 2 * len(text.RATES)
    for cell in cells.values():
        row, model, rate = cell.name.rsplit("/", 2)
        assert cell.recipe.rate == float(rate)
        dense = cells[f"dense/{model}/{rate}"].recipe
        says = "updates" if row.startswith("updates") else "gradients"
        ahead = "auto" if says == "updates" else 0.0
        assert cell.recipe == replace(dense, communicate=says, step_ahead=ahead)


PLAIN, NORMED = "en→de, rnn, plain", "en→de, rnn, layernorm"


def test_claims_about_bleu_are_judged_one_by_one() -> None:
    assert all(said.endswith(": not tested yet") for said in text.remarks({}))
    found = {
        (text.DENSE, PLAIN): [30.0, 31.0],
        (text.LOCAL, PLAIN): [29.8],
        (text.GLOBAL, PLAIN): [20.0],
        (text.DENSE, NORMED): [33.0],
        (text.LOCAL, NORMED): [32.0],
        (text.GLOBAL, NORMED): [31.7],
    }
    no_loss, fewer, updates, worse, as_good = text.remarks(found)
    assert no_loss == (
        "dropping 99 % loses no BLEU: partly reproduced, in 1 of 2 cases "
        "(BLEU en→de, rnn, plain -0.70; en→de, rnn, layernorm -1.00)"
    )
    assert fewer.endswith("not tested yet")
    assert updates.endswith("not tested yet")
    assert "worse than a local one: reproduced, in 1 of 1 cases" in worse
    assert "as good as a local one: reproduced, in 1 of 1 cases" in as_good
    unlearnt = {place: [value / 10 for value in values] for place, values in found.items()}
    assert all(said.endswith(": not tested yet") for said in text.remarks(unlearnt))
    found[text.GLOBAL, PLAIN] = [29.5]
    found[text.GLOBAL, NORMED] = [0.0]
    assert [said.split(": ")[1].split(",")[0] for said in text.remarks(found)[3:]] == [
        "not reproduced",
        "not reproduced",
    ]


def went(*losses: float | None) -> list[dict[str, object]]:
    steps = [100 * (number + 1) for number in range(len(losses))]
    return [{"curves": {"step": steps, "valid_loss": list(losses)}, "test_bleu": 20.0}]


def test_convergence_is_judged_by_the_steps_to_the_same_loss() -> None:
    assert all(said.endswith(": not tested yet") for said in text.on_curves({}))
    one, two, three = text.ONE_BIT
    results = {
        (text.LOCAL, NORMED): went(4.0, 3.0, 2.0, 1.0),
        (one, NORMED): went(5.0, 4.0, 2.0, 2.0),  # 3.0 at step 250, not 200
        (two, NORMED): went(6.0, 5.0, 4.0, None),
        (text.TWO_BITS, NORMED): went(4.0, 3.0, 2.0, 1.5),
        (three, PLAIN): went(4.0, 3.0),  # nothing to compare it with
    }
    bit, bits = text.on_curves(results)
    assert bit == (
        "1 bit after dropping 99 % slows convergence: reproduced, in 2 of 2 cases (times the "
        f"steps: 1 bit, threshold, {NORMED} 1.25; 1 bit, column, {NORMED} never)"
    )
    assert "slow convergence: not reproduced, in 0 of 1 cases" in bits
    assert bits.endswith(f"2 bits, {NORMED} 1.00)")
    results[text.LOCAL, NORMED][0]["test_bleu"] = None
    assert all(said.endswith(": not tested yet") for said in text.on_curves(results))
