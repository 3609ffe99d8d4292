"""The commands and their flags, as dataclasses that tyro turns into a command line.

Nothing here imports torch, so that `--help` answers at once. What the flags mean together
is checked in `plan.py`. Where leaving a flag out means something, a hint replaces tyro's
"(default: None)".
"""

from __future__ import annotations

from .bench import BENCH_SCALE, BENCH_STEP, BENCH_TRAIN, BenchScale, BenchStep, BenchTrain
from .lab import LAB, Lab
from .schemes import EXPLAIN, LIST, Explain, List
from .training import COMPARE, DEMO, TRAIN, Compare, Demo, Train, Training

__all__ = [
    "COMMANDS",
    "GROUPS",
    "BenchScale",
    "BenchStep",
    "BenchTrain",
    "Command",
    "Compare",
    "Demo",
    "Explain",
    "Lab",
    "List",
    "Train",
    "Training",
]

Command = Demo | Train | Compare | List | Explain | Lab | BenchStep | BenchTrain | BenchScale
COMMANDS: dict[str, tuple[type[Command], str]] = {
    "demo": (Demo, DEMO),
    "train": (Train, TRAIN),
    "compare": (Compare, COMPARE),
    "list": (List, LIST),
    "explain": (Explain, EXPLAIN),
    "lab": (Lab, LAB),
    "bench step": (BenchStep, BENCH_STEP),
    "bench train": (BenchTrain, BENCH_TRAIN),
    "bench scale": (BenchScale, BENCH_SCALE),
}
GROUPS = {"bench": "Measure what training costs, on networks as slow as you like."}
"""Commands that only say which others there are; those have two words."""
