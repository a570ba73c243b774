import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_zero.core.local.inner import LocalStep, ParamGroup, copy_options, restrict_group
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


class Recording(Optimizer):
    """Writes down the groups it is asked to step."""

    def __init__(self, params: Any) -> None:
        self.seen: list[list[ParamGroup]] = []
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:
        self.seen.append([dict(group) for group in self.param_groups])
        return "stepped" if closure is None else closure()


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
        self.local.own({self.params[index]: self.params[index] for bucket in buckets for index in bucket})
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


# Owning others


def test_owning_others_changes_the_groups_in_place_in_their_order_and_keeps_their_options() -> None:
    params = make_params()
    groups: Any = [
        {"params": [(f"w{index}", param) for index, param in enumerate(params[:4])], "late": 1},
        {"params": [(f"w{index}", param) for index, param in enumerate(params[4:], start=4)]},
    ]
    exposed = Optimizer(groups, {}).param_groups
    inner = Recording([restrict_group(group, {params[0], params[5]}) for group in exposed])
    local = LocalStep(inner, lambda: exposed)
    identities = [id(group) for group in inner.param_groups]
    options = [options_in(group) for group in inner.param_groups]
    local.own({params[index]: params[index] for index in (3, 6, 1, 4, 2)})
    assert [id(group) for group in inner.param_groups] == identities
    assert [group["param_names"] for group in inner.param_groups] == [["w1", "w2", "w3"], ["w4", "w6"]]
    assert [list(map(id, group["params"])) for group in inner.param_groups] == [
        [id(params[index]) for index in indices] for indices in ([1, 2, 3], [4, 6])
    ]
    assert [options_in(group) for group in inner.param_groups] == options
    assert [len(group["params"]) for group in exposed] == [4, 3]
    local.own({})
    assert [(group["params"], group["param_names"]) for group in inner.param_groups] == [([], []), ([], [])]


# Closures


def test_the_closure_is_evaluated_once_with_gradients_and_its_loss_reaches_every_bucket() -> None:
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 2.5

    sharded = Sharded(Counting, make_params(), BUCKETS["three"])
    with torch.no_grad():
        assert sharded.local.begin(closure) == 2.5
        assert [sharded.local.step(bucket) for bucket in range(len(sharded.members))] == [2.5, 2.5, 2.5]
        sharded.local.end()
    assert calls == [True]


def test_a_rank_that_owns_nothing_evaluates_its_closure_once_too() -> None:
    calls: list[int] = []
    sharded = Sharded(Counting, make_params(), [[], []])
    assert sharded.step(lambda: calls.append(1)) == [None, None]
    assert calls == [1]
    assert sharded.exposed[0]["k"] == 1


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


def test_without_a_closure_the_inner_optimizer_gets_none_and_its_result_is_returned() -> None:
    assert Sharded(Recording, make_params(), [[0], [], [1]]).step() == ["stepped", None, "stepped"]


def test_keyword_arguments_reach_the_inner_step() -> None:
    class Scaled(Recording):
        def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
            return scale

    sharded = Sharded(Scaled, make_params(), [[0]])
    sharded.local.begin(None)
    with sharded.local.giving({"scale": 4.0}):
        assert sharded.local.step(0) == sharded.local.result == 4.0
    assert sharded.local.step(0) == sharded.local.result == 1.0


# Options


def test_what_the_user_sets_adds_and_removes_outside_is_what_a_step_sees() -> None:
    sharded = Sharded(Recording, make_params(), BUCKETS["three"])
    sharded.exposed[0]["extra"] = 7
    sharded.step()
    del sharded.exposed[0]["extra"]
    sharded.exposed[1]["lr"] = 0.5
    sharded.step()
    assert isinstance(sharded.inner, Recording)
    options = [[options_in(group) for group in groups] for groups in sharded.inner.seen]
    assert options[:3] == [[{"lr": 1.0, "extra": 7}, {"lr": 0.03}]] * 3
    assert options[3:] == [[{"lr": 1.0}, {"lr": 0.5}]] * 3


def test_what_a_step_adds_and_removes_shows_outside_and_in_the_inner_groups() -> None:
    sharded = Sharded(CountingWhereItSteps, make_params(), BUCKETS["three"])
    for group in sharded.exposed:
        group["warm"] = True
    set_gradients(sharded.params, 1)
    for param in sharded.params[4:]:
        param.grad = None
    sharded.step()
    expected = [{"lr": 0.1, "trained": 1, "k": 1}, {"lr": 0.03, "warm": True, "k": 1}]
    assert [options_in(group) for group in sharded.exposed] == expected
    assert [options_in(group) for group in sharded.inner.param_groups] == expected


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS.keys())
def test_a_groups_options_come_from_a_bucket_that_had_its_parameters(buckets: list[list[int]]) -> None:
    sharded = Sharded(CountingWhereItSteps, make_params(), [*buckets[::-1], []])
    set_gradients(sharded.params, 1)
    sharded.step()
    assert [group["trained"] for group in sharded.exposed] == [1, 1]


