"""Who is still there? After a failed collective, ranks find out by answering in the store.

A backend's error gives an address at best and reaches only some ranks at once. So the first rank
that sees an error leaves a note; the others read it within a second, write that they are alive,
and all of them name the ranks that did not.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

PATIENCE = 3.0  # seconds to wait for answers: ranks look for a note twice a second
LIMIT = PATIENCE + 1.0  # seconds to wait for the store, which may be frozen or cut off


class Liveness:
    """One group's corner of the store that all its ranks can reach.

    Calls to the store have no time-out of their own: if its host is frozen or cut off, they block
    without end. Only `inquire` is safe to call from a thread that others wait for.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    @staticmethod
    def of(group: dist.ProcessGroup, rank: int, size: int) -> Liveness:
        """The roll call of a process group, over a connection of its own."""
        store = dist.distributed_c10d._get_process_group_store(group)
        clone = getattr(store, "clone", None)
        if clone is not None:
            store = clone()
        return Liveness(PrefixStore("sparsewire/roll", store), rank, size)

    def alarm(self, cause: str) -> None:
        """Tell the others that a collective failed here."""
        with contextlib.suppress(RuntimeError):  # if the store is gone, `_findings` says so
            if not self._store.check(["alarm"]):
                self._store.set("alarm", f"rank {self._rank}: {cause}"[:500])

    def alarmed(self) -> str | None:
        """What another rank reported, if any did."""
        if not self._store.check(["alarm"]):
            return None
        note = bytes(self._store.get("alarm")).decode(errors="replace")
        return None if note.startswith(f"rank {self._rank}:") else note

    def answer(self) -> None:
        """Tell the ranks that look for this one that it is there."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"here/{self._rank}", "1")

    def absent(self) -> list[int] | None:
        """Answer, wait for the others' answers, and return who gave none; None: no store."""
        try:
            self._store.set(f"here/{self._rank}", "1")
            missing = [rank for rank in range(self._size) if rank != self._rank]
            end = time.monotonic() + PATIENCE
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not self._store.check([f"here/{r}"])]
                time.sleep(0.05)
            return missing
        except RuntimeError:
            return None

    def inquire(self, cause: str) -> str:
        """Tell the other ranks what failed here, and say in words which of them are missing.

        Returns within `LIMIT` seconds, even if the store does not answer.
        """
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()

        def ask() -> None:
            self.alarm(cause)
            answer.put(self._findings())

        # a thread that can be left behind, because it may never come back
        threading.Thread(target=ask, name="sparsewire-inquiry", daemon=True).start()
        try:
            return answer.get(timeout=LIMIT)
        except queue.Empty:
            return (
                "the store does not answer: the process that hosts it (often rank 0) is frozen or "
                "cut off"
            )

    def _findings(self) -> str:
        """Who is missing, in words."""
        missing = self.absent()
        if missing is None:
            return "the store is out of reach: the process that hosts it (often rank 0) is gone"
        if not missing:
            return "all ranks still answer"
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"{who} of {self._size} did not answer: dead, stopped or out of reach"
