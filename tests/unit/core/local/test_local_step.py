import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero.core.local.inner import LocalStep, ParamGroup, restrict_group
from ddp_zero.core.local.step_lists import StepLists
from tests.unit.values.trees import assert_same

Build = Callable[[Any], Optimizer]


class Counting(Optimizer):
    """Counts steps in every group and on itself, and lets both change the update, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = 0
        self.scale = 1.0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.calls += 1
        self.scale *= 0.9
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.scale / group["k"])
                    self.state[param]["seen"] = (self.calls, group["k"])
        return loss


class CountingWhereItSteps(Counting):
    """Counts only in groups with a gradient, and removes an option there."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(param.grad is not None for param in group["params"]):
                group["trained"] = group.get("trained", 0) + 1
                group.pop("warm", None)
        return super().step(closure)


class CountingInTensors(Optimizer):
    """Counts in tensors, in place, as optimizers do that can be captured in a graph; the update shows the counts.

    One tensor is its own, one is a group's, and one is shared by all groups, as a default is.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = torch.zeros(())
        super().__init__(params, {"lr": lr, "visits": torch.zeros(())})
        for group in self.param_groups:
            group["t"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["t"] += 1
            group["visits"] += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] / (self.calls * group["t"] + group["visits"]))
                    self.state[param]["seen"] = (self.calls.item(), group["t"].item(), group["visits"].item())


def options_in(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(2 + index, 3, generator=generator)) for index in range(7)]


def groups_of(params: Sequence[Tensor]) -> list[ParamGroup]:
    """Two groups with options of their own."""
    return [{"params": list(params[:4])}, {"params": list(params[4:]), "lr": 0.03}]


def set_gradients(params: Sequence[Tensor], step: int) -> None:
    """Gradients that differ in every step; parameter 2 has none in the first."""
    generator = torch.Generator().manual_seed(step)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = None if index == 2 and step == 0 else grad


class Sharded:
    """One rank's exposed groups, inner optimizer and `LocalStep`, over buckets given as parameter indices."""

    def __init__(self, build: Build, params: Sequence[Tensor], buckets: Sequence[Sequence[int]]) -> None:
        self.params = params
        self.exposed = Optimizer(groups_of(params), {}).param_groups
        owned = {params[index] for bucket in buckets for index in bucket}
        self.inner = build([restrict_group(group, owned) for group in self.exposed])
        self.local = LocalStep(self.inner, lambda: self.exposed)
        self.local.mirror_to_exposed()
        self._bind(buckets)

    def _bind(self, buckets: Sequence[Sequence[int]]) -> None:
        self.local.bind({place: {self.params[i] for i in indices} for place, indices in enumerate(buckets) if indices})
        self.members = [[self.params[index] for index in indices] for indices in buckets]

    def own(self, buckets: Sequence[Sequence[int]]) -> None:
        """Own other parameters from now on; their state has been moved."""
        self.local.reassign({self.params[index]: self.params[index] for bucket in buckets for index in bucket})
        self._bind(buckets)

    def step(self, closure: Callable[[], Any] | None = None) -> list[Any]:
        self.local.begin(closure)
        results = [self._step(bucket, params) for bucket, params in enumerate(self.members)]
        self.local.end()
        return results

    def _step(self, bucket: int, params: list[Tensor]) -> Any:
        """As a runner steps it; in the place of parameters without a bucket there is nothing to try."""
        with torch.no_grad():
            is_stepped = self.local.lists.step(bucket, params, [param.grad for param in params])
        if is_stepped:
            return self.local.loss
        return self.local.step(bucket)


def state_by_index(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[int, Any]:
    return {index: optimizer.state[param] for index, param in enumerate(params) if param in optimizer.state}


# The same numbers

OPTIMIZERS: dict[str, Build] = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": partial(AdamW, lr=0.1, amsgrad=True),
    "AdamW fused": partial(AdamW, lr=0.1, fused=True),
    "counting": Counting,
    "counting where it steps": CountingWhereItSteps,
    "counting in tensors": CountingInTensors,
}

