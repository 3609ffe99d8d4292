"""What a run tells about itself: records, one JSON object each, and where they go.

Rank 0 makes them: first one "run" record, then "step" and "epoch" records, at last one
"summary". The metrics file, the progress display and `--json` all show these same records.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from typing import Any

from .parse import version

SCHEMA = 1
Record = dict[str, Any]
Emit = Callable[[Record], None]


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    import torch

    return {
        "sparsewire": version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(record, separators=(",", ":"))
