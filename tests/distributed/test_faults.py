"""What can go wrong between ranks: every wait ends, and the error names who and where."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.digest import seal

from ..cluster import Cluster
from ..patience import patience, telling, wait_for
from .training import CAP, loss_of, make_model, sgd

Fresh = Callable[..., Cluster]


def _train_until_it_breaks(timeout: float, ready: Path) -> tuple[str, str, float, str]:
    """Train; returns the error, its real kind, how long the failing step took, the next error."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model)
    wire = sw.attach(model, "TopK(0.05)", timeout=timeout)
    for step in range(100_000):
        if step == 5:  # past the step in which DDP rebuilds its buckets
            (ready / str(dist.get_rank())).touch()
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        start = time.monotonic()
        try:
            loss.backward()
        except RuntimeError as error:
            took = time.monotonic() - start
            again = ""
            try:
                loss_of(model, dist.get_rank(), step).backward()
            except RuntimeError as second:
                again = str(second)
            return str(error), type(wire.error).__name__, took, again
        optimizer.step()
    return "nothing broke", "", 0.0, ""


def _wait_until_all_train(cluster: Cluster, ready: Path) -> None:
    wait_for(lambda: len(list(ready.iterdir())) == cluster.size)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_others(fresh: Fresh, victim: int, tmp_path: Path) -> None:
    cluster, deadline = fresh(4), patience(30)
    cluster.start(_train_until_it_breaks, deadline, tmp_path)
    _wait_until_all_train(cluster, tmp_path)
    cluster.kill(victim)
    killed = time.monotonic()
    outcomes = cluster.collect()
    assert time.monotonic() - killed < deadline
    for rank, (fine, value) in enumerate(outcomes):
        if rank == victim:
            assert value == "died"
            continue
        assert fine, value
        message, kind, _, again = value
        assert f"rank {victim} of 4 did not answer" in message
        assert "the exchange of step" in message
        assert "bucket" in message
        assert f"on rank {rank} of 4" in message
        assert kind == "ExchangeError"
        assert "ExchangeError" in again  # a broken group says so again, at once


def test_a_stopped_rank_is_named_after_the_deadline(fresh: Fresh, tmp_path: Path) -> None:
    cluster, deadline = fresh(2), patience(3)
    cluster.start(_train_until_it_breaks, deadline, tmp_path)
    _wait_until_all_train(cluster, tmp_path)
    cluster.kill(1, signal.SIGSTOP)
    fine, value = cluster.collect_one(0)
    cluster.kill(1, signal.SIGKILL)
    assert fine, value
    message, kind, took, _ = value
    assert "rank 1 of 2 did not answer" in message
    assert kind == "ExchangeError"
    assert took < deadline + patience(5 + 4)  # grace, roll call


@pytest.mark.parametrize("host", ["agent", "rank 0"])
def test_a_frozen_store_hangs_nobody(fresh: Fresh, host: str, tmp_path: Path) -> None:
    """The deadline holds where no call to the store comes back."""
    cluster, deadline = fresh(3, host), patience(3)
    cluster.start(_train_until_it_breaks, deadline, tmp_path)
    _wait_until_all_train(cluster, tmp_path)
    if host == "agent":
        os.kill(cluster.agent.pid, signal.SIGSTOP)
        time.sleep(1.5)  # the ranks look for reports, and these calls block
        cluster.kill(0)
    else:
        cluster.kill(0, signal.SIGSTOP)
    for rank in (1, 2):
        fine, value = cluster.collect_one(rank)
        assert fine, value
        message, kind, took, again = value
        assert "the store does not answer" in message
        assert f"on rank {rank} of 3" in message
        assert kind == "ExchangeError"
        assert took < deadline + patience(5 + 4)  # grace, inquiry
        assert "ExchangeError" in again


def _slow_rank(timeout: float) -> str:
    """Rank 1 does something long by itself after step 2, and the others wait for it in step 3."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)", timeout=timeout)
    for step in range(4):
        loss = loss_of(model, dist.get_rank(), step)
        if step == 3 and dist.get_rank() == 1:
            wait_for(lambda: wire.error is not None)
            return str(wire.error)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
    return "nothing broke"


def test_a_slow_rank_is_named_by_all(fresh: Fresh) -> None:
    messages = fresh(3).run(_slow_rank, patience(3))
    for rank, message in enumerate(messages):
        assert f"on rank {rank} of 3" in message
        assert re.search(
            r"all ranks still answer, but rank 1 of 3 is behind: it finished the exchange of step "
            r"2, bucket \d+ \d+ s ago and has begun nothing since",
            message,
        )
        assert "if a rank is slow rather than lost, give it more than timeout=" in message


def _other_choice(others: dict[str, Any], odd: dict[str, Any]) -> str:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    try:
        sw.attach(model, **(odd if dist.get_rank() == 2 else others))
    except sw.errors.DisagreementError as error:
        return str(error)
    return "attached"


def _optimizer_on_one_rank() -> str:
    """A skip would then move nothing on that rank, and momentum on the others."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    optimizer = sgd(model) if dist.get_rank() == 1 else None
    try:
        sw.attach(model, "TopK(0.05)", on_nonfinite="skip", optimizer=optimizer)
    except sw.errors.DisagreementError as error:
        return str(error)
    return "attached"


