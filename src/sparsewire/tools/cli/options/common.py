"""What several commands share."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import arg

PLACES = "(default: $SPARSEWIRE_DATA/mnist or ./data/mnist)"
RACE_PLACES = f"{PLACES[:-1]}; Python's standard library)"
MODELS = "{mnist,resnet18,transformer,MODULE:FUNCTION}"
SchemeText = Annotated[str, arg(metavar="SCHEME")]