def test_a_rank_that_owns_nothing_takes_one_empty_step() -> None:
    sharded = Sharded(Recording, make_params(), [[], []])
    sharded.step()
    assert isinstance(sharded.inner, Recording)
    assert [[group["params"] for group in groups] for groups in sharded.inner.seen] == [[[], []]]


def test_a_rank_that_owns_something_takes_no_empty_step() -> None:
    sharded = Sharded(Recording, make_params(), [[], [2], []])
    sharded.step()
    assert isinstance(sharded.inner, Recording)
    assert [[len(group["params"]) for group in groups] for groups in sharded.inner.seen] == [[1, 0]]


def test_names_follow_their_parameters_into_buckets_and_stay_outside() -> None:
    params = make_params()
    named: Any = [(f"w{index}", param) for index, param in enumerate(params)]
    exposed = Optimizer(named, {}).param_groups
    inner = Recording([restrict_group(exposed[0], {params[index] for index in (5, 1, 3)})])
    local = LocalStep(inner, lambda: exposed)
    local.bind({0: {params[1], params[5]}, 1: {params[3]}})
    local.mirror_to_exposed()
    local.begin(None)
    local.step(0)
    local.step(1)
    local.end()
    assert [groups[0]["param_names"] for groups in inner.seen] == [["w1", "w5"], ["w3"]]
    assert inner.param_groups[0]["param_names"] == ["w1", "w3", "w5"]
    assert exposed[0]["param_names"] == [f"w{index}" for index in range(7)]
    assert len(exposed[0]["params"]) == 7


def test_a_restricted_group_is_a_copy_in_the_groups_order() -> None:
    params = make_params()
    group: ParamGroup = {"params": list(params[:3]), "param_names": ["a", "b", "c"], "lr": 1.0}
    restricted = restrict_group(group, {params[2], params[0], params[6]})
    assert [id(param) for param in restricted["params"]] == [id(params[0]), id(params[2])]
    assert (restricted["param_names"], restricted["lr"]) == (["a", "c"], 1.0)
    restricted["lr"] = 2.0
    assert (group["lr"], len(group["params"])) == (1.0, 3)


def test_copied_options_replace_the_old_ones_in_the_same_order_around_the_groups_own_parameters() -> None:
    target: ParamGroup = {"stale": 1, "params": [1], "param_names": ["mine"], "lr": 0.1}
    copy_options({"lr": 0.5, "params": [2, 3], "new": 4, "param_names": ["x", "y"]}, target)
    assert list(target.items()) == [("lr", 0.5), ("params", [1]), ("new", 4), ("param_names", ["mine"])]


def test_a_group_without_names_gets_none_from_a_group_that_has_them() -> None:
    target: ParamGroup = {"params": [1]}
    copy_options({"params": [2], "param_names": ["x"], "lr": 0.5}, target)
    assert target == {"params": [1], "lr": 0.5}


# What torch puts around a step


class Doubling(SGD):
    """A step of its own under the names of torch's."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)

    functools.update_wrapper(step, SGD.step)


def _stepped_once(build: Build) -> tuple[Sharded, list[Tensor]]:
    params: list[Tensor] = [*make_params()]
    set_gradients(params, 1)
    sharded = Sharded(build, params, [[0, 1, 2], [3, 4, 5, 6]])
    return sharded, params


def test_its_own_hooks_run_for_each_bucket_and_global_ones_are_left_to_the_users_optimizer() -> None:
    sharded, _ = _stepped_once(partial(SGD, lr=0.1))
    seen: list[str] = []
    sharded.inner.register_step_pre_hook(lambda *_: seen.append("before"))
    sharded.inner.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    try:
        with torch.no_grad():
            sharded.step()
    finally:
        everywhere.remove()
    assert seen == ["before", "after"] * 2


def test_a_profiler_sees_the_range_of_each_bucket_and_without_one_bits_are_the_same() -> None:
    (plain, expected), (profiled, found) = (_stepped_once(partial(AdamW, lr=0.1, fused=True)) for _ in range(2))
    with torch.no_grad():
        plain.step()
        with torch.profiler.profile() as profile:
            profiled.step()
    names = [event.name for event in profile.events() or ()]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert all(map(torch.equal, expected, found))


def test_a_step_that_wraps_torchs_is_not_passed_over() -> None:
    (doubled, twice), (single, once) = (_stepped_once(partial(kind, lr=0.1)) for kind in (Doubling, SGD))
    before = [param.detach().clone() for param in once]
    with torch.no_grad():
        doubled.step()
        single.step()
    for one, two, start in zip(once, twice, before, strict=True):
        torch.testing.assert_close(two - start, 2 * (one - start))


def test_a_step_with_gradients_on_leaves_no_graph() -> None:
    sharded, params = _stepped_once(partial(SGD, lr=0.1, momentum=0.9))
    with torch.enable_grad():
        sharded.step()
    assert all(param.is_leaf and param.requires_grad for param in params)
    assert not any(state["momentum_buffer"].requires_grad for state in sharded.inner.state.values())
