"""Sparse exchange of gradients for DistributedDataParallel, through its communication hook."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import AttachError, SparsewireError, StateError
from ..groups.connection import Connection
from ..groups.hierarchy import IntraNode
from ..scheme import AnyScheme, as_scheme
from ..selectors import Selector
from ..session import Session
from .audit import Audit
from .base import Attached, leave, meet
from .hook import activate, check_is_free, deactivate
from .model import (
    check_momentum,
    check_nonfinite,
    check_optimizer,
    check_scaler,
    find_ddp,
    named_parameters,
    warn_of_adaptive,
)
from .pipeline import Pipeline
from .scaling import Scaling


class SparseHookState(Attached):
    """The exchange of one model's gradients: the state of `sparse_hook`.

    `attach` makes one, registers the hook and returns the state. To do the same in PyTorch's own
    way::

        state = sw.SparseHookState(ddp, "TopK(0.01)")
        ddp.register_comm_hook(state, sw.sparse_hook)

    All ranks must make one, with the same scheme, options and model, which they compare at once.
    Keep the object: its `state_dict()` belongs in every rank's checkpoint.

    Arguments:
        model: A `DistributedDataParallel` module, also if it is wrapped by `torch.compile`, Fabric
            or a Lightning strategy.
        scheme: What to send.
        optimizer: Needed for `MomentumCorrection`, for `follow_lr`, and to make a skipped step
            change nothing at all.
        follow_lr: If True, rescale the residual when the learning rate changes.
        scaler: The `GradScaler` of the training loop, if there is one. It sees overflows on any
            rank, and the residual follows its scale.
        on_nonfinite: What all ranks do if any rank has NaN or infinity: `'raise'`, or `'skip'` the
            step. With a `scaler`, the scaler decides.
        timeout: Seconds, or a `timedelta`, after which a rank that does not answer is an error.
        intra_node: The ranks that share a machine, as for `attach`.
        intra_node_dtype: The type of the sums inside a machine, as for `attach`.
        audit_every: The number of steps between two comparisons of the weights of all ranks. None
            turns the comparison off.
    """

    def __init__(
        self,
        model: object,
        scheme: AnyScheme | Selector | str,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        follow_lr: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        timeout: float | timedelta = 60.0,
        intra_node: IntraNode | None = None,
        intra_node_dtype: torch.dtype | None = None,
        audit_every: int | None = 100,
    ) -> None:
        ddp = find_ddp(model)
        chosen = as_scheme(scheme)
        parameters = named_parameters(ddp.module)
        check_optimizer(optimizer, parameters.values())
        check_momentum(chosen.memory, optimizer)
        if follow_lr and optimizer is None:
            raise AttachError("follow_lr needs the optimizer. Pass attach(…, optimizer=optimizer)")
        check_nonfinite(on_nonfinite)
        scaler = check_scaler(scaler)
        audit = Audit(audit_every)
        check_is_free(ddp)

        without = scaler is None, follow_lr, optimizer is None
        options = f"gradients {on_nonfinite} {without} {audit_every}"
        meeting = meet(
            ddp.process_group, chosen, parameters, options, timeout, intra_node, intra_node_dtype
        )
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        skips_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        session = Session(chosen, shapes, meeting.topology, skips_unused=skips_unused)
        scaling = Scaling(parameters, optimizer if follow_lr else None, scaler)
        if meeting.group.rank == 0:
            warn_of_adaptive(optimizer, chosen)

        self.model = weakref.ref(ddp)  # DDP holds the state, so that the state must not hold DDP
        self.process_group = ddp.process_group
        self._pipeline = Pipeline(session, meeting, parameters, scaling, on_nonfinite, audit)
        # if the model is deleted without `detach`
        self._last_resort = weakref.finalize(ddp, leave, self._pipeline.thread, meeting)
        alarm = register_optimizer_step_pre_hook(
            _alarm_if_never_called(self._pipeline, parameters.values())
        )
        weakref.finalize(ddp, alarm.remove)  # a hook of all optimizers, which outlives the model
        self._hooks: list[Any] = [alarm]
        if optimizer is not None:
            skip = _leave_out_dropped_steps(self._pipeline)
            self._hooks.append(optimizer.register_step_pre_hook(skip))

            def count(*_: object) -> None:
                audit.optimizer_steps += 1

            self._hooks.append(optimizer.register_step_post_hook(count))
        activate(ddp, self)

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket; `sparse_hook` calls it."""
        return self._pipeline.take(bucket)

    @property
    def group(self) -> Connection:
        """The ranks that take part.

        `group.rank` is this rank's number, and `group.size` is the number of ranks.
        """
        return self._pipeline.group

    @property
    def error(self) -> SparsewireError | None:
        """The last failure as the original exception, or None.

        `backward()` raises a plain `RuntimeError` with its text. It stays here after a later step
        has succeeded.
        """
        return self._pipeline.error

    @property
    def _session(self) -> Session:
        return self._pipeline.session

    def _saved(self) -> dict[str, Any]:
        return {"scaling": self._pipeline.scaling.state()}

    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        if "updates" in state:
            raise StateError(
                "the saved state is from an exchange of updates. Attach with communicate='updates'"
            )
        self._pipeline.scaling.check(state.get("scaling"))
        self._session.load_state_dict(state, strict)
        self._pipeline.scaling.load(state["scaling"])

    def rollback(self) -> None:
        """Undo the last exchange, if the optimizer did not take the step.

        Call it at most once per step, before the next backward.
        """
        self._session.undo()

    def rescale(self, factor: float) -> None:
        """Multiply the residual, after you changed the scale of the loss by hand.

        Arguments:
            factor: The new scale divided by the old one.
        """
        if not 0 < factor < float("inf"):
            raise StateError(f"the residual cannot be rescaled by {factor}. Pass a number above 0")
        self._session.store.follow_loss_scale(factor)

    def detach(self) -> None:
        """Go back to plain DDP. Call it on all ranks. The residual is dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last_resort.detach()
        self._pipeline.thread.stop()
        if deactivate(self) and self._pipeline.thread.broken is None:
            self._pipeline.meeting.close()


def _alarm_if_never_called(pipeline: Pipeline, parameters: Iterable[Tensor]) -> Any:
    """Return a hook of all optimizers that warns if one steps this model but DDP never called us.

    Either another module's forward is called, or a wrapper drops hooks silently.
    """
    mine, steps = {id(parameter) for parameter in parameters}, 0
    watched = weakref.ref(pipeline)

    def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        pipeline = watched()
        if pipeline is None or pipeline.called or steps == 2:
            return
        stepped = (p for group in stepping.param_groups for p in group["params"])
        if any(id(p) in mine and p.grad is not None for p in stepped):
            steps += 1
            if steps == 2:
                warnings.warn(
                    "sparsewire is attached, but DDP has not called it in the first two steps: "
                    "gradients are not exchanged, or not by sparsewire. Your code may call a "
                    "module other than the attached one, such as net if DDP(net) is attached, or "
                    "a framework may wrap it again. Call the attached model, or attach to the one "
                    "that is called",
                    RuntimeWarning,
                    stacklevel=2,
                )

    return before_step


def _leave_out_dropped_steps(pipeline: Pipeline) -> Any:
    """Return an optimizer hook that makes a skipped step change nothing, not even momentum."""

    def before_step(stepping: torch.optim.Optimizer, *_: object) -> None:
        if pipeline.dropped:
            pipeline.dropped = False
            for group in stepping.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    return before_step
