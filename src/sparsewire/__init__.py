"""sparsewire: sparse gradient exchange for PyTorch.

    import sparsewire as sw

    model = DDP(net)
    wire = sw.attach(model, sw.TopK(0.01))     # the rest of the training loop is unchanged

What else there is lives in modules: `sw.functional` (exchange as a function), `sw.groups`,
`sw.codecs`, `sw.errors` and so on. Names and modules are loaded when they are first used, so that
the command line answers `--help` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import codecs as codecs
    from . import errors as errors
    from . import explanation as explanation
    from . import functional as functional
    from . import groups as groups
    from . import report as report
    from . import scheme as scheme
    from . import segments as segments
    from .adapters.ddp import SparseHookState, attach
    from .adapters.hook import sparse_hook
    from .adapters.optimizer import DistributedOptimizer
    from .codecs import QSGD, BFloat16, Float16, Float32, KBit, OneBit, TwoBit
    from .collectives import AllGather, AllReduce, Sharded
    from .errors import SparsewireError
    from .explanation import explain
    from .memory import ErrorFeedback, MomentumCorrection, NoMemory
    from .scheme import Scheme, Warmup, parse
    from .selectors import (
        BlockRandomK,
        Dense,
        LeaderTopK,
        RandomK,
        Threshold,
        TopBlock,
        TopK,
        UnionTopK,
    )

__version__ = "0.1.0"

_MODULES = (
    "codecs",
    "errors",
    "explanation",
    "functional",
    "groups",
    "report",
    "scheme",
    "segments",
)
_HOMES = {
    "adapters.ddp": ("SparseHookState", "attach"),
    "adapters.hook": ("sparse_hook",),
    "adapters.optimizer": ("DistributedOptimizer",),
    "collectives": ("AllGather", "AllReduce", "Sharded"),
    "errors": ("SparsewireError",),
    "explanation": ("explain",),
    "memory": ("ErrorFeedback", "MomentumCorrection", "NoMemory"),
    "scheme": ("Scheme", "Warmup", "parse"),
    "selectors": (
        "BlockRandomK",
        "Dense",
        "LeaderTopK",
        "RandomK",
        "Threshold",
        "TopBlock",
        "TopK",
        "UnionTopK",
    ),
    "codecs": ("QSGD", "BFloat16", "Float16", "Float32", "KBit", "OneBit", "TwoBit"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "QSGD",
    "AllGather",
    "AllReduce",
    "BFloat16",
    "BlockRandomK",
    "Dense",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Float16",
    "Float32",
    "KBit",
    "LeaderTopK",
    "MomentumCorrection",
    "NoMemory",
    "OneBit",
    "RandomK",
    "Scheme",
    "Sharded",
    "SparseHookState",
    "SparsewireError",
    "Threshold",
    "TopBlock",
    "TopK",
    "TwoBit",
    "UnionTopK",
    "Warmup",
    "attach",
    "explain",
    "parse",
    "sparse_hook",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"sparsewire has no {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
