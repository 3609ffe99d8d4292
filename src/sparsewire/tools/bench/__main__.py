"""Draw the reports and pictures of results on file anew: `python -m sparsewire.tools.bench DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from .kinds import draw
from .results import Results

for folder in map(Path, sys.argv[1:]):
    draw(Results.read(folder / "results.json"), folder)
