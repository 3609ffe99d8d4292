"""One rank's training in a trial. It writes down every step, every error and when they came.

What a user's own code or machine does to a rank from inside happens here; `faults.py` says when,
and does from outside what another process or the network does.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw
from sparsewire.groups.transport import Transport, Work
from sparsewire.tools.cli import checkpoint

from ..distributed.training import CAP, batch, make_model
from .trials import Trial

SAVES = (5, 17, 29)  # steps after which the ranks save
POLL = 0.005


class Diary:
    """Lines of JSON, each written at once, with the time that all processes share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.monotonic(), **fields})
        os.write(self._file, (line + "\n").encode())


def digest(value: object) -> str:
    """Hash all tensors in nested dictionaries."""
    total = hashlib.sha256()

    def add(each: object) -> None:
        if isinstance(each, dict):
            for key in sorted(each):
                total.update(str(key).encode())
                add(each[key])
        elif isinstance(each, Tensor):
            total.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())

    add(value)
    return total.hexdigest()[:16]


class UserError(Exception):
    """An exception of the user's own."""


class Identity:
    """What a checkpoint must have in common with the run that resumes it."""

    def __init__(self, form: str) -> None:
        self._form = form

    def identity(self) -> dict[str, str]:
        return {"form": self._form}


class Rank:
    """One rank of one run."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.trial = Trial(**task["trial"])
        self.rank = int(task["rank"])
        self.steps = int(task["steps"])
        self.folder = Path(task["folder"])  # of this run
        self.disk = Path(task["disk"])  # of all runs of the trial
        self.saves, self.resumes = bool(task["saves"]), task["resumes"]
        self.limit = float(task["limit"])
        self.diary = Diary(self.folder / f"rank-{self.rank}.jsonl")
        self.is_victim = self.rank == self.trial.victim
        self.step = 0
        self._task = task
        self._unsettled: list[int] = []  # checkpoints without a manifest

    def fault_is(self, name: str) -> bool:
        """Whether this run has that fault."""
        return bool(self._task["faulty"]) and self.trial.fault == name

    # -- setting up ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Join the process group, whose store lives where the trial says."""
        address, port = self._task["address"], self._task["port"]
        is_host = self.rank == 0 and self.trial.host == "rank 0"
        patience = datetime.timedelta(seconds=self.limit)
        self.store = dist.TCPStore(
            address, port, is_master=is_host, wait_for_workers=False, timeout=patience
        )
        if is_host:
            self.diary("port", port=self.store.port)
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.trial.world,
            timeout=patience,
        )

    def build(self) -> None:
        """Make model and optimizer."""
        form = self.trial.how
        self.net = make_model()
        self.model: nn.Module = DDP(self.net, bucket_cap_mb=CAP) if form.ddp else self.net
        parameters = self.net.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=1e-3)
            if form.adam
            else torch.optim.SGD(parameters, lr=0.05, momentum=0.5 if form.updates else 0.0)
        )

    def attach(self) -> None:
        """Attach as the form says, or on one rank otherwise."""
        form, trial = self.trial.how, self.trial
        options: dict[str, Any] = {"timeout": trial.timeout, **(form.options or {})}
        if form.updates:
            options |= {"optimizer": self.optimizer, "communicate": "updates"}
        if self.fault_is("NaN") and trial.choice % 2:
            options["on_nonfinite"] = "skip"
        if self.fault_is("drift"):
            options["audit_every"] = 5
        scheme = form.scheme
        if self.fault_is("disagreement") and self.is_victim:
            scheme = "TopK(0.06)" if trial.choice % 2 else scheme
            options["audit_every"] = 7
        self.wire = sw.attach(self.model, scheme, **options)

    # -- training --------------------------------------------------------------------------------

    def weights(self) -> str:
        """A digest of the weights that all ranks should hold."""
        return digest(dict(self.net.state_dict()))

    def memory(self) -> str | None:
        """A digest of the residual, where it can be read without an exchange."""
        return None if self.trial.how.updates else digest(self.wire.state_dict()["memory"])

    def loss(self) -> Tensor:
        """This step's loss, and what goes wrong on the way there."""
        trial, here = self.trial, self.is_victim and self.step == self.trial.at
        inputs, targets = batch(self.rank, self.step)
        if here and self.fault_is("leaving"):
            self.diary("fault")
            if trial.choice % 2:
                sys.exit(7)
            os._exit(7)
        if here and self.fault_is("exception"):
            self._prepare_exception(trial.choice % 4)
        if here and self.fault_is("a rank that is late"):
            time.sleep(0.3 + trial.choice % 1000 / 1000)
        if here and self.fault_is("a rank that is too slow"):
            self.diary("fault")
            self._wait(lambda: self.wire.error is not None, "other ranks' report")
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        if here and self.fault_is("NaN"):
            self.diary("fault")
            loss = loss * float("nan")
        return loss

    def _prepare_exception(self, place: int) -> None:
        """Have the user's code raise in one of four places of this step."""

        def fail(*_: object) -> None:
            self.diary("fault")
            raise UserError("the user's own error")

        if place == 0:
            fail()
        elif place == 1:
            self.net.get_submodule("4").register_forward_hook(fail)
        elif place == 2:
            self.net.get_parameter("0.weight").register_hook(fail)
        else:
            self.optimizer.register_step_pre_hook(fail)

    def train(self) -> RuntimeError | None:
        """Take one step; returns the error that an exchange ended in."""
        self.optimizer.zero_grad()
        loss = self.loss()
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        except RuntimeError as error:
            return error
        return None

    def run(self) -> None:
        """Train, and write down how it ends."""
        self.diary("begun", pid=os.getpid())
        self.connect()
        self.build()
        self.diary("ready")
        self._wait((self.folder / "go").exists, "the go")
        try:
            self.attach()
        except sw.SparsewireError as error:
            self._end(error, type(error).__name__, str(error))
        self.diary("attached")
        if self.fault_is("kill -9 while attaching") and self.is_victim:
            time.sleep(self.limit)
        if self.fault_is("corrupt message"):
            self._corrupt_one()
        if self.resumes:
            self._resume()
        while self.step < self.steps:
            if self.step == self._task["gate"]:
                self.diary("gate")
                self._wait((self.folder / "over").exists, "the end of the fault")
            self._before_step()
            failure = self.train()
            if failure is None:
                self.diary("step", n=self.step, weights=self.weights(), memory=self.memory())
                self._after_step()
            elif not self._goes_on(failure):
                return
            elif self.fault_is("corrupt message") and not self.trial.how.updates:
                continue  # the same step again
            self.step += 1
        self.diary("done")
        self.wire.detach()

    def _before_step(self) -> None:
        if self.is_victim and self.step == self.trial.at:
            self.diary("at")
        if self.fault_is("drift") and self.is_victim and self.step == self.trial.at:
            self.diary("fault")
            with torch.no_grad():
                self.net.get_parameter("5.weight")[0, 0] += 1e-3

    def _after_step(self) -> None:
        if not self.saves:
            return
        if self.step in SAVES:
            self._save()
        if self.rank == 0 and self._unsettled:
            self._settle()
        if self.fault_is("full disk") and self.rank == self.trial.other and self.step == 16:
            self._fill()

    def _goes_on(self, error: RuntimeError) -> bool:
        """Whether all ranks have seen the same error and train on; if not, end."""
        wire_error = self.wire.error
        kind = type(wire_error or error).__name__
        agreed = bool(getattr(wire_error, "is_agreed", False))
        survives = self._task["faulty"] and self.trial.fault in ("NaN", "corrupt message")
        if agreed and survives:
            self.diary("failed", n=self.step, kind=kind, text=str(error), weights=self.weights())
            return True
        self._end(error, kind, f"{error} / {wire_error}")
        return False

    def _end(self, error: RuntimeError, kind: str, text: str) -> None:
        """End as a user's script would."""
        fields: dict[str, Any] = {"kind": kind, "text": text, "n": self.step}
        is_attached = hasattr(self, "wire")
        if is_attached:
            fields |= {"weights": self.weights(), "memory": self.memory()}
        self.diary("error", **fields)
        if is_attached and not getattr(self.wire.error, "is_agreed", False):
            self._try_again()
        if self.trial.ending == "exit":
            sys.exit(3)
        raise error

    def _try_again(self) -> None:
        """A broken group says so again, at once."""
        began = time.monotonic()
        self.trial = Trial(**{**self.trial.to_dict(), "at": -1})  # the fault is over
        again = None
        for _ in range(self.trial.how.round):
            again = again or self.train()
        self.diary("again", seconds=time.monotonic() - began, raised=again is not None)

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + self.limit
        while not condition():
            if time.monotonic() > end:
                sys.exit(f"waited in vain for {what}")
            time.sleep(POLL)

    # -- what arrives otherwise than it was sent -------------------------------------------------

    def _corrupt_one(self) -> None:
        """Flip one bit of a message from another rank, on this rank alone or on all."""
        trial = self.trial
        is_alone = bool(trial.choice % 2)
        if self.rank == trial.other or (is_alone and not self.is_victim):
            return
        left = trial.choice // 2 % 5  # messages that pass first: headers, payloads, statuses

        def flip(data: Tensor) -> None:
            nonlocal left
            if self.step < trial.at or left < 0:
                return
            left -= 1
            if left < 0:
                raw = data.view(torch.uint8)
                raw[trial.choice // 10 % raw.numel()] ^= 1 << trial.choice % 8
                self.diary("fault", nbytes=raw.numel())

        def wrap(name: str) -> None:
            plain = getattr(Transport, name)

            def changed(self_: Transport, *arguments: Any) -> Work:
                work = cast(Work, plain(self_, *arguments))
                work.wait()
                ranks = dist.get_process_group_ranks(self_._group)
                if trial.other in ranks:
                    sender = ranks.index(trial.other)
                    if name != "show":
                        flip(arguments[0].view(len(ranks), -1)[sender])
                    elif arguments[1] == sender:
                        flip(arguments[0].view(-1))
                return work

            setattr(Transport, name, changed)

        for name in ("gather", "deliver", "show"):
            wrap(name)

    # -- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        """Write this rank's part of a checkpoint."""
        if self.fault_is("kill -9 while saving") and self.is_victim and self.step == SAVES[1]:
            self._die_in_fsync(self.trial.choice % 6)
        parts = {
            checkpoint.wire_file(self.rank): self.wire.state_dict(),
            self._optimizer_file: self.optimizer.state_dict(),
        }
        if self.rank == 0:
            parts[checkpoint.MODEL] = {"step": self.step, "model": self.net.state_dict()}
        files = {
            name: checkpoint.write_file(self.disk, self.step, name, part)
            for name, part in parts.items()
        }
        self.store.set(f"saved/{self.step}/{self.rank}", json.dumps(files))
        self._unsettled.append(self.step)

    @property
    def _optimizer_file(self) -> str:
        """The optimizer's state has a file of its own, because only a manifest protects it."""
        return f"optimizer-{self.rank}.pt"

    def _settle(self) -> None:
        """Write the manifest once all ranks must have their parts, after another round."""
        saved = self._unsettled[0]
        if self.step < saved + self.trial.how.round:
            return
        keys = [f"saved/{saved}/{rank}" for rank in range(self.trial.world)]
        files: dict[str, str] = {}
        for key in keys:
            files |= json.loads(self.store.get(key))
        plan = cast(Any, Identity(self.trial.form))
        checkpoint.complete(self.disk, saved, files, plan, self.trial.world)
        self._unsettled.remove(saved)
        self.diary("saved", n=saved)

    def _die_in_fsync(self, calls: int) -> None:
        """Be killed in the middle of writing, or right after it."""
        plain, left = os.fsync, calls // 2

        def fsync(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                self.diary("fault")
                if calls % 2:
                    os.ftruncate(descriptor, 100)
                os.kill(os.getpid(), signal.SIGKILL)
            plain(descriptor)

        os.fsync = fsync

    def _fill(self) -> None:
        """Leave no room on the disk."""
        self.diary("fault")
        with (self.disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 9):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def _resume(self) -> None:
        """Go on from the newest checkpoint, or from its files without looking at the manifest."""
        (self.disk / "filler").unlink(missing_ok=True)
        before = self.weights(), self.memory()
        try:
            found = checkpoint.newest(self.disk)
            assert found is not None
            names = checkpoint.MODEL, checkpoint.wire_file(self.rank), self._optimizer_file
            if self.resumes == "checked":
                found.verify()
                common, wire, optimizer = (found.load(name) for name in names)
            else:
                common, wire, optimizer = (
                    torch.load(found.folder / name, weights_only=True) for name in names
                )
            self.wire.load_state_dict(wire)
        except Exception as error:
            is_same = before == (self.weights(), self.memory())
            self.diary("refused", kind=type(error).__name__, text=str(error), same=is_same)
            raise
        self.net.load_state_dict(common["model"])
        self.optimizer.load_state_dict(optimizer)
        self.step = int(common["step"]) + 1
        self.diary("resumed", n=self.step)


def prepare() -> None:
    """Have torch import what it imports when it is first needed, which takes more than a second."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def main(task: dict[str, Any]) -> None:
    """Be one rank, or what torchrun's agent does for its ranks."""
    if task["role"] == "agent":
        _host_store(task)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = task["interface"]
    rank = Rank(task)
    try:
        rank.run()
    except BaseException as error:
        wire_error = getattr(getattr(rank, "wire", None), "error", None)
        rank.diary("raised", kind=type(error).__name__, text=f"{error} / {wire_error}")
        raise


def _host_store(task: dict[str, Any]) -> None:
    store = dist.TCPStore(task["address"], 0, is_master=True, wait_for_workers=False)
    Diary(Path(task["folder"]) / "agent.jsonl")("port", port=store.port)
    while True:
        time.sleep(1000)
