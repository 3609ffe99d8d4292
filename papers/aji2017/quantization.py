"""Aji & Heafield 2017, part one: does quantization after dropping cost accuracy on MNIST?

    python papers/aji2017/quantization.py [--epochs 4] [--seeds 0 1 2] [--out DIR]

Trains each scheme with every seed on four real worker processes, prints test accuracy per epoch
(mean over seeds, and half their range), and writes quantization.json, .png and .svg. `--redraw`
draws the picture from quantization.json without training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sparsewire.tools.bench import drawing
from sparsewire.tools.bench.drawing import INK, OF_LINES

SCHEMES = {
    "Dense()": "dense",
    "Threshold(0.01)": "99 % dropped, 32-bit values",
    "Scheme(Threshold(0.01), values=TwoBit())": "99 % dropped, 2 bits",
    "Scheme(Threshold(0.01), values=OneBit('threshold'))": "99 % dropped, 1 bit, threshold",
    "Scheme(Threshold(0.01), values=OneBit('column'))": "99 % dropped, 1 bit, column mean",
    "Scheme(Threshold(0.01), values=OneBit('global'))": "99 % dropped, 1 bit, global mean",
}


def train(seed: int, epochs: int, workers: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Train every scheme with one seed. Return the summaries by the text of the scheme."""
    command = [
        sys.executable,
        "-m",
        "sparsewire.tools.cli",
        "compare",
        "mnist",
        "--schemes",
        *SCHEMES,
    ]
    options = ["--seed", str(seed), "--epochs", str(epochs), "--workers", str(workers)]
    subprocess.run(
        [*command, *options, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    results = json.loads((folder / "results.json").read_text())["results"]
    return dict(zip(SCHEMES, results, strict=True))


def plot(accuracies: dict[str, list[list[float]]], *paths: Path) -> None:
    """Draw mean accuracy over epochs, one line per scheme, with the range over seeds shaded."""
    figure = drawing.blank(9, 5)
    axes = figure.subplots()
    for (text, runs), colour in zip(accuracies.items(), OF_LINES, strict=False):
        columns = [[100 * value for value in epoch] for epoch in zip(*runs, strict=True)]
        epochs = range(1, len(columns) + 1)
        axes.plot(epochs, [statistics.mean(c) for c in columns], color=colour, label=SCHEMES[text])
        lowest, highest = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    axes.set_xticks(range(1, len(columns) + 1))
    drawing.plain(axes, "MNIST test accuracy, %: mean and range over seeds", "epoch")
    axes.legend(frameon=False, loc="lower right", labelcolor=INK, fontsize=9)
    drawing.write(figure, *paths)


def redraw(folder: Path) -> None:
    """Draw the picture of results on file."""
    runs = json.loads((folder / "quantization.json").read_text())["runs"]
    accuracies = {text: [run[text]["test_accuracies"] for run in runs] for text in SCHEMES}
    plot(accuracies, folder / "quantization.png", folder / "quantization.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--redraw", action="store_true", help="only draw the results on file")
    options = parser.parse_args()
    if options.redraw:
        redraw(options.out)
        return
    runs = []
    for number, seed in enumerate(options.seeds, start=1):
        print(f"seed {seed} ({number} of {len(options.seeds)})", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(seed, options.epochs, options.workers, Path(folder)))
    accuracies = {text: [run[text]["test_accuracies"] for run in runs] for text in SCHEMES}
    head = "".join(f"  epoch {epoch + 1:<7}" for epoch in range(options.epochs))
    print(f"test accuracy in %, mean ± half the range over seeds {options.seeds}")
    print(f"{'scheme':<54}{head}  sent per step")
    for text, seeds in accuracies.items():
        columns = [[100 * value for value in epoch] for epoch in zip(*seeds, strict=True)]
        told = "".join(
            f"  {statistics.mean(c):5.2f} ± {(max(c) - min(c)) / 2:4.2f}" for c in columns
        )
        print(f"{text:<54}{told}  {runs[0][text]['bytes_per_step'] / 1000:9.1f} kB")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"schema": 1, "epochs": options.epochs, "seeds": options.seeds, "runs": runs}
    (options.out / "quantization.json").write_text(json.dumps(content, indent=1) + "\n")
    redraw(options.out)


if __name__ == "__main__":
    main()
