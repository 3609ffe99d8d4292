"""sparsewire: sparse gradient exchange for PyTorch.

    import sparsewire as sw

    model = DDP(net)
    wire = sw.attach(model, sw.TopK(0.01))     # the rest of the training loop is unchanged

The top level has `attach`, `explain`, `parse` and every part of a scheme. Everything else is in
modules: `sw.functional` (the exchange as a function), `sw.groups`, `sw.errors` and others. Names
are imported when they are first used, so that the command line answers `--help` without torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not run the code below
    from . import codecs as codecs
    from . import errors as errors
    from . import explanation as explanation
    from . import functional as functional
    from . import groups as groups
    from . import report as report
    from . import scheme as scheme
    from . import segments as segments
    from .adapters.attach import attach as attach
    from .adapters.ddp import SparseHookState as SparseHookState
    from .adapters.hook import sparse_hook as sparse_hook
    from .adapters.optimizer import SparseUpdates as SparseUpdates
    from .codecs import QSGD as QSGD
    from .codecs import BFloat16 as BFloat16
    from .codecs import Bitmap as Bitmap
    from .codecs import EliasFano as EliasFano
    from .codecs import Float16 as Float16
    from .codecs import Float32 as Float32
    from .codecs import Implied as Implied
    from .codecs import Int32 as Int32
    from .codecs import KBit as KBit
    from .codecs import LloydMax as LloydMax
    from .codecs import OneBit as OneBit
    from .codecs import TwoBit as TwoBit
    from .collectives import AllGather as AllGather
    from .collectives import AllReduce as AllReduce
    from .collectives import Sharded as Sharded
    from .errors import SparsewireError as SparsewireError
    from .explanation import explain as explain
    from .memory import ErrorFeedback as ErrorFeedback
    from .memory import MomentumCorrection as MomentumCorrection
    from .memory import NoMemory as NoMemory
    from .scheme import Scheme as Scheme
    from .scheme import Warmup as Warmup
    from .scheme import parse as parse
    from .selectors import BlockRandomK as BlockRandomK
    from .selectors import Dense as Dense
    from .selectors import LeaderTopK as LeaderTopK
    from .selectors import RandomK as RandomK
    from .selectors import Threshold as Threshold
    from .selectors import TopBlock as TopBlock
    from .selectors import TopK as TopK
    from .selectors import UnionTopK as UnionTopK

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
    "SparseHookState": "adapters.ddp",
    "SparseUpdates": "adapters.optimizer",
    "SparsewireError": "errors",
    "attach": "adapters.attach",
    "explain": "explanation",
    "parse": "scheme",
    "sparse_hook": "adapters.hook",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    elif name == "__all__":
        value = sorted([*_HOMES, *_parts()])
    elif name.startswith("_") or find_spec(f"{__name__}.{name}"):  # a module that is not public
        raise AttributeError(f"sparsewire has no {name!r}")
    elif name not in _parts():
        raise AttributeError(f"sparsewire has no {name!r}{_hint(name)}")
    else:
        value = _parts()[name]
    globals()[name] = value
    return value


def _parts() -> dict[str, Any]:
    """Return all parts of a scheme by name."""
    families = import_module(".scheme", __name__).FAMILIES
    return {kind.__name__: kind for family in families.values() for kind in family}


def _hint(name: str) -> str:
    """Return where else a name is, or the name that was meant."""
    for module in _MODULES:
        if hasattr(import_module(f".{module}", __name__), name):
            return f": it is sparsewire.{module}.{name}"
    nearest = import_module(".notation", __name__).nearest
    return f"; {nearest(name, [*_HOMES, *_parts()])}"


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*_HOMES, *_parts(), *_MODULES, *own, "__all__"})
