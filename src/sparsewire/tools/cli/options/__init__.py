"""The commands and their options: one dataclass for each command, which `parse` fills in.

`--help` shows the docstring and the help of each field. Nothing here imports torch, so `--help`
answers at once.
"""

from __future__ import annotations

from .bench import BenchScale, BenchStep, BenchTrain
from .lab import Lab
from .schemes import Explain, List
from .training import Compare, Demo, Train, Training

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
COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "train": Train,
    "compare": Compare,
    "list": List,
    "explain": Explain,
    "lab": Lab,
    "bench step": BenchStep,
    "bench train": BenchTrain,
    "bench scale": BenchScale,
}
GROUPS = {"bench": "Measure what training costs on networks of any speed."}
"""Groups of commands; the names of their commands have two words."""
