"""Algorithm 1 for any module without DDP: the learning rate inside the memory.

`DistributedOptimizer` wraps any torch optimizer. Its `step()` exchanges γ·gradient, divides the
mean by γ again and lets the optimizer do the rest: so the memory holds updates, not gradients, and
a learning-rate drop does not change what was held back.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels
from ..counters import Counters
from ..errors import AttachError, NonFiniteError, StateError
from ..groups import Alone, Group, drive
from ..groups.distributed import DistributedGroup
from ..report import Report
from ..requests import Routine
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from ..session import Session, Topology, handshake
from .model import check_momentum, check_optimizer, named_parameters

Result = TypeVar("Result")


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
        timeout: seconds, or a `timedelta`, after which a rank that does not answer is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheme: AnyScheme | Selector | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta = 60.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AttachError(
                f"DistributedOptimizer takes the model first, and this is {type(model).__name__}: "
                f"write DistributedOptimizer(model, optimizer, scheme)"
            )
        self.scheme = as_scheme(scheme)
        check_optimizer(optimizer, model.parameters())
        named = named_parameters(model)
        check_momentum(self.scheme.memory, optimizer)
        self.optimizer = optimizer
        # the wrapped optimizer's own lists, so that schedulers and scalers see one optimizer
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self._named = {id(p): (name, p) for name, p in named.items()}
        self._device = next(iter(named.values())).device
        kernels.prepare(self._device.type)
        self._join(Alone())
        if dist.is_initialized():
            group = DistributedGroup(process_group, timeout, self._device)
            drive(handshake(group.rank, self.scheme, named), group, Counters())
            group.broadcast([*model.parameters(), *model.buffers()])
            self._join(group)
        self._patch_hooks()

    def _join(self, group: Group) -> None:
        """Exchange over this group from now on, with nothing kept yet."""
        self.group = group
        shapes = {name: tuple(p.shape) for name, p in self._named.values()}
        self._session = Session(self.scheme, shapes, Topology(group.rank, group.size))

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
        transaction = self._session.begin()
        dtype = torch.float32
        for parameter, _ in rates.values():
            dtype = torch.promote_types(dtype, parameter.dtype)
        shapes = {name: tuple(parameter.shape) for name, (parameter, _) in rates.items()}
        unit = transaction.unit(0, shapes, dtype, self._device)
        for name, view in unit.views():
            parameter, rate = rates[name]
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad).mul_(rate)  # in the residual's type
        self.group.doing = f"the exchange of step {transaction.number}"
        try:
            self._drive(transaction.exchange(unit))
            non_finite = self._drive(transaction.agree())
        except BaseException:
            transaction.rollback()
            raise
        if non_finite is not None:
            transaction.rollback()
            raise NonFiniteError(
                f"NaN or infinity in the gradient at step {transaction.number}: {non_finite}. No "
                f"rank took the step and no memory changed"
            )
        transaction.commit()
        for name, view in unit.views():
            parameter, rate = rates[name]
            mean = view.div(rate).to(parameter.dtype)
            parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)

    def _drive(self, routine: Routine[Result]) -> Result:
        return drive(routine, self.group, self._session.counters)

    @property
    def steps(self) -> int:
        """Steps exchanged so far, those before a restart included."""
        return self._session.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and this rank's memory: every rank saves its own."""
        return {**self._session.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        self._session.check(state_dict)
        if "optimizer" not in state_dict:
            raise StateError("the saved state lacks the optimizer's")
        self._session.load_state_dict(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def close(self) -> None:
        """Leave the group; the optimizer cannot step any more."""
        if isinstance(self.group, DistributedGroup):
            self.group.close()

    def report(self, layers: bool = False) -> Report:
        """Bytes, ratios, times and the health of the memory, as `SparseHookState.report`."""
        return self._session.report(layers)
