"""Ctrl-C while the main thread waits inside a collective, where Python's handlers cannot run.

Python writes a byte to a file descriptor as soon as a signal arrives. A thread reads it and calls
the functions that were registered. If a descriptor had been set before, it still gets its bytes.
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
_ends: tuple[socket.socket, socket.socket, int] | None = None  # reader, writer, descriptor before


class Listener:
    """Calls `react` on Ctrl-C, from another thread, for as long as this object is referenced.

    It does so only while Python's own handler is in place, which would raise KeyboardInterrupt. A
    script that handles the signal itself, for example to finish the step and save, is left alone.
    """

    def __init__(self, react: Callable[[], None]) -> None:
        self.react = react
        _listeners.add(self)
        _install()


def _install() -> None:
    """Start listening, once. Only the main thread can; elsewhere Ctrl-C waits for the deadline."""
    global _ends
    if _ends is not None or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _ends = reader, writer, previous
    threading.Thread(target=_listen, args=_ends, name="sparsewire-signals", daemon=True).start()


def _leave_to_parent() -> None:
    """Stop reporting signals to the parent, in a forked child such as a data loader's worker."""
    global _ends
    if _ends is None:
        return
    reader, writer, previous = _ends
    signal.set_wakeup_fd(previous)
    reader.close()
    writer.close()
    _ends = None
    _listeners.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _listen(reader: socket.socket, writer: socket.socket, previous: int) -> None:
    while data := reader.recv(64):
        if previous >= 0:
            with contextlib.suppress(OSError):
                os.write(previous, data)
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in data and raises:
            for listener in list(_listeners):
                listener.react()
