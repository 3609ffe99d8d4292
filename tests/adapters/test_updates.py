"""Exchange of updates in one process: any optimizer, what looks see, faults, stop and resume."""

from __future__ import annotations

import copy
import inspect
import io
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import sparsewire as sw
from sparsewire.adapters.attach import _choose
from sparsewire.adapters.optimizer import _first_bad
from sparsewire.digest import seal

Make = Callable[[Any], torch.optim.Optimizer]

SPARSE = "Scheme(TopK(0.05), dense_below=0, dense_1d=False)"


class Net(nn.Module):
    """Has parameters of its own beside those of its parts, a tied weight, and buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(20))
        self.first = nn.Linear(20, 30)
        self.norm = nn.BatchNorm1d(30)
        self.second = nn.Linear(30, 30, bias=False)
        self.tied = nn.Linear(30, 30)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(30, 3)
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs + self.token)))
        result: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.second(hidden)))))
        return result


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Odd(torch.optim.Optimizer):
    """As third parties write them: state that is no tensor, or of no parameter, and `.data`."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "betas": None})
        self.state["calls"] = 0  # type: ignore[index,assignment]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.state["calls"] += 1  # type: ignore[index,operator]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("history", []).append(float(parameter.grad.abs().max()))
                size = group["lr"] / len(state["history"])
                parameter.data = parameter.data - size * parameter.grad.sign()
        return loss


OPTIMIZERS: dict[str, Make] = {
    "nesterov": sgd,
    "one by one": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False, maximize=True),
    "adamw": adamw,
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True),
    "odd": Odd,
}


