"""Algorithm 1 for any module without DDP: the learning rate inside the memory.

`DistributedOptimizer` wraps any torch optimizer. Its `step()` exchanges γ·gradient, divides the
mean by γ again and lets the optimizer do the rest: so the memory holds updates, not gradients, and
a learning-rate drop does not change what was held back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels
from ..desk import Call
from ..engine import Exchange, agree
from ..errors import AttachError, NonFiniteError, StateError
from ..groups import Alone, Group, drive
from ..groups.distributed import DistributedGroup
from ..ledger import Ledger
from ..meter import Meter
from ..report import Report
from ..scheme import AnyScheme, Scheme, as_scheme
from ..selectors import Selector
from ..workspace import Workspace
from . import saved
from .handshake import handshake
from .model import check_momentum, named_parameters


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose gradients are exchanged sparsely between ranks in `step()`.

    p = γ·g + e, q = C(p), x ← x − mean(q), e ← p − q (Eghlidi & Jaggi 2020, Algorithm 1), with the
    update handed to `optimizer` as the gradient mean(q)/γ: momentum, weight decay and adaptive
    steps then work on the mean.

    Arguments:
        model: the module, not wrapped in DDP; its weights are made equal on all ranks.
        optimizer: any optimizer over the model's parameters.
        scheme: a `Scheme`, a selector, or either one's text.
        process_group: the ranks; the default group if None, and no exchange at all without one.
        timeout: seconds after which a rank that does not answer is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheme: AnyScheme | Selector | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.scheme = as_scheme(scheme)
        named = named_parameters(model)
        check_momentum(self.scheme.memory, optimizer)
        self.optimizer = optimizer
        # the wrapped optimizer's own lists, so that schedulers and scalers see one optimizer
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self._named = {id(p): (name, p) for name, p in named.items()}
        self._device = next(iter(named.values())).device
        self._meter = Meter()
        self._work = Workspace()
        self._last: Exchange | None = None
        self.steps = 0
        self.group: Group = Alone()
        kernels.prepare(self._device.type)
        if dist.is_initialized():
            group = DistributedGroup(process_group, timeout, self._device)
            handshake(group, self.scheme, named)
            group.broadcast([*model.parameters(), *model.buffers()])
            self.group = group
        shapes = {name: tuple(p.shape) for name, p in named.items()}
        self._ledger = Ledger(self.scheme.fields, shapes, self.group.rank, self.group.size)
        self._patch_hooks()

    def _patch_hooks(self) -> None:
        """What `Optimizer.__init__` would set up beside the lists that are shared here."""
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self, name, getattr(self.optimizer, name))

    _step_supports_amp_scaling = True  # so that a GradScaler calls step(), which then refuses

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Exchange the gradients, then step. All ranks must call it."""
        if getattr(self, "grad_scale", None) is not None:
            raise AttachError(
                "DistributedOptimizer does not work with a GradScaler, which decides on each rank "
                "by itself whether to step; use DDP and attach(…, scaler=scaler)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = self._rates()
        if rates:
            self._exchange(rates)
        self.optimizer.step()
        return loss

    def _rates(self) -> dict[str, tuple[nn.Parameter, float]]:
        """Parameter and γ by name; where γ is 0 nothing is deposited and nothing is sent."""
        rates = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._named:
                    continue
                if float(group["lr"]) == 0:
                    parameter.grad = None  # a rank's own gradient must not reach its momentum
                else:
                    name, _ = self._named[id(parameter)]
                    rates[name] = (parameter, float(group["lr"]))
        return rates

    def _exchange(self, rates: dict[str, tuple[nn.Parameter, float]]) -> None:
        scheme = self.scheme.at(self.steps)
        exchange = self._find_exchange(scheme, rates)
        segments, dtype = exchange.segments, exchange.dtype
        flat = torch.zeros(segments.size, dtype=dtype, device=self._device)
        for span, view in segments.views(flat):
            parameter, rate = rates[span.name]
            if parameter.grad is not None:
                view.view(span.shape).copy_(parameter.grad).mul_(rate)  # in the ledger's type
        kept = scheme.memory.kept_as(dtype)
        shard = exchange.shard(self.group.rank, self.group.size)
        before, after = self._ledger.open(0, segments, kept, self._device, shard)
        call = Call(self.steps, self.group.rank, self.group.size)
        self.group.doing = f"the exchange of step {self.steps}"
        run = exchange.run(flat, before, after, call, self._meter, self._work)
        try:
            finding = drive(run, self.group, self._meter)
            verdict = drive(agree([finding], self.group.rank), self.group, self._meter)
        except BaseException:
            self._ledger.discard()
            raise
        if verdict is not None:
            self._ledger.discard()
            raise NonFiniteError(
                f"NaN or infinity in the gradient at step {self.steps}: {verdict}. No rank took "
                f"the step and no memory changed"
            )
        self._ledger.commit()
        self.steps += 1
        self._meter.steps += 1
        self._meter.values += segments.size
        for span, view in segments.views(flat):
            parameter, rate = rates[span.name]
            mean = view.view(span.shape).div(rate).to(parameter.dtype)
            parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)

    def _find_exchange(
        self, scheme: Scheme, rates: dict[str, tuple[nn.Parameter, float]]
    ) -> Exchange:
        """The exchange of these parameters: that of the last step, unless something changed."""
        last = self._last
        names = [span.name for span in last.segments.spans] if last else []
        if last is None or last.scheme != scheme or sorted(names) != sorted(rates):
            dtype = torch.float32
            for parameter, _ in rates.values():
                dtype = torch.promote_types(dtype, parameter.dtype)
            segments = scheme.cut({name: tuple(p.shape) for name, (p, _) in rates.items()})
            last = self._last = Exchange(scheme, segments, dtype)
        return last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and this rank's memory: every rank saves its own."""
        state = saved.save(self.scheme, self.group, self.steps, self._ledger)
        return {**state, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        saved.check(state_dict, self.scheme, self.group, self._ledger, strict=True)
        if "optimizer" not in state_dict:
            raise StateError("the saved state lacks the optimizer's")
        self._ledger.load(state_dict["memory"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.steps = state_dict["step"]

    def close(self) -> None:
        """Leave the group; the optimizer cannot step any more."""
        if isinstance(self.group, DistributedGroup):
            self.group.close()

    def report(self, layers: bool = False) -> Report:
        """Bytes, ratios, times and the health of the memory, as `Wire.report`."""
        squares = self._ledger.squares()
        return Report.of(repr(self.scheme), self._meter, self.group.size, squares, layers)
