"""A thread that was left inside C++ does not change how the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..patience import patience

SCRIPT = """
import contextlib, datetime, sys, time
import torch.distributed as dist
from sparsewire.groups.environment import Environment

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

slow = Slow()  # the call to the store returns while the interpreter finalises
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with contextlib.suppress(TimeoutError):
    Environment().within(0.1, lambda: store.wait(["never"], datetime.timedelta(seconds=1)))
print("left")
"""


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise ValueError('why')", 1, "ValueError: why")],
)
def test_a_thread_left_inside_the_store_keeps_the_exit_code(
    ending: str, code: int, message: str
) -> None:
    words = [sys.executable, "-c", SCRIPT + ending]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=patience(60))
    assert ended.returncode == code, ended.stderr[-3000:]
    assert message in ended.stderr
    assert ended.stdout == "left\n"  # buffered output is not lost
