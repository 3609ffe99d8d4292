"""sparsewire: sparse gradient exchange for PyTorch.

    import sparsewire as sw

    model = DDP(net)
    wire = sw.attach(model, sw.TopK(0.01))     # the rest of the training loop is unchanged

Names are loaded when they are first used, so that the command line answers `--help` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.ddp import Wire, attach
    from .adapters.functional import State, exchange, init, simulate
    from .adapters.optimizer import DistributedOptimizer
    from .collectives import AllGather, AllReduce, Sharded
    from .errors import (
        AttachError,
        DamageError,
        DisagreementError,
        ExchangeError,
        NonFiniteError,
        SchemeError,
        SparsewireError,
        StateError,
    )
    from .explanation import Explanation, explain
    from .groups import Alone
    from .groups.distributed import DistributedGroup
    from .groups.simulated import SimulatedGroup
    from .indices import Bitmap, EliasFano, Implied, Int32
    from .memory import ErrorFeedback, MomentumCorrection, NoMemory
    from .report import Report
    from .scheme import FAMILIES, Scheme, Warmup, parse
    from .segments import Segments
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
    from .values import QSGD, BFloat16, Float16, Float32, KBit, OneBit, TwoBit

__version__ = "0.1.0"

_HOMES = {
    "adapters.ddp": ("Wire", "attach"),
    "adapters.functional": ("State", "exchange", "init", "simulate"),
    "adapters.optimizer": ("DistributedOptimizer",),
    "collectives": ("AllGather", "AllReduce", "Sharded"),
    "errors": (
        "AttachError",
        "DamageError",
        "DisagreementError",
        "ExchangeError",
        "NonFiniteError",
        "SchemeError",
        "SparsewireError",
        "StateError",
    ),
    "explanation": ("Explanation", "explain"),
    "groups": ("Alone",),
    "groups.distributed": ("DistributedGroup",),
    "groups.simulated": ("SimulatedGroup",),
    "indices": ("Bitmap", "EliasFano", "Implied", "Int32"),
    "memory": ("ErrorFeedback", "MomentumCorrection", "NoMemory"),
    "report": ("Report",),
    "scheme": ("FAMILIES", "Scheme", "Warmup", "parse"),
    "segments": ("Segments",),
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
    "values": ("QSGD", "BFloat16", "Float16", "Float32", "KBit", "OneBit", "TwoBit"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "FAMILIES",
    "QSGD",
    "AllGather",
    "AllReduce",
    "Alone",
    "AttachError",
    "BFloat16",
    "Bitmap",
    "BlockRandomK",
    "DamageError",
    "Dense",
    "DisagreementError",
    "DistributedGroup",
    "DistributedOptimizer",
    "EliasFano",
    "ErrorFeedback",
    "ExchangeError",
    "Explanation",
    "Float16",
    "Float32",
    "Implied",
    "Int32",
    "KBit",
    "LeaderTopK",
    "MomentumCorrection",
    "NoMemory",
    "NonFiniteError",
    "OneBit",
    "RandomK",
    "Report",
    "Scheme",
    "SchemeError",
    "Segments",
    "Sharded",
    "SimulatedGroup",
    "SparsewireError",
    "State",
    "StateError",
    "Threshold",
    "TopBlock",
    "TopK",
    "TwoBit",
    "UnionTopK",
    "Warmup",
    "Wire",
    "attach",
    "exchange",
    "explain",
    "init",
    "parse",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"sparsewire has no {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
