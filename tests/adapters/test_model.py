"""Finding the parameters to exchange, and refusing models that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparsewire as sw
from sparsewire.adapters.model import (
    check_momentum,
    find_ddp,
    gradient_views,
    named_parameters,
    warn_of_adaptive,
)


class Wrapper:
    def __init__(self, **inside: object) -> None:
        self.__dict__.update(inside)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None, Wrapper(module=nn.Linear(2, 2))])
def test_attach_needs_ddp_and_says_what_else_there_is(model: object) -> None:
    with pytest.raises(sw.errors.AttachError, match=r"DDP\(model\)|needs a module"):
        sw.attach(model, "TopK(0.01)")


@pytest.mark.parametrize("scheme", ["TopK(0.01)", sw.TopK(0.01), sw.Scheme(sw.TopK(0.01))])
def test_swapped_arguments_are_told(scheme: sw.Scheme) -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(
        sw.errors.AttachError, match=r"swapped.*TopK\(0.01\).*attach\(model, scheme\)"
    ) as told:
        sw.attach(scheme, net)  # type: ignore[arg-type]
    assert "in_features" not in str(told.value)


def test_search_ends_even_where_wrappers_go_round() -> None:
    first, second = Wrapper(), Wrapper()
    first.__dict__["module"], second.__dict__["model"] = second, first
    with pytest.raises(sw.errors.AttachError, match="this Wrapper holds none"):
        find_ddp(first)


def test_parameters_that_train_by_name() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].weight.requires_grad_(False)
    assert list(named_parameters(net)) == ["0.bias", "1.weight", "1.bias"]


def test_names_do_not_change_with_compile() -> None:
    net = nn.Sequential(nn.Linear(2, 3))
    compiled = nn.Module()
    compiled.add_module("_orig_mod", net)
    assert list(named_parameters(compiled)) == list(named_parameters(net))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(sw.errors.AttachError, match="no parameter that requires a gradient"):
        named_parameters(nn.Linear(2, 2).requires_grad_(False))


def test_complex_parameters_are_refused_by_name() -> None:
    net = nn.Module()
    net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        sw.errors.AttachError, match=r"phase is torch\.complex64, and only real floating"
    ):
        named_parameters(net)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_by_name(kind: type[nn.Embedding]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), kind(5, 2, sparse=True))
    with pytest.raises(
        sw.errors.AttachError, match=r"1 is an embedding .* Build it with sparse=False"
    ):
        named_parameters(net)
    assert named_parameters(nn.Sequential(kind(5, 2)))


def sgd(**options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, **options)


def test_momentum_correction_wants_to_see_the_optimizer() -> None:
    with pytest.raises(
        sw.errors.AttachError, match=r"attach\(model, scheme, optimizer=optimizer\)"
    ):
        check_momentum(sw.MomentumCorrection(), None)


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [
        (sgd(momentum=0.5), "0.5"),
        (torch.optim.Adam([nn.Parameter(torch.zeros(1))]), "0.9"),
    ],
)
def test_second_momentum_is_refused(optimizer: torch.optim.Optimizer, own: str) -> None:
    with pytest.raises(
        sw.errors.AttachError, match=f"momentum {own} of its own.*memory=ErrorFeedback"
    ):
        check_momentum(sw.MomentumCorrection(), optimizer)
    check_momentum(sw.ErrorFeedback(), optimizer)


@pytest.mark.parametrize(
    "optimizer", [sgd(), torch.optim.Adam([nn.Parameter(torch.zeros(1))], betas=(0.0, 0.9))]
)
def test_one_momentum_is_fine(optimizer: torch.optim.Optimizer) -> None:
    check_momentum(sw.MomentumCorrection(), optimizer)


def test_gradient_views_have_their_parameters_strides() -> None:
    plain = torch.zeros(2, 3)
    channels_last = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    gaps = torch.zeros(4, 4)[:, ::2]
    buffer = torch.arange(3.0 + 6 + 24 + 8)[3:]
    first, second, third = gradient_views(buffer, [plain, channels_last, gaps])
    assert first.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert second.stride() == channels_last.stride()
    assert second.permute(0, 2, 3, 1).reshape(-1).tolist() == list(range(9, 33))
    assert third.tolist() == [[33, 34], [35, 36], [37, 38], [39, 40]]
    first.zero_()
    assert not buffer[:6].any()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_adaptive_optimizers_get_a_warning(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(1))])
    with pytest.warns(UserWarning, match=rf"{kind.__name__} behind a sparse exchange"):
        warn_of_adaptive(optimizer, sw.Warmup(sw.Scheme(sw.TopK(0.01))))


@pytest.mark.parametrize("text", ["Dense()", "TopK(1.0)"])
def test_a_dense_exchange_gives_no_warning(text: str) -> None:
    warn_of_adaptive(torch.optim.Adam([nn.Parameter(torch.zeros(1))]), sw.parse(text))


def test_sgd_and_no_optimizer_give_no_warning() -> None:
    for optimizer in (sgd(momentum=0.9), None):
        warn_of_adaptive(optimizer, sw.Scheme(sw.TopK(0.01)))


def test_a_state_that_is_none_is_refused_with_a_remedy() -> None:
    with pytest.raises(sw.errors.AttachError, match=r"sw\.SparseHookState\(ddp, scheme\)"):
        sw.sparse_hook("TopK(0.01)", None)  # type: ignore[arg-type]


def test_swapped_arguments_of_the_optimizer_are_told() -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(sw.errors.AttachError, match=r"takes the model first, and this is SGD"):
        sw.attach(torch.optim.SGD(net.parameters(), lr=0.1), "TopK(0.01)")
