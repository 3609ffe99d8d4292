"""Play many faults, and print what was promised and what held.

python -m tests.chaos --faults 200 --seed 1 [--out FOLDER]
python -m tests.chaos --seed 1 --only 17       # one trial alone
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..patience import stretch
from . import report
from .crew import Crew, References, Result
from .trials import draw


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of single trials")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--keep", action="store_true", help="leave what the ranks wrote")
    parser.add_argument("--more", action="store_true", help="go on with the results in --out")
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


def _play_all(
    numbers: Sequence[int], seed: int, jobs: int, keep: bool, tell: Callable[[Result], None]
) -> None:
    """Play trials, so many at the same time, and tell of each when it is over."""
    folder = Path(tempfile.mkdtemp(prefix="sparsewire-chaos-"))
    mine, crews, references = threading.local(), list[Crew](), References()

    def play(number: int) -> Result:
        if not hasattr(mine, "crew"):
            mine.crew = Crew(folder, keep, references)
            crews.append(mine.crew)
        return mine.crew.play(draw(seed, number, stretch()))

    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for each in as_completed([pool.submit(play, number) for number in numbers]):
                    tell(each.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                for crew in crews:
                    crew.close()
    finally:
        if keep:
            print(f"what the ranks wrote is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Play, and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by cleaning up
    options = _arguments()
    results = report.read(options.out) if options.out and options.more else []
    done = {each.trial.number for each in results if each.trial.seed == options.seed}
    numbers = [each for each in options.only or range(options.faults) if each not in done]

    def tell(result: Result) -> None:
        print(_line(result), flush=True)
        results.append(result)
        results.sort(key=lambda each: (each.trial.seed, each.trial.number))
        if options.out is not None:
            report.write(results, options.out)

    _play_all(numbers, options.seed, options.jobs, options.keep, tell)
    print(report.markdown(report.summary(results)))
    return 0 if all(each.held or each.skipped for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
