"""A user's own script, started as users start it, and its end when a rank dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..patience import patience

SCRIPT = Path(__file__).with_name("user_script.py")


def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(SCRIPT), "10", str(patience(20))]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = re.findall(r"done (-?[\d.]+?\d{12})", done.stdout)  # lines may run into each other
    assert len(results) == 2
    assert len(set(results)) == 1


def _start(rank: int, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "100000", str(patience(20)), "0.01"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def _three_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Three processes that are in the middle of training."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start(rank, port) for rank in range(3)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert "trains as process" in process.stdout.readline()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("victim", [1, 0])
def test_survivors_of_a_dead_rank_exit_by_themselves(victim: int) -> None:
    with _three_ranks() as ranks:
        ranks[victim].kill()
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=patience(40))
            if rank != victim:
                assert process.returncode == 1, errors[-2000:]  # an exception, not an abort
                assert "ExchangeError" in errors


def test_ctrl_c_ends_a_script() -> None:
    with _three_ranks() as ranks:
        for process in ranks:
            process.send_signal(signal.SIGINT)
        for process in ranks:
            _, errors = process.communicate(timeout=patience(40))
            assert "KeyboardInterrupt" in errors or "ExchangeError" in errors
            assert process.returncode in (1, -signal.SIGINT), errors[-2000:]