def test_an_optimizer_on_one_rank_alone_is_found_out(four: Cluster) -> None:
    for message in four.run(_optimizer_on_one_rank):
        assert "rank 1 of 4 disagrees with the others on the scheme, or on attach's" in message


@pytest.mark.parametrize("odd", [{"scheme": "TopK(0.06)"}, {"on_nonfinite": "skip"}], ids=str)
def test_another_choice_is_found_out_at_attach(four: Cluster, odd: dict[str, Any]) -> None:
    others = {"scheme": "TopK(0.05)"}
    for rank, message in enumerate(four.run(_other_choice, others, {**others, **odd})):
        assert "rank 2 of 4 disagrees with the others on the scheme" in message
        assert f"this is rank {rank}" in message


class Renamed(nn.Module):
    """The same shapes under another name."""

    def __init__(self) -> None:
        super().__init__()
        name = "head" if dist.get_rank() == 1 else "tail"
        self.add_module(name, nn.Linear(64, 64))


def _other_names() -> str:
    try:
        sw.attach(DDP(Renamed()), "TopK(0.05)")
    except sw.errors.DisagreementError as error:
        return str(error)
    return "attached"


def test_another_model_is_found_out_at_attach(four: Cluster) -> None:
    for message in four.run(_other_names):
        assert "rank 1 of 4 disagrees with the others on the parameters' names" in message


def _out_of_step() -> tuple[str, str, int]:
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    loss_of(model, dist.get_rank(), 0).backward()
    if dist.get_rank() == 1:
        wire.load_state_dict(seal({**wire.state_dict(), "step": 7}))
    message = ""
    try:
        loss_of(model, dist.get_rank(), 1).backward()
    except RuntimeError as error:
        message = str(error)
    steps = wire.steps
    wire.detach()
    return message, type(wire.error).__name__, steps


def test_a_rank_out_of_step_is_found_out(four: Cluster) -> None:
    for rank, (message, kind, steps) in enumerate(four.run(_out_of_step)):
        assert "rank 1 of 4 disagrees with the others on the step (7 instead of 1)" in message
        assert kind == "DisagreementError"
        assert steps == (7 if rank == 1 else 1)


def _one_rank_breaks(deadline: float) -> tuple[str, float]:
    """Rank 3 runs into an error of its own while it selects."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)", timeout=deadline)
    loss_of(model, dist.get_rank(), 0).backward()
    if dist.get_rank() == 3:

        def broken(*_: object) -> Any:
            raise MemoryError("no room left")

        wire._session.store.open = broken  # type: ignore[method-assign]
    start = time.monotonic()
    message = ""
    try:
        loss_of(model, dist.get_rank(), 1).backward()
    except RuntimeError as error:
        message = str(error)
    return message, time.monotonic() - start


def test_an_error_on_one_rank_reaches_all(fresh: Fresh) -> None:
    deadline = patience(30)
    for message, took in fresh(4).run(_one_rank_breaks, deadline):
        assert "no room left" in message
        assert "all ranks still answer" in message
        assert took < deadline / 2


def _wait_for_ever(deadline: float, over: Path) -> tuple[str, float]:
    """Rank 0 waits for rank 1, which never comes; then rank 0 is interrupted."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)", timeout=deadline)
    for step in range(2):  # DDP's own collectives, for rebuilding its buckets, are over then
        loss_of(model, dist.get_rank(), step).backward()
    if dist.get_rank() == 1:
        wait_for(over.exists)
        return "", 0.0
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    # PyTorch 2.6 raises the failed exchange first, and Python the interrupt at the next call.
    first = (RuntimeError,) if torch.__version__.startswith("2.6.") else ()
    with telling(over), pytest.raises(KeyboardInterrupt), contextlib.suppress(*first):
        loss_of(model, dist.get_rank(), 2).backward()
    return str(wire.error), time.monotonic() - start


def test_ctrl_c_gets_out_of_a_wait(fresh: Fresh, tmp_path: Path) -> None:
    deadline = patience(60)
    (message, took), _ = fresh(2).run(_wait_for_ever, deadline, tmp_path / "over")
    assert "interrupted by Ctrl-C" in message
    assert took < deadline / 2


def _signal_to_a_child(over: Path) -> bool:
    """Rank 0 waits in an exchange while a child of it, such as a data loader's, is interrupted."""
    model = DDP(make_model(), bucket_cap_mb=CAP)
    wire = sw.attach(model, "TopK(0.05)")
    for step in range(2):  # DDP's own collectives, for rebuilding its buckets, are over then
        loss_of(model, dist.get_rank(), step).backward()
    loss = loss_of(model, dist.get_rank(), 2)
    if dist.get_rank() == 1:
        wait_for(over.exists)
        loss.backward()
        return wire.error is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        child = os.fork()
    if child == 0:
        try:
            time.sleep(1000)
        finally:
            os._exit(7)

    def interrupt() -> None:
        with telling(over):
            time.sleep(0.5)
            os.kill(child, signal.SIGINT)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7  # KeyboardInterrupt, in the child
            time.sleep(0.5)

    thread = threading.Thread(target=interrupt)
    thread.start()
    loss.backward()
    thread.join()
    return wire.error is None