def pull(net: nn.Module, step: int) -> Tensor:
    """A loss whose gradient differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(8, 20, generator=generator).to(dtype)
    target = torch.randn(8, 3, generator=generator).to(dtype)
    return (net(inputs) - target).square().mean()


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        pull(net, step).backward()
        optimizer.step()


def numbers(net: nn.Module) -> Tensor:
    """What the parameters hold now."""
    return torch.cat([p.detach().double().reshape(-1) for p in net.parameters()])


def shared(net: nn.Module, wire: sw.SparseUpdates) -> Tensor:
    with wire.shared_weights():
        return numbers(net)


def start(
    make: Make = adamw, scheme: str = SPARSE, net: nn.Module | None = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer, sw.SparseUpdates]:
    net = net or make_net()
    optimizer = make(net.parameters())
    wire = sw.attach(net, scheme, optimizer=optimizer, communicate="updates", **options)
    return net, optimizer, wire


def residuals(wire: sw.SparseUpdates) -> dict[str, Tensor]:
    return {name: kept["residual"] for name, kept in wire.state_dict()["memory"].items()}


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_a_file(value: Any) -> Any:
    """As saved and loaded, without unpickling anything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, with which there is an exchange thread."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- any optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_alone_and_wholly_ahead_is_the_optimizer_itself(name: str, every: int) -> None:
    """With λ = 1 one rank's live weights x − e are as if all had been sent."""
    plain = make_net()
    train(plain, OPTIMIZERS[name](plain.parameters()), range(9))
    net, optimizer, wire = start(OPTIMIZERS[name], every=every, step_ahead=1.0)
    train(net, optimizer, range(9))
    torch.testing.assert_close(numbers(net), numbers(plain), rtol=1e-4, atol=1e-5)
    assert (shared(net, wire) - numbers(net)).abs().max() > 1e-3
    assert (wire.steps, wire.local_step, wire.report().every) == (9 // every, 0, every)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_dense_exchange_is_the_optimizer_itself(delay: Any) -> None:
    plain = make_net()
    train(plain, adamw(plain.parameters()), range(5))
    net, optimizer, wire = start(scheme="Dense()", delay=delay, step_ahead=0.0)
    train(net, optimizer, range(5))
    wire.detach()  # takes in what is under way
    if delay:  # every round began one round behind
        assert (numbers(net) - numbers(plain)).abs().max() > 1e-3
    else:
        torch.testing.assert_close(numbers(net), numbers(plain), rtol=1e-5, atol=1e-6)


def test_update_is_sent_or_kept() -> None:
    """x moves by what was sent, and what was not is in the residual."""
    net, optimizer, wire = start(step_ahead=0.0)
    before = numbers(net)
    train(net, optimizer, range(1))
    moved = before - shared(net, wire)
    kept = residuals(wire)
    held = torch.cat([kept[name].reshape(-1) for name, _ in net.named_parameters()])
    sent = moved != 0
    assert 0.04 < float(sent.double().mean()) < 0.07
    assert not held[sent].any()
    twin = make_net()
    train(twin, adamw(twin.parameters()), range(1))
    torch.testing.assert_close(moved + held, before - numbers(twin), rtol=1e-4, atol=1e-6)


def test_a_list_of_optimizers_groups_and_a_schedule() -> None:
    def make(net: Any) -> tuple[list[torch.optim.Optimizer], Any]:
        groups = [
            {"params": [net.token], "lr": 0.5},
            {"params": [*net.first.parameters(), *net.norm.parameters()]},
        ]
        rest = [net.second.weight, net.tied.bias, *net.last.parameters()]
        optimizers = [torch.optim.SGD(groups, lr=0.05, momentum=0.9), adamw(rest)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]

    def go(net: nn.Module, optimizers: Any, schedulers: Any) -> None:
        for step in range(6):
            for number in range(2):  # accumulates
                (pull(net, 2 * step + number) / 2).backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    plain, net = make_net(), make_net()
    go(plain, *make(plain))
    optimizers, schedulers = make(net)
    wire = sw.attach(net, SPARSE, optimizer=optimizers, every=2, step_ahead=1.0)
    go(net, optimizers, schedulers)
    assert isinstance(wire, sw.SparseUpdates)  # a model without DDP can exchange nothing else
    assert wire.steps == 3
    torch.testing.assert_close(numbers(net), numbers(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("kind", ["lbfgs", "sgd", "odd"])
def test_closures(kind: str, is_named: bool) -> None:
    def make(net: nn.Module) -> Any:
        if kind == "lbfgs":
            return torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        return sgd(net.parameters()) if kind == "sgd" else Odd(net.parameters())

    def go(net: nn.Module, optimizer: Any) -> Tensor:
        for step in range(3):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = pull(net, step)  # noqa: B023
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
            assert float(loss.detach()) > 0
        return numbers(net)

    plain, net = make_net(), make_net()
    expected = go(plain, make(plain))
    optimizer = make(net)
    wire = sw.attach(net, "Dense()", optimizer=optimizer)
    torch.testing.assert_close(go(net, optimizer), expected, rtol=1e-3, atol=1e-4)
    assert wire.steps == 3


def test_frozen_unused_and_empty_parameters() -> None:
    net = make_net()
    net.first.weight.requires_grad_(False)
    net.unused = nn.Parameter(torch.ones(5))
    net.empty = nn.Parameter(torch.ones(0, 3))
    frozen = net.first.weight.clone()
    optimizer = adamw([p for p in net.parameters() if p.requires_grad])
    wire = sw.attach(net, SPARSE, optimizer=optimizer)
    for step in range(3):
        (pull(net, step) + net.empty.sum()).backward()
        optimizer.step()
    assert torch.equal(net.first.weight, frozen)
    assert bool((net.unused == 1).all())
    assert "first.weight" not in residuals(wire)
    assert not residuals(wire)["unused"].any()
    assert wire.steps == 3


def test_outer_optimizer_gets_the_mean_update_as_gradient() -> None:
    net = make_net()
    outer = torch.optim.SGD(net.parameters(), lr=0.5)
    _, optimizer, wire = start(sgd, "Dense()", net, every=2, outer=outer)
    twin = make_net()
    before = numbers(twin)
    train(twin, sgd(twin.parameters()), range(2))
    train(net, optimizer, range(2))
    halfway = before + 0.5 * (numbers(twin) - before)
    torch.testing.assert_close(shared(net, wire), halfway, rtol=1e-5, atol=1e-6)
    assert torch.equal(numbers(net), halfway.float().double()) or wire.step_ahead == 0
    assert all(p.grad is not None for p in net.parameters())  # the user's own are back


def test_an_outer_optimizer_leaves_a_round_under_way_alone() -> None:
    """An outer SGD(lr=1) subtracts the mean, as none does."""
    results = []
    for has_outer in (False, True):
        net = make_net()
        outer = torch.optim.SGD(net.parameters(), lr=1.0) if has_outer else None
        _, optimizer, wire = start(adamw, SPARSE, net, every=2, delay=1, outer=outer)
        train(net, optimizer, range(9))
        results.append((numbers(net), shared(net, wire)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# -- who looks sees the shared weights -----------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", [3, 4, 5])  # the end of a round, and between
def test_all_but_training_sees_the_shared_weights(steps: int, delay: Any) -> None:
    net, optimizer, wire = start(every=3, delay=delay, step_ahead=0.5)
    train(net, optimizer, range(steps))
    live, x = numbers(net), shared(net, wire)
    assert not torch.equal(live, x)
    assert torch.equal(numbers(net), live)  # after shared_weights()
    inputs = torch.randn(8, 20)
    reference = make_net()
    reference.load_state_dict(net.state_dict())
    assert torch.equal(numbers(reference), x)
    part = net.last.state_dict()["bias"]
    assert torch.equal(part, reference.last.bias)
    net.train()(inputs)
    assert torch.equal(numbers(net), live)  # from state_dict() back, to the bit
    net.last.state_dict()
    assert torch.equal(numbers(net), x)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    reference.load_state_dict(buffers, strict=False)
    assert torch.equal(net.eval()(inputs), reference.eval()(inputs))
    assert torch.equal(numbers(net), x)
    net.train()(inputs)
    assert torch.equal(numbers(net), live)
    assert not torch.equal(part, net.last.bias)  # a state dict is no alias of the model
    with pytest.raises(KeyError), wire.shared_weights():
        raise KeyError
    assert torch.equal(numbers(net), live)


def test_looks_do_not_change_the_training() -> None:
    results = []
    for looks in (False, True):
        net, optimizer, wire = start(every=3, delay=1)
        for step in range(9):
            train(net, optimizer, range(step, step + 1))
            if looks:
                net.state_dict()
                net.eval()(torch.randn(8, 20))
                with wire.shared_weights():
                    net.train()
        net(torch.randn(8, 20))
        results.append((numbers(net), shared(net, wire), wire.state_dict()["memory"]))
    assert same(*results)


def test_copies_are_plain_models() -> None:
    """A copy does not touch the model that it was made of; an average is of shared weights."""
    net, optimizer, wire = start(every=2, step_ahead=1.0)
    train(net, optimizer, range(3))
    with wire.shared_weights():
        copied = copy.deepcopy(net)
        average = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    live, x = numbers(net), shared(net, wire)
    assert torch.equal(numbers(copied), x)
    copied.eval()(torch.randn(8, 20))
    copied.load_state_dict({k: v + 1 for k, v in copied.state_dict().items()})
    copied.train()(torch.randn(8, 20))
    assert torch.equal(numbers(net), live)
    train(copied, sgd(copied.parameters()), range(2))
    assert torch.equal(numbers(net), live)
    assert torch.equal(shared(net, wire), x)
    train(net, optimizer, range(3, 5))
    with wire.shared_weights():
        average.update_parameters(net)
    average.update_parameters(net)
    average.module.eval()
    again = sw.attach(copied, SPARSE, optimizer=sgd(copied.parameters()))
    train(copied, again._optimizers[0](), range(0))
    again.detach()


def test_loading_a_model_moves_the_shared_weights() -> None:
    """Also in the middle of a round, and while shared weights are shown; the round begins anew."""
    other = make_net(seed=1)
    for looks in (False, True):
        net, optimizer, wire = start(every=4, step_ahead=0.5)
        train(net, optimizer, range(6))
        if looks:
            net.eval()(torch.randn(8, 20))
        net.load_state_dict(other.state_dict())
        assert torch.equal(shared(net, wire), numbers(other))
        net.train()(torch.randn(8, 20))
        kept = residuals(wire)
        held = torch.cat([kept[name].reshape(-1) for name, _ in net.named_parameters()])
        ahead = numbers(other).float() - 0.5 * held
        torch.testing.assert_close(numbers(net).float(), ahead, rtol=0, atol=1e-7)


def test_loading_some_parameters_leaves_the_shared_weights_of_the_rest() -> None:
    net, optimizer, _ = start(every=4, step_ahead=0.5)
    train(net, optimizer, range(6))
    x = copy.deepcopy(net.state_dict())
    net.train()(torch.randn(8, 20))  # live again
    net.load_state_dict({"last.bias": torch.ones(3)}, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({"token": torch.zeros(1)}, strict=False)
    net.train()(torch.randn(8, 20))
    after = net.state_dict()
    for name, _ in net.named_parameters():
        expected = torch.ones(3) if name == "last.bias" else x[name]
        assert torch.equal(after[name], expected), name


def test_detach_leaves_shared_weights_and_nothing_else(group: None) -> None:
    net, optimizer, wire = start(every=2, delay=1)
    plain = make_net()
    train(net, optimizer, range(5))
    net.eval()(torch.randn(8, 20))
    thread = wire._rounds.thread
    assert thread is not None
    mean = wire.state_dict()["updates"]["mean"]
    expected = {name: p.detach() - mean[name] for name, p in net.named_parameters()}
    wire.detach()
    assert same({name: p.detach() for name, p in net.named_parameters()}, expected)
    for part, bare in zip(net.modules(), plain.modules(), strict=True):
        for key, hooks in vars(part).items():
            if "hook" in key and isinstance(hooks, dict):
                assert len(hooks) == len(vars(bare)[key]), key
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(each.is_alive() for each in thread._threads)
    net.train()
    train(net, optimizer, range(2))
    after = numbers(net)
    wire.detach()  # once is enough
    assert torch.equal(numbers(net), after)
    assert wire.steps == 2
    sw.attach(net, SPARSE, optimizer=optimizer).detach()


# -- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_raise_changes_nothing(bad: float, with_closure: bool) -> None:
    net, optimizer, wire = start(step_ahead=0.5)
    twin, undisturbed, _ = start(step_ahead=0.5)
    train(net, optimizer, range(3))
    before = copy.deepcopy((net.state_dict(), wire.state_dict(), optimizer.state_dict()))
    net.train()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pull(net, 3)
        loss.backward()
        net.last.weight.grad[1, 5] = bad
        return loss

    if not with_closure:
        closure()
    with pytest.raises(
        sw.errors.NonFiniteError, match=r"at step 3: rank 0 in last\.weight\. No rank took"
    ):
        optimizer.step(closure if with_closure else None)
    assert isinstance(wire.error, sw.errors.NonFiniteError)
    now = (net.state_dict(), wire.state_dict(), optimizer.state_dict())
    parameters = [{n: s[0][n] for n, _ in net.named_parameters()} for s in (now, before)]
    assert same(*parameters)  # BatchNorm has seen another batch
    assert same(now[1:], before[1:])
    train(net, optimizer, range(3, 5))
    train(twin, undisturbed, range(5))
    assert torch.equal(numbers(net), numbers(twin))


@pytest.mark.parametrize("place", ["token", "last.weight"])
def test_skip_leaves_out_this_ranks_local_step(place: str) -> None:
    """Whichever optimizer of several has the bad gradient, none of them steps."""
    results = []
    for is_bad in (False, True):
        net = make_net()
        inner = [adamw([net.token]), sgd([p for p in net.parameters() if p is not net.token])]
        wire = sw.attach(
            net,
            SPARSE,
            optimizer=inner,
            communicate="updates",
            on_nonfinite="skip",
            every=2,
        )
        for step in range(6):
            pull(net, step).backward()
            if step == 3 and is_bad:
                net.get_parameter(place).grad.view(-1)[0] = math.nan
            elif step == 3:
                net.zero_grad()
            for each in inner:
                each.step()
                each.zero_grad()
        states = [each.state_dict() for each in inner]
        results.append((numbers(net), residuals(wire), states, wire.steps))
        assert wire.counters.skipped == is_bad
    assert same(*results)


def test_an_optimizer_that_makes_nan_of_finite_gradients_is_found() -> None:
    """The update is looked at as well."""
    net, optimizer, wire = start(lambda p: torch.optim.SGD(p, lr=0.1), step_ahead=0.0)
    train(net, optimizer, range(2))
    before = (numbers(net), residuals(wire))
    optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(sw.errors.NonFiniteError, match="rank 0 in"):
        train(net, optimizer, range(2, 3))
    assert same((numbers(net), residuals(wire)), before)


def test_bad_gradients_are_found_by_name() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 0, 3, 4))
    for each in (a, b, c):
        each.grad = torch.full_like(each, 1e300)  # beyond float32, and fine
    found = {"a": a, "b": b, "c": c, "d": d}
    assert _first_bad(found) is None
    c.grad[1] = -math.inf  # type: ignore[index]
    assert _first_bad(found) == "c"
    assert _first_bad({"d": d}) is None


def test_grad_scaler_that_leaves_a_step_out() -> None:
    """This rank still takes part in the round, with nothing new."""
    net, twin = make_net(), make_net()
    optimizer = sgd(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wire = sw.attach(net, "Dense()", optimizer=optimizer, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(pull(net, step)).backward()
        if step == 2:
            net.token.grad[0] = math.inf
            before = shared(net, wire)
        scaler.step(optimizer)
        scaler.update()
        assert wire.steps == step + 1
        if step == 2:
            assert torch.equal(shared(net, wire), before)
    assert scaler.get_scale() == 512.0
    plain = sgd(twin.parameters())
    for step in (0, 1, 3):
        train(twin, plain, range(step, step + 1))
    torch.testing.assert_close(numbers(net), numbers(twin), rtol=1e-4, atol=1e-5)
    wire.detach()
    assert scaler.step == torch.amp.GradScaler.step.__get__(scaler)


@pytest.mark.parametrize("first", [0, 1])
def test_one_grad_scaler_of_two_models(first: int) -> None:
    """Both learn of a step that was left out, and either may go first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trained = []
    for _ in range(2):
        net = make_net()
        optimizer = sgd(net.parameters())
        trained.append((net, optimizer, sw.attach(net, SPARSE, optimizer=optimizer, scaler=scaler)))

    def step_all() -> None:
        for net, optimizer, _ in trained:
            scaler.scale(pull(net, 0)).backward()
            net.token.grad[0] = math.nan
            scaler.step(optimizer)
        scaler.update()

    step_all()
    assert [wire.steps for _, _, wire in trained] == [1, 1]
    trained[first][2].detach()
    step_all()
    assert [wire.steps for _, _, wire in trained] == [1 + first, 2 - first]
    trained[1 - first][2].detach()
    step_all()
    assert [wire.steps for _, _, wire in trained] == [1 + first, 2 - first]


# -- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer": None}, "with a list if several step the model"),
        ({"optimizer": []}, "an empty list. Pass the optimizers"),
        ({"optimizer": torch.optim.SGD}, "optimizer must be a torch optimizer such .*not <class"),
        ({"optimizer": [3]}, "optimizer must be a torch optimizer such as .*not 3"),
        ({"optimizer": sgd([nn.Parameter(torch.zeros(1))])}, "none of this model's parameters"),
        ({"every": 0}, "every must be a whole number of at least 1, not 0"),
        ({"every": 1.5}, "every must be a whole number of at least 1, not 1.5"),
        ({"every": True}, "every must be a whole number of at least 1, not True"),
        ({"delay": 2}, "delay must be a whole number from 0 to 1, not 2"),
        ({"delay": True}, "delay must be a whole number from 0 to 1, not True"),
        ({"step_ahead": 1.5}, "step_ahead must be from 0 to 1, or 'auto', not 1.5"),
        ({"step_ahead": -0.1}, "step_ahead must be from 0 to 1, or 'auto', not -0.1"),
        ({"step_ahead": math.nan}, "step_ahead must be from 0 to 1, or 'auto', not nan"),
        ({"step_ahead": True}, "step_ahead must be from 0 to 1, or 'auto', not True"),
        ({"step_ahead": "max"}, "step_ahead must be from 0 to 1, or 'auto', not 'max'"),
        ({"outer": "SGD"}, r"outer must be an optimizer over the model's parameters.*not 'SGD'"),
        ({"outer": sgd([nn.Parameter(torch.zeros(1))])}, "outer does not step token, which trains"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be 'raise' or 'skip', not 'ignore'"),
        ({"scaler": True}, "scaler must be the GradScaler of the training loop, not True"),
        ({"timeout": 0}, "timeout is a number of seconds above 0"),
        ({"communicate": "weights"}, "communicate must be 'gradients' or 'updates', not 'weights'"),
        ({"follow_lr": True}, "follow_lr is an option for communicate='gradients'"),
        (
            {"communicate": "gradients", "every": 2},
            "every is an option for communicate='updates', and this model exchanges gradients",
        ),
        ({"communicate": "gradients"}, r"this Net holds none. Wrap it as DDP\(model\) first"),
        (
            {"communicate": "gradients", "optimizer": []},
            "takes one optimizer, not a list. .*or exchange updates",
        ),
        (
            {"scheme": "Scheme(TopK(0.05), memory=NoMemory())", "step_ahead": 0.5},
            r"needs a residual, and NoMemory\(\) keeps none",
        ),
        (
            {"scheme": "Scheme(TopK(0.05), memory=MomentumCorrection())"},
            r"MomentumCorrection is for communicate='gradients'.*memory=ErrorFeedback\(\)",
        ),
        (
            {"intra_node": 2, "step_ahead": "auto"},
            "step_ahead needs every rank's own residual, and with intra_node=",
        ),
        ({"intra_node_dtype": torch.bfloat16}, "intra_node is not given"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    net = make_net()
    optimizer = adamw(net.parameters())
    wanted = {"scheme": SPARSE, "optimizer": optimizer, "communicate": "updates", **options}
    with pytest.raises(sw.errors.AttachError, match=reason):
        sw.attach(net, **wanted)
    assert not optimizer._optimizer_step_pre_hooks
    sw.attach(net, SPARSE, optimizer=optimizer).detach()  # nothing is left of the attempt


def test_the_training_optimizer_is_no_outer_one() -> None:
    net = make_net()
    optimizer = adamw(net.parameters())
    with pytest.raises(sw.errors.AttachError, match="outer is the optimizer that trains"):
        sw.attach(net, SPARSE, optimizer=optimizer, outer=optimizer)


@pytest.mark.parametrize("kind", [sw.SparseHookState, sw.SparseUpdates])
def test_attach_offers_the_options_of_what_it_returns(kind: type) -> None:
    """Editors show the overloads; types and defaults are those of the class."""
    (offered,) = (
        inspect.signature(each)
        for each in typing.get_overloads(sw.attach)
        if inspect.signature(each).return_annotation == kind.__name__
    )
    own = dict(inspect.signature(kind).parameters)
    given = {name: each for name, each in offered.parameters.items() if name != "communicate"}
    if kind is sw.SparseUpdates:  # which says itself what is wrong without an optimizer
        del own["optimizer"], given["optimizer"]
    assert given == own


def test_other_refusals() -> None:
    net, optimizer, wire = start()
    with pytest.raises(sw.errors.AttachError, match=r"attached already. Call detach\(\)"):
        sw.attach(net, SPARSE, optimizer=optimizer)
    wire.detach()
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        sw.attach(net, SPARSE, optimizer=optimizer, communicate="updates", evry=2)
    with pytest.raises(sw.errors.AttachError, match="needs a module, not list"):
        sw.attach([net], SPARSE, optimizer=optimizer)
    narrow = make_net(dtype=torch.bfloat16)
    outer = sgd(narrow.parameters())
    with pytest.raises(sw.errors.AttachError, match="Keep the weights in float32 and compute"):
        sw.attach(narrow, SPARSE, optimizer=sgd(narrow.parameters()), outer=outer)


@pytest.mark.parametrize(
    ("scheme", "make", "options", "kind"),
    [
        ("TopK(0.05)", sgd, {}, "gradients"),
        ("TopK(0.05)", None, {}, "gradients"),
        ("TopK(0.05)", adamw, {}, "updates"),
        ("TopK(0.05)", torch.optim.Adagrad, {}, "updates"),
        ("Warmup(TopK(0.05), steps=9)", adamw, {}, "updates"),
        ("Dense()", adamw, {}, "gradients"),
        ("TopK(0.05)", sgd, {"every": 2}, "updates"),
        ("TopK(0.05)", sgd, {"step_ahead": 0.0}, "updates"),
        ("TopK(0.05)", adamw, {"follow_lr": True}, "gradients"),
        ("TopK(0.05)", adamw, {"follow_lr": False}, "updates"),
        ("Scheme(TopK(0.05), memory=MomentumCorrection())", adamw, {}, "gradients"),
    ],
)
def test_what_is_exchanged_if_nobody_says(
    scheme: str, make: Any, options: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make and make([nn.Parameter(torch.zeros(1))])
    assert _choose(True, sw.parse(scheme), optimizer, options) == kind
    assert _choose(False, sw.parse(scheme), optimizer, options) == "updates"
    is_told = kind == "updates" and make is not sgd
    assert ("Pass communicate='updates' or 'gradients' to choose" in caplog.text) == is_told


def test_under_ddp(group: None) -> None:
    """Adam gets updates and SGD gradients; detached, DDP takes either, and the hook stays."""
    ddp = DDP(make_net())
    optimizer = adamw(ddp.parameters())
    wire = sw.attach(ddp, SPARSE, optimizer=optimizer)
    assert isinstance(wire, sw.SparseUpdates)
    with pytest.raises(sw.errors.AttachError, match=r"attached already. Call detach\(\)"):
        sw.attach(ddp, SPARSE, optimizer=optimizer)
    train(ddp, optimizer, range(3))
    gradients = [p.grad.clone() for p in ddp.parameters()]  # type: ignore[union-attr]
    assert all(bool(g.count_nonzero() > g.numel() / 2) for g in gradients)  # as they were
    assert wire.steps == 3
    alone, other, _ = start()
    train(alone, other, range(3))
    assert torch.equal(numbers(ddp), numbers(alone))
    wire.detach()
    after = sw.attach(ddp, SPARSE, optimizer=sgd(ddp.parameters()))
    assert isinstance(after, sw.SparseHookState)
    after.detach()


def test_a_taken_hook_is_refused(group: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp = DDP(make_net())
    ddp.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(sw.errors.AttachError, match="one slot for a communication hook"):
        sw.attach(ddp, SPARSE, optimizer=adamw(ddp.parameters()))


# -- stop and resume -----------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "outer": {"outer": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "double": {"dtype": torch.float64},
    "warm-up": {"scheme": "Warmup(Scheme(TopK(0.05), values=QSGD()), steps=3)"},
    "narrow memory": {"scheme": "Scheme(TopK(0.05), memory=ErrorFeedback('bfloat16'))"},
    "owners": {"scheme": "Scheme(TopK(0.05), collective=Sharded())"},
}


def resumable(kind: dict[str, Any], delay: int) -> Any:
    net = make_net(dtype=kind.get("dtype", torch.float32))
    outer = None
    if "outer" in kind:
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    scheme = kind.get("scheme", SPARSE)
    return start(adamw, scheme, net, every=3, delay=delay, outer=outer, step_ahead="auto")


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_as_never_stopped(kind: str, delay: int) -> None:
    """At every local step, and whatever is loaded first."""
    last = 15
    net, optimizer, wire = resumable(KINDS[kind], delay)
    saved, as_it_is = {}, None
    for step in range(last):
        train(net, optimizer, range(step, step + 1))
        if step == 6:
            as_it_is, on_disk = wire.state_dict(), through_a_file(wire.state_dict())
        if 5 <= step + 1 <= 8:
            saved[step + 1] = through_a_file(
                {"net": net.state_dict(), "opt": optimizer.state_dict(), "wire": wire.state_dict()}
            )
    assert same(as_it_is, on_disk)  # the training that went on has not changed it
    buffers = dict(net.named_buffers())
    expected = (numbers(net), shared(net, wire), wire.state_dict(), buffers)
    for number, state in saved.items():
        for wire_first in (False, True):
            again, optimizer, resumed = resumable(KINDS[kind], delay)
            train(again, optimizer, range(100, 102 + number % 3))  # to be forgotten
            if wire_first:
                resumed.load_state_dict(state["wire"])
            again.load_state_dict(state["net"])
            optimizer.load_state_dict(copy.deepcopy(state["opt"]))  # or it would train on it
            if not wire_first:
                resumed.load_state_dict(state["wire"])
            assert (resumed.steps, resumed.local_step) == (number // 3, number % 3)
            assert same(through_a_file(resumed.state_dict()), state["wire"])
            assert same(again.state_dict(), state["net"])
            train(again, optimizer, range(number, last))
            now = (numbers(again), shared(again, resumed), resumed.state_dict())
            assert same((*now, dict(again.named_buffers())), expected), (number, wire_first)


def test_resume_with_a_thread_and_an_exchange_under_way(group: None) -> None:
    """Loading waits for it, and forgets it."""
    net, optimizer, wire = start(every=2, delay=1)
    train(net, optimizer, range(5))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), wire.state_dict()))
    net.train()
    train(net, optimizer, range(5, 8))
    expected = (numbers(net), wire.state_dict())
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    wire.load_state_dict(saved[2])
    train(net, optimizer, range(5, 8))
    assert same((numbers(net), wire.state_dict()), expected)
    wire.detach()


def _updates(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, "updates": {**state["updates"], **changes}}


def _damaged(kind: str, value: Tensor | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """One of the saved sets of weights, with another token or without it."""

    def damage(state: dict[str, Any]) -> dict[str, Any]:
        weights = copy.deepcopy(state["updates"]["weights"])
        weights[kind]["token"] = value
        return _updates(weights=weights)(state)

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: 3, "not the state of a sparsewire exchange"),
        (lambda state: {}, "not the state of a sparsewire exchange"),
        (lambda state: {**state, "rank": 1, "world_size": 2}, "rank 1 of 2, .* rank 0 of 1"),
        (lambda state: {**state, "memory": {}}, "lacks"),
        (lambda state: {**state, "identity": "TopK(0.5)"}, "attach with the saved scheme"),
        (lambda state: {**state, "local_world_size": 2}, "machines with 2 ranks each"),
        (lambda state: {**state, "updates": None}, "an exchange of gradients. Attach with"),
        (lambda state: {**state, "updates": 5}, "cannot be read"),
        (_updates(every=7), "with every=7, delay=0, and this model has every=3, delay=0"),
        (_updates(delay=1), "does not fit"),  # where did that round begin?
        (_updates(local_step=3), "does not fit"),
        (_updates(local_step="2"), "does not fit"),
        (_updates(step_ahead=1.5), "does not fit"),
        (_updates(step_ahead=math.nan), "does not fit"),
        (_updates(step_ahead=True), "does not fit"),
        (_updates(local_step=True), "does not fit"),
        (_updates(local_step=0.5), "does not fit"),
        (_updates(buffers=torch.zeros(7, dtype=torch.uint8)), "does not fit"),
        (_updates(buffers=3), "cannot be read"),
        (_updates(mean=torch.zeros(3)), "cannot be read"),
        (_updates(weights={}), "does not fit"),  # of the middle of a round
        (_updates(weights=None), "cannot be read"),
        (_damaged("live", torch.zeros(19)), "does not fit"),
        (_damaged("live", torch.full((20,), math.nan)), "of token holds NaN or infinity"),
        (_damaged("live", torch.ones(20, dtype=torch.bool)), "of token is a tensor of another"),
        (_damaged("live", torch.ones(20).to_sparse()), "of token is a tensor of another kind"),
        (_damaged("live", None), "cannot be read"),
        (_updates(outer=None), "has an outer optimizer and this model none, or the other way"),
        (_updates(outer={}), "state of the outer optimizer does not fit"),
        (_updates(outer={"state": {}, "param_groups": []}), "outer optimizer does not fit"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(damage: Any, reason: str) -> None:
    net = make_net()
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9)
    _, optimizer, wire = start(adamw, SPARSE, net, every=3, outer=outer)
    train(net, optimizer, range(4))
    good = copy.deepcopy(wire.state_dict())
    train(net, optimizer, range(4, 8))
    before = copy.deepcopy((numbers(net), wire.state_dict(), outer.state_dict()))
    with pytest.raises(sw.errors.StateError, match=reason):
        wire.load_state_dict(sealed(damage(good)))
    assert same((numbers(net), wire.state_dict(), outer.state_dict()), before)
    train(net, optimizer, range(8, 9))


def sealed(state: Any) -> Any:
    """As if it had been saved so, for what is checked beside the digest."""
    return seal(state) if isinstance(state, dict) and state else state


def test_state_that_changed_since_it_was_saved_is_refused() -> None:
    """Weights, means and an outer optimizer's state are under the digest as well."""
    net = make_net()
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9)
    _, optimizer, wire = start(adamw, SPARSE, net, every=3, delay=1, outer=outer)
    train(net, optimizer, range(7))
    good = wire.state_dict()
    before = copy.deepcopy((numbers(net), wire.state_dict(), outer.state_dict()))
    for find in (
        lambda state: state["memory"]["token"]["residual"],
        lambda state: state["updates"]["weights"]["live"]["token"],
        lambda state: state["updates"]["weights"]["start"]["token"],
        lambda state: state["updates"]["mean"]["token"],
        lambda state: state["updates"]["buffers"],
        lambda state: state["updates"]["outer"]["state"][0]["momentum_buffer"],
    ):
        spoilt = copy.deepcopy(good)
        find(spoilt).view(torch.uint8).view(-1)[3] ^= 1
        for bad in (spoilt, {**good, "format": 99}, {**good, "step": 3}):
            with pytest.raises(sw.errors.StateError, match=r"digest does not match|format 99"):
                wire.load_state_dict(bad)
    assert same((numbers(net), wire.state_dict(), outer.state_dict()), before)


# -- another number of ranks ---------------------------------------------------------------------


def two_ranks(
    steps: int, kind: dict[str, Any], delay: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What two ranks save and the model that they share, each trained alone here."""
    saved, models = [], []
    for rank in range(2):
        net, optimizer, wire = resumable(kind, delay)
        train(net, optimizer, range(100 * rank, 100 * rank + steps))
        saved.append({**wire.state_dict(), "rank": rank, "world_size": 2})
        models.append(through_a_file(net.state_dict()))
    for part in ("mean", "outer", "buffers", "step_ahead"):  # equal on all ranks
        saved[1]["updates"][part] = saved[0]["updates"][part]
    return [through_a_file(seal(state)) for state in saved], models[0]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "owners"])
def test_one_rank_goes_on_where_two_stopped(kind: str, delay: int) -> None:
    """Its residual is the mean of theirs, at the weights that they shared, in any order."""
    saved, model = two_ranks(6, KINDS[kind], delay)
    ends = []
    for wire_first in (False, True):
        net, optimizer, wire = resumable(KINDS[kind], delay)
        train(net, optimizer, range(4))  # to be forgotten
        for is_wire in (wire_first, not wire_first):
            if is_wire:
                wire.load_state_dict(saved, on_world_size_change="resize")
            else:
                net.load_state_dict(model)
        assert (wire.steps, wire.local_step) == (2, 0)
        tolerance = 2.0**-8 if kind == "narrow memory" else 1e-6
        for name, residual in residuals(wire).items():
            mean = sum(state["memory"][name]["residual"].double() for state in saved) / 2
            torch.testing.assert_close(residual.double(), mean, rtol=tolerance, atol=1e-6)
        now = wire.state_dict()["updates"]
        assert same(now["outer"], saved[0]["updates"]["outer"])
        assert same(now["mean"], saved[0]["updates"]["mean"])
        assert now["weights"].keys() == saved[0]["updates"]["weights"].keys()
        assert same(dict(net.state_dict()), model)
        net.train()
        train(net, optimizer, range(6, 12))
        assert wire.steps == 4
        ends.append((numbers(net), shared(net, wire)))
    assert same(*ends)
    assert bool(ends[0][0].isfinite().all())


@pytest.mark.parametrize("delay", [0, 1])
def test_the_middle_of_a_round_is_not_taken_over(delay: int) -> None:
    saved, _ = two_ranks(7, {}, delay)
    net, optimizer, wire = resumable({}, delay)
    train(net, optimizer, range(4))
    before = copy.deepcopy((numbers(net), wire.state_dict()))
    with pytest.raises(sw.errors.StateError, match=r"middle of a round, after 1 of 3 local steps"):
        wire.load_state_dict(saved, on_world_size_change="resize")
    assert same((numbers(net), wire.state_dict()), before)


def test_the_same_number_of_ranks_may_be_given_the_list() -> None:
    """Also in the middle of a round."""
    net, optimizer, wire = resumable({}, 1)
    train(net, optimizer, range(7))
    saved = wire.state_dict()
    train(net, optimizer, range(7, 9))
    wire.load_state_dict([saved], on_world_size_change="resize")
    assert same(wire.state_dict(), saved)


def test_a_list_that_is_not_one_checkpoint_is_refused() -> None:
    (first, second), _ = two_ranks(6, {}, 0)
    gradients = {k: v for k, v in first.items() if k != "updates"}
    _, _, wire = resumable({}, 0)
    before = wire.state_dict()
    cases: list[tuple[Any, str, str]] = [
        ([first, second], "raise", r"a list of 2 states, .* on_world_size_change='resize'"),
        (first, "raise", r"rank 0 of 2, and this is rank 0 of 1: to resume with another number"),
        (first, "resize", "pass the list of all ranks' states and on_world_size_change='resize'"),
        ([first, second], "shrink", "must be 'raise' or 'resize', not 'shrink'"),
        ([], "resize", "the list of states is empty"),
        ([first], "resize", "number 0 of the list is the state of rank 0 of 2, and the list has 1"),
        ([second, first], "resize", "number 0 of the list is the state of rank 1 of 2"),
        ([first, 3], "resize", "not the state of a sparsewire exchange"),
        ([first, {**second, "step": 9}], "resize", "digest does not match"),
        ([first, seal({**second, "step": 9})], "resize", r"differ in step \(2 and 9\)"),
        ([seal({**first, "identity": "x"})] * 2, "resize", "number 1 of the list"),
        ([seal(gradients), seal({**gradients, "rank": 1})], "resize", "an exchange of gradients"),
    ]
    for state, word, reason in cases:
        with pytest.raises(sw.errors.StateError, match=reason):
            wire.load_state_dict(state, on_world_size_change=word)  # type: ignore[arg-type]
    assert same(wire.state_dict(), before)


def test_state_of_gradients_is_refused_and_another_scheme_may_be_let_in(group: None) -> None:
    ddp = DDP(make_net())
    gradients = sw.attach(ddp, SPARSE, optimizer=sgd(ddp.parameters()))
    saved = gradients.state_dict()
    gradients.detach()
    net, optimizer, wire = start()
    with pytest.raises(sw.errors.StateError, match="is from an exchange of gradients"):
        wire.load_state_dict(saved)
    train(net, optimizer, range(3))
    other, _, another = start(scheme="Scheme(RandomK(0.1), dense_below=0, dense_1d=False)")
    with pytest.raises(sw.errors.StateError, match="strict=False to keep the memory"):
        another.load_state_dict(wire.state_dict())
    other.load_state_dict(net.state_dict())
    another.load_state_dict(wire.state_dict(), strict=False)
    assert same(residuals(another), residuals(wire))
    wire.detach()
    another.detach()


def test_numbers_to_read() -> None:
    net, optimizer, wire = start(every=2)
    train(net, optimizer, range(6))
    report = wire.report(layers=True)
    assert (report.steps, report.every, report.world_size, report.bytes_sent) == (3, 2, 1, 0)
    assert {name for name, _, _ in report.layers} == {name for name, _ in net.named_parameters()}
    assert wire.report().layers == ()
    assert wire.stats()["memory_norm"] > 0
    assert wire.scheme == sw.parse(SPARSE)
    assert wire.error is None
