"""How a user's script ends when a rank is lost during an exchange: by itself, and in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..patience import patience

SCRIPT = Path(__file__).with_name("survivor.py")
RANKS = 4


@contextmanager
def _waiting_ranks(
    intra_node: int, victim: int, timeout: float
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that wait in an exchange for the victim. Rank 0 hosts the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(SCRIPT), *map(str, (intra_node, victim, 5, timeout))]
    ranks = []
    for rank in range(RANKS):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(
                words,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in ranks:
            assert process.stdout is not None
            assert "is process" in process.stdout.readline()
        time.sleep(0.5)  # until they are in the exchange
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def _check_end(rank: int, process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=patience(60))
    assert process.returncode == (3 if rank % 2 else 1), errors[-3000:]  # never a signal
    assert "ExchangeError: the exchange of step 5, bucket 0 failed on rank" in errors
    assert f"of {RANKS}; " in errors  # a machine may raise what its leader has found


@pytest.mark.slow  # each starts four processes, which cannot be used again
@pytest.mark.parametrize(
    ("intra_node", "victim"),
    # The worst case is the last: the leader of the other machine hears of rank 1 by a report while
    # it waits for its own leader, who ends while it does. `make chaos` kills many more.
    [(0, 0), (2, 2), (2, 1)],
)
def test_survivors_of_a_killed_rank_end_in_order(intra_node: int, victim: int) -> None:
    with _waiting_ranks(intra_node, victim, patience(40)) as ranks:
        ranks[victim].kill()
        for rank, process in enumerate(ranks):
            if rank != victim:
                _check_end(rank, process)


@pytest.mark.slow  # as above
def test_survivors_of_a_frozen_store_end_in_order() -> None:
    with _waiting_ranks(2, 1, patience(3)) as ranks:
        ranks[0].send_signal(signal.SIGSTOP)
        ranks[1].kill()
        for rank in (2, 3):
            _check_end(rank, ranks[rank])


@pytest.mark.slow  # as above
def test_survivors_of_a_store_that_dies_while_they_end_keep_their_exit_codes() -> None:
    """Threads that were left in calls to the store come back while the interpreter finalises."""
    with _waiting_ranks(2, 1, patience(3)) as ranks:
        ranks[0].send_signal(signal.SIGSTOP)
        ranks[1].kill()
        for rank in (2, 3):
            output = ranks[rank].stdout
            assert output is not None
            assert "the interpreter ends" in output.readline()
        ranks[0].kill()
        for rank in (2, 3):
            _check_end(rank, ranks[rank])


@pytest.mark.slow  # as above
def test_ranks_that_wait_for_a_slow_one_end_in_order() -> None:
    with _waiting_ranks(0, 2, patience(3)) as ranks:
        for rank in (0, 1, 3):
            _check_end(rank, ranks[rank])


@pytest.mark.slow  # as above
def test_ranks_that_are_all_interrupted_end_in_order() -> None:
    with _waiting_ranks(0, 2, patience(40)) as ranks:
        survivors = [ranks[rank] for rank in (0, 1, 3)]
        for process in survivors:
            process.send_signal(signal.SIGINT)
        for process in survivors:
            _, errors = process.communicate(timeout=patience(60))
            assert process.returncode in (1, 3, -signal.SIGINT), errors[-3000:]
            assert "KeyboardInterrupt" in errors or "ExchangeError" in errors