def test_ctrl_c_in_a_forked_child_leaves_the_parent_alone(fresh: Fresh, tmp_path: Path) -> None:
    assert fresh(2).run(_signal_to_a_child, tmp_path / "over") == [True, True]


def _functional_wait(over: Path) -> float:
    """The same in an exchange without a thread, before which DDP has not been seen."""
    group = sw.groups.DistributedGroup(timeout=patience(60))
    state = sw.functional.init("TopK(0.5)", {"x": torch.zeros(10)})
    if dist.get_rank() == 1:
        wait_for(over.exists)
        return 0.0
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with telling(over), pytest.raises(KeyboardInterrupt):
        sw.functional.exchange({"x": torch.ones(10)}, state, group)
    return time.monotonic() - start


def test_ctrl_c_gets_out_of_a_functional_exchange(fresh: Fresh, tmp_path: Path) -> None:
    took, _ = fresh(2).run(_functional_wait, tmp_path / "over")
    assert took < patience(30)


def _abandoned_backward() -> tuple[torch.Tensor, torch.Tensor]:
    """A backward pass that breaks off half-way on all ranks leaves no trace."""
    rank = dist.get_rank()
    grads = []
    for broken in (False, True):
        net = make_model()
        model = DDP(net, bucket_cap_mb=CAP)
        wire = sw.attach(model, "TopK(0.05)")
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        if broken:

            def stop(_: torch.Tensor) -> torch.Tensor:
                raise KeyError("the user's own error")

            handle = net.get_parameter("0.weight").register_hook(stop)
            with pytest.raises(KeyError):
                loss_of(model, rank, 1).backward()
            handle.remove()
            time.sleep(0.2)
            model.zero_grad()
            # DDP itself does not survive this, so a new one takes the memory over
            kept = wire.state_dict()
            wire.detach()
            model = DDP(net, bucket_cap_mb=CAP)
            wire = sw.attach(model, "TopK(0.05)")
            wire.load_state_dict(kept)
        loss_of(model, rank, 2).backward()
        wire.detach()
        grads.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
    return grads[0], grads[1]


def test_a_broken_off_backward_leaves_no_trace(two: Cluster) -> None:
    for straight, after_break in two.run(_abandoned_backward):
        assert torch.equal(straight, after_break)


def _alone_at_attach(over: Path) -> str:
    model = DDP(make_model())
    if dist.get_rank() == 1:
        wait_for(over.exists)
        return ""
    with telling(over), pytest.raises(sw.errors.ExchangeError) as error:
        sw.attach(model, "TopK(0.05)", timeout=2)
    return str(error.value)


def test_a_rank_that_does_not_attach(fresh: Fresh, tmp_path: Path) -> None:
    message, _ = fresh(2).run(_alone_at_attach, tmp_path / "over")
    assert "the first meeting failed on rank 0 of 2; rank 1 of 2 did not come" in message
    assert "All ranks must attach" in message


def _attach_again(over: Path) -> str:
    """A second model finds the groups of the first one, and rank 1 attaches it to nothing."""
    for _ in range(2):
        model = DDP(make_model())
        wire = sw.attach(model, "TopK(0.05)", timeout=2)
        wire.detach()
    return _alone_at_attach(over)


def test_a_rank_that_does_not_attach_again(fresh: Fresh, tmp_path: Path) -> None:
    message, _ = fresh(2).run(_attach_again, tmp_path / "over")
    assert "rank 1 of 2 did not come" in message


def _attach_without_store(ready: Path, frozen: Path) -> tuple[str, float]:
    model = DDP(make_model())
    (ready / str(dist.get_rank())).touch()
    wait_for(frozen.exists)
    start = time.monotonic()
    with pytest.raises(sw.errors.ExchangeError) as error:
        sw.attach(model, "TopK(0.05)", timeout=2)
    return str(error.value), time.monotonic() - start


def test_a_frozen_store_ends_attach(fresh: Fresh, tmp_path: Path) -> None:
    cluster, ready = fresh(2, "agent"), tmp_path / "ready"
    ready.mkdir()
    cluster.start(_attach_without_store, ready, tmp_path / "frozen")
    _wait_until_all_train(cluster, ready)
    assert cluster.agent is not None
    assert cluster.agent.pid is not None
    os.kill(cluster.agent.pid, signal.SIGSTOP)
    (tmp_path / "frozen").touch()
    for fine, value in cluster.collect():
        assert fine, value
        message, took = value
        assert "the first meeting failed on rank" in message
        assert "the store does not answer" in message
        assert took < patience(2 + 5 + 4)  # grace, inquiry
