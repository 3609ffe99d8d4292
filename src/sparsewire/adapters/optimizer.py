"""Exchange of updates for any module and any torch optimizer, with DDP or without.

The optimizer steps on the rank's own gradient. After every H-th step, a hook of the optimizer
exchanges the changes that these steps made to the weights. Under DDP a communication hook leaves
the gradients unreduced.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError, SparsewireError, StateError
from ..groups import Alone
from ..groups.connection import Connection
from ..groups.distributed import DistributedGroup
from ..groups.hierarchy import IntraNode
from ..report import Report
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from ..session import Session
from .audit import Audit
from .base import Attached, leave, meet
from .hook import activate, check_is_free, deactivate, register
from .model import check_nonfinite, check_scaler, named_parameters, search_ddp
from .options import Optimizers, check_ahead, check_memory, check_optimizers, check_whole
from .restore import check_saved, is_between, load_outer
from .rounds import Rounds
from .scaling import WatchedScaler
from .shown import Shown
from .updates import StepAhead, Updates
from .weights import check_outer

log = logging.getLogger("sparsewire.updates")


class SparseUpdates(Attached):
    """The exchange of one model's updates.

    `attach(model, scheme, optimizer=optimizer, communicate="updates")` makes one and returns it.
    From then on, every `optimizer.step()` is a local step, and the H-th one exchanges.

    All ranks must make one, with the same scheme, options and model, which they compare at once.
    Keep the object: its `state_dict()` belongs in every rank's checkpoint, and so does the state
    of every rank's own optimizer. `model.state_dict()` holds the shared weights, which are equal on
    all ranks. Load model, optimizer and this object in any order.

    Arguments:
        model: Any module of which every rank holds all parameters, with DDP or without. Without
            DDP, all ranks get rank 0's weights and buffers now, and rank 0's buffers after every
            exchange.
        scheme: What to send. `MomentumCorrection` is refused.
        optimizer: The optimizer that steps this model, or a list if there are several: a local step
            counts when each of them has stepped.
        every: H, the number of local steps between two exchanges.
        delay: With 1 the exchange runs during the next H steps, and its result is applied at their
            end.
        step_ahead: λ from 0 to 1, or `'auto'`, as for `attach`.
        outer: An optimizer over all parameters of the model that gets the mean update as its
            gradient.
        process_group: The ranks that take part, if the model is not under DDP.
        scaler: The `GradScaler` of the training loop. Pass it if there is one, since it may skip a
            step on one rank only.
        on_nonfinite: `'raise'` on all ranks, and the round does not count on any; or `'skip'` the
            local step of the rank that has NaN or infinity.
        timeout: Seconds, or a `timedelta`, after which a rank that does not answer is an error.
        intra_node: The ranks that share a machine, as for `attach`; not together with
            `step_ahead`.
        intra_node_dtype: The type of the sums inside a machine, as for `attach`.
        audit_every: The number of exchanges between two comparisons of the shared weights of all
            ranks. None turns the comparison off.

    Attributes:
        every: The number of local steps between two exchanges.
        delay: 1 if the exchange runs during the next local steps, else 0.
        local_step: The number of local steps since the last exchange began.
    """

    def __init__(
        self,
        model: object,
        scheme: AnyScheme | Selector | str,
        *,
        optimizer: Optimizers | None,
        every: int = 1,
        delay: Literal[0, 1] = 0,
        step_ahead: StepAhead | None = None,
        outer: torch.optim.Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        timeout: float | timedelta = 60.0,
        intra_node: IntraNode | None = None,
        intra_node_dtype: torch.dtype | None = None,
        audit_every: int | None = 100,
    ) -> None:
        ddp, module = _find_module(model)
        chosen = as_scheme(scheme)
        parameters = named_parameters(module)
        optimizers = check_optimizers(optimizer, parameters)
        check_memory(chosen)
        check_whole("every", every, 1)
        check_whole("delay", delay, 0, 1)
        ahead = check_ahead(step_ahead, chosen, intra_node is not None)
        check_outer(outer, optimizers, parameters)
        check_nonfinite(on_nonfinite)
        scaler = check_scaler(scaler)
        audit = Audit(audit_every)
        if module in _attached:
            raise AttachError(
                "this model is attached already. Call detach() on what attach() returned first"
            )

        options = f"updates {on_nonfinite} {every} {delay} {ahead} {type(outer).__name__}"
        meeting = meet(
            process_group if ddp is None else ddp.process_group,
            chosen,
            parameters,
            f"{options} {audit_every}",
            timeout,
            intra_node,
            intra_node_dtype,
            alone=not dist.is_initialized(),
        )
        if ddp is None and isinstance(meeting.group, DistributedGroup):
            meeting.group.broadcast([*module.parameters(), *module.buffers()])
        self.every = every
        self.delay = delay
        self.local_step = 0
        self._outer = outer
        self._on_nonfinite = on_nonfinite
        self._updates = Updates(
            Session(chosen, {n: tuple(p.shape) for n, p in parameters.items()}, meeting.topology),
            parameters,
            step_ahead=ahead,
            outer=outer,
            buffers=() if ddp is not None else tuple(module.buffers()),
            is_delayed=bool(delay),
            audit=audit,
        )
        self._rounds = Rounds(self._updates, meeting, delay, on_nonfinite)
        self._stepped: set[int] = set()
        self._is_resumed = False  # True from loading until the next step
        self._scaler = scaler
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._module = weakref.ref(module)
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._hook_in(module, optimizers)

    def _hook_in(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hook into the module, its optimizers and its DDP, and register it as attached."""
        shown = Shown(module, self._updates.weights.parameters, self._show, self._adopt)
        self._hooks: list[Any] = [shown]
        for each in optimizers:
            self._hooks.append(each.register_step_pre_hook(self._before_step))
            self._hooks.append(each.register_step_post_hook(self._after_step))
        if self._scaler is not None:
            self._hooks.append(WatchedScaler(self._scaler, self._after_scaler))
        thread, meeting = self._rounds.thread, self._rounds.meeting
        if thread is not None:  # if the model is deleted without `detach`
            self._last_resort = weakref.finalize(module, leave, thread, meeting)
        _attached[module] = self
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None:
            activate(ddp, self)
            try:
                register(ddp)
            except AttachError:
                self.detach()
                raise

    # -- the interface of DDP's hook -------------------------------------------------------------

    @property
    def model(self) -> weakref.ref[DistributedDataParallel]:
        """The DDP module, for `sparse_hook`."""
        assert self._ddp is not None
        return self._ddp

    @property
    def process_group(self) -> dist.ProcessGroup:
        """DDP's process group, for `sparse_hook`."""
        model = self.model()
        assert model is not None
        return model.process_group

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return a bucket's gradients unreduced; `sparse_hook` calls it."""
        device = self._updates.weights.device
        devices = [device] if device.type != "cpu" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        future.set_result(bucket.buffer())
        return future

    # -- around the optimizer's step -------------------------------------------------------------

    @torch.no_grad()
    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._show(False)
        if self._scaler is not None:
            return None  # the scaler skips non-finite steps
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if not callable(closure):
            self._leave_out_bad()
            return None

        is_first = True

        def checked() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:  # further evaluations, as in a line search, are up to the optimizer
                self._leave_out_bad()
            is_first = False
            return loss

        if "closure" in options:
            return arguments, {**options, "closure": checked}
        return (arguments[0], checked, *arguments[2:]), options

    def _leave_out_bad(self) -> None:
        """Hide all gradients from the optimizers if any of them is not finite."""
        parameters = {
            name: p for name, p in self._updates.weights.parameters.items() if p.grad is not None
        }
        bad = _first_bad(parameters)
        if bad is None:
            return
        found = f"NaN or infinity in the gradient of {bad} at step {self.steps}"
        for parameter in parameters.values():
            parameter.grad = None  # optimizers skip these parameters, and their own state
        if self._on_nonfinite == "skip":
            log.warning("%s; this rank leaves its local step out", found)
            self._session.counters.skipped += 1
        else:
            self._updates.bad = bad

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._is_resumed = False
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.local_step += 1
        if self.local_step == self.every:
            self.local_step = 0
            self._rounds.end()

    def _after_scaler(self, optimizer: object, has_stepped: bool) -> None:
        """Count a step that the GradScaler skipped on this rank, because the others wait for it."""
        if not has_stepped and any(each() is optimizer for each in self._optimizers):
            assert isinstance(optimizer, torch.optim.Optimizer)
            self._show(False)
            self._after_step(optimizer)

    # -- shared and live weights -----------------------------------------------------------------

    @contextmanager
    def shared_weights(self) -> Any:
        """Return a context manager in which the model's parameters hold the shared weights.

        A forward pass after `model.eval()` and `model.state_dict()` see them without it. Use it for
        other code that reads parameters, such as a moving average of the weights or an export.
        """
        was_shown = self._updates.weights.shows_shared
        self._show(True)
        try:
            yield
        finally:
            self._show(was_shown)

    @torch.no_grad()
    def _show(self, shared: bool) -> None:
        weights = self._updates.weights
        if shared:
            weights.show_shared(keeps_live=self._keeps_live)
        elif weights.shows_shared:
            residual = self._updates.residual
            weights.show_live(self._updates.mean, residual, self._updates.ahead)

    @property
    def _keeps_live(self) -> bool:
        """Whether the live weights cannot be computed from the shared weights and the residual."""
        return bool(self.local_step or self._stepped or self.delay)

    @torch.no_grad()
    def _adopt(self, names: Sequence[str]) -> None:
        """Use the values of loaded parameters as their shared weights."""
        self._updates.weights.adopt(names, keeps_live=self._is_resumed)

    # -- reports and checkpoints -----------------------------------------------------------------

    @property
    def _session(self) -> Session:
        return self._updates.session

    @property
    def group(self) -> Connection | Alone:
        """The ranks that take part.

        `group.rank` is this rank's number, and `group.size` is the number of ranks.
        """
        return self._rounds.meeting.group

    @property
    def error(self) -> SparsewireError | None:
        """The last failure, as `optimizer.step()` raised it, or None."""
        return self._rounds.error

    @property
    def step_ahead(self) -> float:
        """The current λ. The live weights are the shared ones minus λ times the residual."""
        return self._updates.ahead

    def report(self, layers: bool = False) -> Report:
        """Return running totals, counted in exchanges.

        Arguments:
            layers: If True, list the norms by parameter as well.
        """
        return replace(super().report(layers), every=self.every)

    def _saved(self) -> dict[str, Any]:
        """Return the state of the updates. If an exchange is under way, wait for its result."""
        mean, ahead, rounds = None, self.step_ahead, self._rounds
        if rounds.is_under_way:
            found, ahead = rounds.result()
            mean = None if found is not None else self._updates.weights.values(self._updates.mean)
        return {
            "updates": {
                "local_step": self.local_step,
                "every": self.every,
                "delay": self.delay,
                "step_ahead": ahead,
                "weights": self._updates.weights.save(self._keeps_live),
                "mean": None if mean is None else {n: t.clone() for n, t in mean.items()},
                "buffers": self._updates.packed if rounds.is_under_way else None,
                "outer": None if self._outer is None else deepcopy(self._outer.state_dict()),
            },
        }

    def _merged(self, states: Sequence[Mapping[str, Any]], strict: bool) -> dict[str, Any]:
        """Return this rank's state, merged from the states of another number of ranks.

        With `delay`, it takes one old rank's live weights. Everything else is equal on all ranks.
        """
        merged = super()._merged(states, strict)
        saved = [check_saved(each.get("updates"), self._updates) for each in states]
        if any(map(is_between, saved)):
            raise StateError(
                f"the saved state is from the middle of a round, after {saved[0]['local_step']} of "
                f"{self.every} local steps, so another number of ranks cannot resume from it. Use "
                f"a checkpoint from the end of a round, where wire.local_step is 0"
            )
        own = saved[merged["rank"] % len(states)]
        return {**merged, "updates": {**saved[0], "weights": own["weights"]}}

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        self._session.check(state, strict)
        updates, weights = self._updates, self._updates.weights
        saved = check_saved(state.get("updates"), updates)
        if (saved["every"], saved["delay"]) != (self.every, self.delay):
            raise StateError(
                f"the state was saved with every={saved['every']}, delay={saved['delay']}, and "
                f"this model has every={self.every}, delay={self.delay}. Attach with the saved ones"
            )
        if (saved["outer"] is None) != (self._outer is None):
            raise StateError(
                "the saved state has an outer optimizer and this model none, or the other way "
                "round. Attach with the same outer="
            )
        if self._outer is not None:  # first, since it may raise
            load_outer(self._outer, saved["outer"])
        self._rounds.forget()  # it would write to the residual
        self._session.load_state_dict(state, strict)
        self._show(False)
        weights.load(saved["weights"])
        updates.ahead = saved["step_ahead"]
        self.local_step = saved["local_step"]
        self._stepped.clear()
        if self.delay and saved["mean"] is not None:
            for name, view in weights.values(updates.mean).items():
                view.copy_(saved["mean"][name])
            updates.packed = saved["buffers"]
            self._rounds.resume((None, updates.ahead))
        self._is_resumed = True
        if "live" in saved["weights"]:
            weights.load_live(saved["weights"]["live"])
        else:
            updates.begin()

    @torch.no_grad()
    def detach(self) -> None:
        """Give the model the shared weights and stop exchanging. Call it on all ranks.

        The residual is dropped, and so are local steps since the last exchange.
        """
        if not self._hooks:
            return
        self._show(False)
        with suppress(SparsewireError):
            self._rounds.finish()
        self._updates.weights.show_shared(keeps_live=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        module = self._module()
        if module is None or _attached.get(module) is not self:
            return
        del _attached[module]
        if self._ddp is not None:
            deactivate(self)
        if self._rounds.thread is not None:
            self._last_resort.detach()
        self._rounds.leave()


_attached: weakref.WeakKeyDictionary[nn.Module, SparseUpdates] = weakref.WeakKeyDictionary()


def _find_module(model: object) -> tuple[DistributedDataParallel | None, nn.Module]:
    """Return the DDP module, if the model is one, and the module that trains."""
    ddp = search_ddp(model)
    module = ddp.module if ddp is not None else model
    if not isinstance(module, nn.Module):
        raise AttachError(f"attach() needs a module, not {type(module).__name__}")
    if ddp is not None:
        check_is_free(ddp)
    return ddp, module


def _first_bad(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return the name of the first parameter whose gradient is not finite."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None and p.numel()}
    if not gradients:
        return None
    norms = torch._foreach_norm(list(gradients.values()))  # 4× faster than isfinite
    fine = torch.stack([norm.isfinite() for norm in norms]).tolist()
    for (name, gradient), is_fine in zip(gradients.items(), fine, strict=True):
        if not is_fine and not bool(gradient.isfinite().all()):  # not just too large to square
            return name
    return None
