"""The two sets of weights of a model: the shared weights, and the live weights that a rank trains.

The shared weights x are equal on all ranks to the last bit. A round begins at the live weights
θ = x − λ·e, where e is the rank's residual: with `step_ahead` λ a rank computes its gradients
closer to where the shared weights will be once the residuals are applied. The optimizer then
changes θ, and that change is the rank's update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import AttachError
from ..segments import ParamSlice, Segments

BLOCK = 1 << 17  # values that stay in a CPU cache from one operation to the next


class Weights:
    """The shared weights of a model, whose parameters hold the live weights.

    Arguments:
        parameters: The trained parameters by name.
        keeps_start: If True, keep the weights at which a round began, because they cannot be
            computed at its end.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], keeps_start: bool = False) -> None:
        self.parameters = dict(parameters)
        self.dtype = torch.float32
        for parameter in parameters.values():
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)
        self.device = next(iter(parameters.values())).device
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.is_narrow = any(p.dtype != self.dtype for p in parameters.values())
        self.shows_shared = False  # whether the parameters hold x now
        self._aside: list[Tensor] | None = None  # the live weights in the meantime
        self._params: tuple[ParamSlice, ...] = ()
        size = sum(p.numel() for p in parameters.values())
        self.shared = torch.empty(size, dtype=self.dtype, device=self.device)
        self._start = torch.empty_like(self.shared) if keeps_start else None

    def lay_out(self, segments: Segments) -> None:
        """Put the shared weights into the order of an exchange's flat tensor."""
        if segments.params == self._params:
            return
        before = [self.values(flat) for flat in self._flats] if self._params else []
        self._params = segments.params
        for number, flat in enumerate(self._flats):
            held = before[number] if before else self.parameters
            held = {name: each.detach().clone() for name, each in held.items()}
            for name, view in self.values(flat).items():
                view.copy_(held[name])

    @property
    def _flats(self) -> list[Tensor]:
        return [self.shared] if self._start is None else [self.shared, self._start]

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor by parameter name, in the parameters' shapes."""
        return {p.name: flat[p.start : p.stop].view(p.shape) for p in self._params}

    def _pairs(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the flat tensor's views and the live parameters, in the same order."""
        views = self.values(flat)
        return list(views.values()), [self.parameters[name].detach() for name in views]

    # -- a round ---------------------------------------------------------------------------------

    def begin(self, scratch: Tensor, residual: Tensor | None, ahead: float) -> None:
        """Begin a round at x − λ·e. `scratch` is overwritten, unless the start is kept."""
        if self._works_in_blocks:
            for shared, *late, part in self._blocks(self.shared, *_late(residual, ahead)):
                _write_start(shared, late, ahead, part)
            return
        start = scratch if self._start is None else self._start
        views, live = self._pairs(self._write_start(start, residual, ahead))
        torch._foreach_copy_(live, views)

    @property
    def _works_in_blocks(self) -> bool:
        """Whether to work block by block: a CPU then reads and writes memory a quarter less."""
        return (
            self._start is None
            and self.device.type == "cpu"
            and all(p.is_contiguous() for p in self.parameters.values())
        )

    def _blocks(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield flat tensors block by block, each with its part of the live parameters."""
        for param in self._params:
            live = self.parameters[param.name].detach().view(-1)
            for begin in range(param.start, param.stop, BLOCK):
                end = min(begin + BLOCK, param.stop)
                mine = live[begin - param.start : end - param.start]
                yield *(flat[begin:end] for flat in flats), mine

    def begin_early(self, update: Tensor, residual: Tensor | None, ahead: float) -> None:
        """Begin a round before `update` is exchanged, as if none of it were sent."""
        assert self._start is not None
        start = self._write_start(self._start, residual, ahead)
        if ahead:
            start.sub_(update, alpha=ahead)
            # A non-finite update will not count, and must not stay in the weights.
            torch.where(start.isfinite(), start, self.shared, out=start)
        self._narrow(start)
        views, live = self._pairs(start)
        torch._foreach_copy_(live, views)

    def _write_start(self, into: Tensor, residual: Tensor | None, ahead: float) -> Tensor:
        """Write x − λ·e in the precision of the parameters, with the same bits every time."""
        _write_start(self.shared, _late(residual, ahead), ahead, into)
        return self._narrow(into)

    def _narrow(self, start: Tensor) -> Tensor:
        """Round to the types of the parameters."""
        for name, view in self.values(start).items() if self.is_narrow else ():
            view.copy_(view.to(self.parameters[name].dtype))
        return start

    def collect(self, update: Tensor, residual: Tensor | None, ahead: float) -> None:
        """Write the update: the weights at the round's start minus the live weights."""
        if self._works_in_blocks and not self.is_narrow:
            flats = self.shared, *_late(residual, ahead), update
            for shared, *late, mine, part in self._blocks(*flats):
                _write_start(shared, late, ahead, mine)
                mine.sub_(part)
            return
        if self._start is None:
            self._write_start(update, residual, ahead)
        else:
            update.copy_(self._start)
        views, live = self._pairs(update)
        torch._foreach_sub_(views, live)

    def advance(self, mean: Tensor, residual: Tensor | None, ahead: float) -> None:
        """Subtract the mean update and begin a round, in one pass if possible."""
        if not self._works_in_blocks:
            self.apply(mean, None)
            self.begin(mean, residual, ahead)
            return
        for shared, *late, mine, part in self._blocks(self.shared, *_late(residual, ahead), mean):
            shared.sub_(mine)
            _write_start(shared, late, ahead, part)

    def apply(self, mean: Tensor, outer: torch.optim.Optimizer | None) -> None:
        """Subtract the mean update from the shared weights, or let an outer optimizer apply it."""
        if outer is None:
            self.shared.sub_(mean)
            return
        views, live = self._pairs(self.shared)
        trained = None if self._start is None else [each.clone() for each in live]
        torch._foreach_copy_(live, views)
        gradients = {name: p.grad for name, p in self.parameters.items()}
        for name, view in self.values(mean).items():
            self.parameters[name].grad = view.to(self.parameters[name].dtype)
        outer.step()
        torch._foreach_copy_(views, live)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        if trained is not None:  # a round is under way
            torch._foreach_copy_(live, trained)

    # -- switch between shared and live weights --------------------------------------------------

    def show_shared(self, keeps_live: bool) -> None:
        """Write x into the parameters. With `keeps_live`, keep θ, which cannot be recomputed."""
        if self.shows_shared:
            return
        views, live = self._pairs(self.shared)
        self._aside = [each.clone() for each in live] if keeps_live else None
        torch._foreach_copy_(live, views)
        self.shows_shared = True

    def show_live(self, scratch: Tensor, residual: Tensor | None, ahead: float) -> None:
        """Write θ into the parameters again."""
        if not self.shows_shared:
            return
        self.shows_shared = False
        if self._aside is None:
            self.begin(scratch, residual, ahead)
            return
        _, live = self._pairs(self.shared)
        torch._foreach_copy_(live, self._aside)
        self._aside = None

    def adopt(self, names: Iterable[str], keeps_live: bool) -> None:
        """Use the values of these parameters as their shared weights, after a model was loaded.

        The round begins again there, unless the live weights are kept.
        """
        views = self.values(self.shared)
        for name in names:
            held = self.parameters[name].detach()
            if not torch.equal(views[name].to(held.dtype), held):  # else keep x, which may be wider
                views[name].copy_(held)
        if not keeps_live:
            self._aside = None

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, keeps_live: bool) -> dict[str, dict[str, Tensor]]:
        """Return the weights that the model's state lacks: x if wider, θ, and the round's start."""
        saved = {}
        if self.is_narrow:
            saved["shared"] = self.shared
        if self._start is not None:
            saved["start"] = self._start
        kept = {kind: _clones(self.values(flat)) for kind, flat in saved.items()}
        if keeps_live:
            _, live = self._pairs(self.shared)
            names = self.values(self.shared)
            held = live if self._aside is None else self._aside
            kept["live"] = _clones(dict(zip(names, held, strict=True)))
        return kept

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a result of `save`, except the live weights."""
        for kind, flat in (("shared", self.shared), ("start", self._start)):
            if kind in saved and flat is not None:
                for name, view in self.values(flat).items():
                    view.copy_(saved[kind][name])

    def load_live(self, live: Mapping[str, Tensor]) -> None:
        """Resume in the middle of a round, with these live weights."""
        for name, parameter in self.parameters.items():
            parameter.detach().copy_(live[name])
        self.shows_shared, self._aside = False, None


def check_outer(
    outer: object, inner: Sequence[object], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise unless `outer` is a second optimizer that steps all parameters, precisely enough."""
    if outer is None:
        return
    if not isinstance(outer, torch.optim.Optimizer):
        raise AttachError(
            f"outer must be an optimizer over the model's parameters, such as "
            f"torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), "
            f"not {' '.join(f'{outer!r:.60}'.split())}"
        )
    if any(outer is each for each in inner):
        raise AttachError(
            "outer is the optimizer that trains, which would then take additional steps. Pass a "
            "second one, such as torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.6, "
            "nesterov=True)"
        )
    stepped = {id(p) for group in outer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in stepped]
    if missing:
        raise AttachError(
            f"outer does not step {missing[0]}, which trains. Build it over all parameters of the "
            f"model"
        )
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.values()):
        raise AttachError(
            "outer works on the parameters themselves, and 16-bit ones would round the shared "
            "weights in every round. Keep the weights in float32 and compute under autocast"
        )


def _late(residual: Tensor | None, ahead: float) -> list[Tensor]:
    """Return the residual in a list, or an empty list if λ is 0 or there is no residual."""
    return [] if residual is None or not ahead else [residual]


def _write_start(shared: Tensor, late: Sequence[Tensor], ahead: float, into: Tensor) -> None:
    """Write x − λ·e, or x if there is no residual to subtract, in the type of `into`."""
    if not late:
        into.copy_(shared)
    elif into.dtype == shared.dtype:
        torch.sub(shared, late[0], alpha=ahead, out=into)
    else:
        into.copy_(torch.sub(shared, late[0], alpha=ahead))


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