BUCKETS = {
    "one": [[0, 1, 2, 3, 4, 5, 6]],
    "three": [[0, 4], [1, 2, 6], [3, 5]],
    "one each": [[0], [1], [2], [3], [4], [5], [6]],
    "a group at a time": [[4, 5, 6], [0, 1, 2, 3]],
    "empty ones between": [[], [6, 1, 2], [], [0, 3, 4, 5], []],
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS.keys())
def test_stepping_bucket_by_bucket_is_one_plain_step(build: Build, buckets: list[list[int]]) -> None:
    plain_params, params = make_params(), make_params()
    plain, sharded = build(groups_of(plain_params)), Sharded(build, params, buckets)
    for step in range(4):
        set_gradients(plain_params, step)
        set_gradients(params, step)
        plain.step()
        sharded.step()
        assert all(torch.equal(one, other) for one, other in zip(params, plain_params, strict=True))
        assert_same(state_by_index(sharded.inner, params), state_by_index(plain, plain_params))
        for group, expected in zip(sharded.exposed, plain.param_groups, strict=True):
            assert list(group) == list(expected)
            assert_same(options_in(group), options_in(expected))
        assert getattr(sharded.inner, "calls", None) == getattr(plain, "calls", None)
    assert not torch.equal(params[2], make_params()[2])


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS.keys())
def test_a_counter_that_is_a_tensor_counts_once_in_a_step_and_stays_the_same_tensor(buckets: list[list[int]]) -> None:
    sharded = Sharded(CountingInTensors, make_params(), buckets)
    assert isinstance(sharded.inner, CountingInTensors)
    own, outside = sharded.inner.calls, [group["t"] for group in sharded.exposed]
    for _ in range(3):
        sharded.step()
    assert sharded.inner.calls is own
    assert [id(group["t"]) for group in sharded.exposed] == list(map(id, outside))
    assert [count.item() for count in (own, *outside, sharded.exposed[0]["visits"])] == [3, 3, 3, 6]


# Closures


def test_an_optimizer_that_evaluates_the_closure_twice_is_refused_and_left_whole() -> None:
    class Searching(Counting):
        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    sharded = Sharded(Searching, make_params(), BUCKETS["three"])
    whole = sharded.inner.param_groups
    sharded.local.begin(lambda: 1.0)
    with pytest.raises(RuntimeError, match="evaluated the closure a second time"):
        sharded.local.step(0)
    assert sharded.inner.param_groups is whole
    assert [len(group["params"]) for group in whole] == [4, 3]


def test_keyword_arguments_reach_the_inner_step() -> None:
    class Scaled(SGD):
        def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
            return scale

    sharded = Sharded(Scaled, make_params(), [[0]])
    sharded.local.begin(None)
    with sharded.local.with_kwargs({"scale": 4.0}):
        assert sharded.local.step(0) == sharded.local.result == 4.0
    assert sharded.local.step(0) == sharded.local.result == 1.0


# Groups


def test_a_restricted_group_is_a_copy_in_the_groups_order() -> None:
    params = make_params()
    group: ParamGroup = {"params": list(params[:3]), "param_names": ["a", "b", "c"], "lr": 1.0}
    restricted = restrict_group(group, {params[2], params[0], params[6]})
    assert [id(param) for param in restricted["params"]] == [id(params[0]), id(params[2])]
    assert (restricted["param_names"], restricted["lr"]) == (["a", "c"], 1.0)
    restricted["lr"] = 2.0
    assert (group["lr"], len(group["params"])) == (1.0, 3)


# What torch puts around a step


def _stepped_once(build: Build) -> tuple[Sharded, list[Tensor]]:
    params: list[Tensor] = [*make_params()]
    set_gradients(params, 1)
    sharded = Sharded(build, params, [[0, 1, 2], [3, 4, 5, 6]])
    return sharded, params


def test_a_profiler_sees_the_range_of_each_bucket_and_without_one_bits_are_the_same() -> None:
    (plain, expected), (profiled, found) = (_stepped_once(partial(AdamW, lr=0.1, fused=True)) for _ in range(2))
    with torch.no_grad():
        plain.step()
        with torch.profiler.profile() as profile:
            profiled.step()
    names = [event.name for event in profile.events() or ()]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert all(map(torch.equal, expected, found))


def test_lists_that_are_forgotten_hold_no_tensor_of_the_state() -> None:
    """Else a load would hold two states."""
    param = nn.Parameter(torch.ones(3))
    inner, grad = AdamW([param], foreach=True), torch.ones(3)
    param.grad = grad.clone()
    inner.step()
    lists = StepLists(inner, {0: inner.param_groups})
    lists.begin()
    with torch.no_grad():
        assert lists.step(0, [param], [grad])
    state = [weakref.ref(value) for value in inner.state[param].values()]
    inner.state.clear()
    assert all(held() is not None for held in state)
    lists.forget()
    assert not any(held() is not None for held in state)
