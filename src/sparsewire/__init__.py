"""sparsewire: sparse gradient exchange for PyTorch.

import sparsewire as sw

model = DDP(net)
wire = sw.attach(model, sw.TopK(0.01))     # the rest of the training loop is unchanged
"""

from .adapters.ddp import Wire, attach
from .adapters.functional import State, exchange, init, simulate
from .adapters.optimizer import DistributedOptimizer
from .collectives import AllGather, AllReduce
from .errors import (
    AttachError,
    DisagreementError,
    ExchangeError,
    NonFiniteError,
    SchemeError,
    SparsewireError,
    StateError,
)
from .explain import Explanation, explain
from .groups import Alone
from .groups.distributed import DistributedGroup
from .groups.simulated import SimulatedGroup
from .indices import Implied, Int32
from .memory import ErrorFeedback, MomentumCorrection, NoMemory
from .report import Report
from .scheme import FAMILIES, Scheme, Warmup, parse
from .segments import Segments
from .selectors import BlockRandomK, Dense, RandomK, Threshold, TopK
from .values import BFloat16, Float16, Float32

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "AllGather",
    "AllReduce",
    "Alone",
    "AttachError",
    "BFloat16",
    "BlockRandomK",
    "Dense",
    "DisagreementError",
    "DistributedGroup",
    "DistributedOptimizer",
    "ErrorFeedback",
    "ExchangeError",
    "Explanation",
    "Float16",
    "Float32",
    "Implied",
    "Int32",
    "MomentumCorrection",
    "NoMemory",
    "NonFiniteError",
    "RandomK",
    "Report",
    "Scheme",
    "SchemeError",
    "Segments",
    "SimulatedGroup",
    "SparsewireError",
    "State",
    "StateError",
    "Threshold",
    "TopK",
    "Warmup",
    "Wire",
    "attach",
    "exchange",
    "explain",
    "init",
    "parse",
    "simulate",
]
