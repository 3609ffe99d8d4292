"""Module hooks that make evaluation and state dicts use the shared weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class Shown:
    """Makes a forward pass in `eval()` mode, state dicts and loading use the shared weights.

    Arguments:
        module: The model.
        parameters: The trained parameters by name.
        show: Called with True to write the shared weights into the parameters, with False to write
            the live weights.
        adopt: Called with the names of parameters that were loaded.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        show: Callable[[bool], None],
        adopt: Callable[[Sequence[str]], None],
    ) -> None:
        self._show, self._adopt = show, adopt
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._hooks: list[Any] = [module.register_forward_pre_hook(self._before_forward)]

        def after_saving(part: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
            self._copy(part, state, prefix)  # torch sets an attribute on this hook: no method

        part: Any  # torch's state dict hooks are untyped
        for part in module.modules():  # submodules have state dicts of their own
            if any(id(p) in self._names for p in part.parameters(recurse=False)):
                self._hooks.append(part.register_state_dict_pre_hook(self._before_saving))
                self._hooks.append(part.register_state_dict_post_hook(after_saving))
                self._hooks.append(part.register_load_state_dict_pre_hook(self._before_loading))
                self._hooks.append(part.register_load_state_dict_post_hook(self._after_loading))

    def _before_forward(self, module: nn.Module, _: object) -> None:
        self._show(not module.training)

    def _before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._show(True)

    def _copy(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Copy the entries of a state dict, because the parameters will change back."""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in self._names and isinstance(state.get(prefix + name), Tensor):
                state[prefix + name] = state[prefix + name].detach().clone()

    def _before_loading(self, module: nn.Module, *_: object) -> None:
        self._show(True)  # or live weights that are not loaded would become shared ones

    def _after_loading(self, module: nn.Module, _: object) -> None:
        mine = (self._names.get(id(p)) for p in module.parameters(recurse=False))
        self._adopt([name for name in mine if name is not None])

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __deepcopy__(self, memo: object) -> Shown:
        """Return hooks that do nothing, for a copy of the model."""
        return Shown(nn.Module(), {}, lambda shared: None, lambda names: None)
