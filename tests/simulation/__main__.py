"""Play schedules from a shell.

python -m tests.simulation machines 17          plays one, and tells its story
python -m tests.simulation --seeds 1000 20000   plays these seeds of all scenarios
"""

from __future__ import annotations

import argparse
import sys
import time

from .scenarios import SCENARIOS, play
from .schedule import KINDS, many
from .world import Violation


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("name", nargs="?", choices=SCENARIOS, help="the scenario")
    parser.add_argument("seed", nargs="?", type=int, help="of one schedule")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FROM", "TO"), default=(0, 1000))
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(KINDS)), default=KINDS)
    options = parser.parse_args()
    with many():
        _play(options)


def _play(options: argparse.Namespace) -> None:
    if options.seed is not None:
        print(play(options.name, options.seed, options.kinds).story)
        return
    names = [options.name] if options.name else list(SCENARIOS)
    failures, count, began = 0, 0, time.process_time()
    for seed in range(*options.seeds):
        for name in names:
            count += 1
            try:
                play(name, seed, options.kinds)
            except Violation as violation:
                failures += 1
                print(violation, end="\n\n", flush=True)
    seconds = time.process_time() - began
    print(
        f"{count:,} schedules, {failures} violations, {1000 * seconds / count:.1f} ms of CPU each"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
