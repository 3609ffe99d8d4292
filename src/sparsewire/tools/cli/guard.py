"""Runs a program's command; what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from .errors import FAILED, USAGE, CommandError, explain_os_error

_EXTRA = ("jinja2", "matplotlib", "rich", "scipy")
_INTERRUPTED = 130


def run_guarded(work: Callable[[], int], words: Sequence[str]) -> int:
    """Run `work` as a program's whole command; say in one sentence what goes wrong.

    Args:
        work: returns the exit code.
        words: the command line; `--debug` in it shows tracebacks.

    Returns:
        The exit code: what `work` returns, 1 or an error's own code if it failed, 130 after Ctrl-C.
    """
    if "torch" not in sys.modules and "--debug" not in words:
        # It warns about hosts without a name, as those of a lab are; read when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    try:
        return _explained(work)
    except CommandError as error:
        return _fail(error, error.code, words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sentence = (
            f"the command line needs {missing}, which is not installed: "
            "run pip install '.[cli]' in a clone of sparsewire"
        )
        return _fail(CommandError(sentence), FAILED, words)
    except KeyboardInterrupt as error:
        return _fail(CommandError("stopped"), _INTERRUPTED, words, error)
    except BrokenPipeError:
        # The reader of a pipe had enough; a second complaint at exit helps nobody.
        sys.stdout = None
        return FAILED


def _explained(work: Callable[[], int]) -> int:
    """Do `work`, with the errors of the library as those of the command line."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise explain_os_error(error, "use") from error
    except RuntimeError as error:
        from sparsewire.errors import SchemeError, SparsewireError

        if not isinstance(error, SparsewireError):
            raise
        code = USAGE if isinstance(error, SchemeError) else FAILED
        raise CommandError(str(error), code) from error


def _fail(
    error: CommandError, code: int, words: Sequence[str], cause: BaseException | None = None
) -> int:
    if "--debug" in words:
        traceback.print_exception(cause or error)
    print(f"sparsewire: {error}", file=sys.stderr)
    return code
