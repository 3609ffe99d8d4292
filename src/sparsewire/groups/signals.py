"""Ctrl-C while the main thread waits inside a collective, where Python's handlers cannot run.

Python writes a byte to a file descriptor the moment a signal arrives; a thread reads it and tells
whoever is waiting. The descriptor that was set before, if any, still gets its bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable

_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_installed = False


class Listener:
    """Calls `react` on Ctrl-C, from another thread, as long as it is referenced.

    Only while Python's own handler is in place, which would raise KeyboardInterrupt: a script that
    handles the signal itself (to finish the step and save, say) is left in peace.
    """

    def __init__(self, react: Callable[[], None]) -> None:
        self.react = react
        _listeners.add(self)
        _install()


def _install() -> None:
    """Start listening, once. Only the main thread may: elsewhere Ctrl-C waits for the deadline."""
    global _installed
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    _installed = True
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(
        target=_listen, args=(reader, writer, previous), name="sparsewire-signals", daemon=True
    ).start()


def _listen(reader: socket.socket, writer: socket.socket, previous: int) -> None:
    while data := reader.recv(64):
        if previous >= 0:
            with contextlib.suppress(OSError):
                os.write(previous, data)
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in data and raises:
            for listener in list(_listeners):
                listener.react()
