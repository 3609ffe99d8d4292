"""Play many faults, and print what was promised and what held.

python -m tests.chaos --faults 200 --seed 1 [--out FOLDER]
python -m tests.chaos --seed 1 --only 17       # one trial alone
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ..patience import stretch
from . import report
from .crew import Crew, Result
from .trials import Trial, draw


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of single trials")
    parser.add_argument("--keep", action="store_true", help="leave what the ranks wrote")
    parser.add_argument("--out", type=Path, help="where chaos.json and chaos.md go")
    return parser.parse_args()


def _line(result: Result) -> str:
    trial = result.trial
    what = f"{trial.number:4}  {trial.fault}, {trial.form}, {trial.world} ranks"
    if result.skipped:
        return f"{what}: not played, {result.skipped}"
    times = "" if result.ended is None else f", all ended after {result.ended:.1f} s"
    verdict = "held" if result.held else f"BROKEN, replay: {result.replay}"
    broken = "".join(f"\n        {each}" for each in result.broken)
    return (
        f"{what}: {verdict}{times} (trial {result.seconds:.1f} s, load {result.load:.1f}){broken}"
    )


def main() -> int:
    """Play, and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by cleaning up
    options = _arguments()
    numbers = options.only or range(options.faults)
    results = []
    with Crew(options.keep) as crew:
        for number in numbers:
            trial: Trial = draw(options.seed, number, stretch())
            results.append(crew.play(trial))
            print(_line(results[-1]), flush=True)
    print(report.markdown(report.summary(results)))
    if options.out is not None:
        report.write(results, options.out)
    return 0 if all(each.held or each.skipped for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
