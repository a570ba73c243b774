import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddp_zero import check_shardable
from ddp_zero.core.comm.groups import NoPeers, Peers
from ddp_zero.core.engine import shardable
from ddp_zero.core.local.inner import LocalStep
from ddp_zero.core.local.mixed import read_classes
from ddp_zero.core.step.coupling import CouplingWatch, is_checked_step, values_in
from tests.coupled import ToyByPlace, ToyPreNorm, ToyProdigy, ToyScale
from tests.multiproc.cases import OPTIMIZERS, OptimizerCase
from tests.unit.threads import Peer, on_threads

# When and what


def test_checked_are_early_steps_powers_of_two_and_thousands() -> None:
    assert [step for step in range(1, 70) if is_checked_step(step)] == [*range(1, 9), 16, 32, 64]
    assert [step for step in range(1025, 4001) if is_checked_step(step)] == [2000, 2048, 3000, 4000]


def test_values_are_floats_and_tensors_of_one_element() -> None:
    holder = {
        "lr": 0.5,
        "d": torch.tensor(0.25),
        "sum": torch.tensor([1.0], dtype=torch.bfloat16),
        "nan": float("nan"),
        "zero": -0.0,
        "step": 3,
        "count": torch.tensor(3),
        "on": True,
        "name": "x",
        "none": None,
        "betas": (0.9, 0.99),
        "vector": torch.zeros(2),
        nn.Parameter(torch.zeros(1)): 1.0,
        "learned": nn.Parameter(torch.zeros(1)),
    }
    assert values_in(holder) == {"lr": "0.5", "d": "0.25", "sum": "1.0", "nan": "nan", "zero": "0.0"}


# Between buckets


def watched(peers: Peers | None = None) -> tuple[CouplingWatch, Any]:
    """The watch of a rank, or of a process alone, and its optimizer, with a parameter in each of two groups."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    inner = SGD([{"params": [param]} for param in params], lr=0.1)
    local_step = LocalStep(inner, lambda: inner.param_groups)
    local_step.mirror_to_exposed()  # as when an optimizer is built
    return CouplingWatch(NoPeers() if peers is None else peers, local_step), inner


def step(watch: CouplingWatch, inner: Any, change: Callable[[], object]) -> None:
    """A step of two buckets, between which something changes."""
    watch.step_begins(4)
    watch.note(0, inner.param_groups, (0, 1))
    change()
    watch.note(1, inner.param_groups, (0, 1))
    watch.step_ends(has_failed=False)


def test_a_rank_that_stepped_nothing_of_a_group_takes_its_options_from_others() -> None:
    """As ranks that have no gradient, or no parameter, of the group; also in steps that are not looked at."""

    def body(peer: Peer) -> list[Any]:
        rank, seen = peer.group_rank, []
        stepped = [(0, 1), (1,), ()][rank]
        watch, inner = watched(peer)
        first = inner.param_groups[0]
        first.update(d=1.0, k=0, on=False, mean=torch.tensor(0.5))
        for number in range(1, 11):
            watch.step_begins(number)
            if rank == 0 and number > 1:
                first.update(d=first["d"] / 3, k=number, on=True)
                first["mean"].add_(1)
            watch.note(0, inner.param_groups, stepped)
            watch.step_ends(has_failed=False)
            watch.check()
            seen.append((first["d"], first["k"], first["on"], first["mean"].item()))
        return seen

    first, *others = on_threads(3, body)
    assert others == [first, first]
    assert [type(one) for one in others[1][-1]] == [float, int, bool, float]
    assert others[1][-1][1:] == (10, True, 9.5)


def test_a_step_that_was_not_taken_is_not_compared() -> None:
    """Or a rank would exchange at the next end of backward, where one under Join does something else."""
    watch, inner = watched()
    watch.check()
    watch.step_begins(2)
    watch.note(0, inner.param_groups, (0, 1))
    inner.param_groups[0]["lr"] = 0.2
    watch.note(1, inner.param_groups, (0, 1))
    watch.check()
    assert watch.next_step <= 2, "the step that is taken in its place is"


def test_a_wrapped_optimizer_is_looked_at() -> None:
    watch, inner = watched()
    inner.base = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner.base.state["mean"] = torch.tensor(0.0)
    step(watch, inner, lambda: inner.base.state.update(mean=torch.tensor(1.0)))
    with pytest.raises(RuntimeError, match=r"'base\.mean'"):
        watch.check()


# check_shardable


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_optimizers_that_treat_parameters_one_by_one_can_be_sharded(case: OptimizerCase) -> None:
    check_shardable(case.build, steps=4 if case.matrices_only else 12, **case.options)  # Muon is slow


@pytest.mark.parametrize(
    ("optimizer_class", "found"),
    [
        (ToyProdigy, r"differs by up to \S+ after step 1, stepped by 2 owners"),
        (ToyScale, r"parameter 0 of shape \[16, 8\] differs"),
        (ToyPreNorm, r"parameter 0 of shape \[16, 8\] differs"),
    ],
)
def test_optimizers_that_couple_parameters_are_refused(optimizer_class: type[Optimizer], found: str) -> None:
    with pytest.raises(NotImplementedError, match=found) as caught:
        check_shardable(optimizer_class)
    assert f"Use {optimizer_class.__name__} unsharded" in str(caught.value)


def test_a_coupling_may_depend_on_an_option() -> None:
    with pytest.raises(NotImplementedError, match="parameter 0"):
        check_shardable(ToyPreNorm, max_norm=10)
    check_shardable(ToyPreNorm, max_norm=10**9)


def test_a_value_in_the_group_counts_before_it_has_changed_a_parameter() -> None:
    class Late(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.param_groups[0]["seen"] = float(len(self.param_groups[0]["params"]))

    with pytest.raises(NotImplementedError, match=r"option 'seen' of the group is \d+\.0 instead of 13\.0"):
        check_shardable(Late, lr=0.1)


def test_drawing_from_a_global_generator_is_refused() -> None:
    class Noisy(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in (param for group in self.param_groups for param in group["params"]):
                param.add_(torch.randn_like(param))

    with pytest.raises(NotImplementedError, match="differs by up to"):
        check_shardable(Noisy, lr=0.1)


def test_random_states_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    check_shardable(SGD, lr=0.1)
    with pytest.raises(NotImplementedError):
        check_shardable(ToyProdigy)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_an_optimizer_that_fails_on_a_part_of_the_parameters_is_refused_with_its_error() -> None:
    class AllOrNothing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if len(self.param_groups[0]["params"]) < 7:
                raise IndexError("no seventh")
            super().step(closure)

    with pytest.raises(NotImplementedError, match=r"IndexError: no seventh, when stepped by 2 owners"):
        check_shardable(AllOrNothing, lr=0.1)


def test_check_shardable_refuses_wrong_arguments() -> None:
    with pytest.raises(NotImplementedError, match="LBFGS"):
        check_shardable(torch.optim.LBFGS)
    with pytest.raises(TypeError, match="lrr"):
        check_shardable(SGD, lrr=0.1)
    with pytest.raises(ValueError, match="Expected at least 1 step, got 0"):
        check_shardable(SGD, steps=0)
    with pytest.raises(ValueError, match="Expected at least 3 shapes, one for each of up to 3 owners, got 2"):
        check_shardable(SGD, shapes=[(2, 2), (3, 3)])
    with pytest.raises(ValueError, match="2D"):
        check_shardable(torch.optim.Muon, shapes=[(2, 2), (3,), (4,)])
    check_shardable(torch.optim.Muon, shapes=[(2, 2), (3, 1), (4, 2)])
    with pytest.raises(TypeError, match="Expected optimizer_class to be"):
        check_shardable("SGD")  # type: ignore[arg-type]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    tries: list[Any] = []
    run = shardable.try_class

    def check(*args: Any) -> None:
        tries.append(args)
        run(*args)

    monkeypatch.setattr(shardable, "refusals", {})
    monkeypatch.setattr(shardable, "try_class", check)
    return tries


def test_an_unknown_class_is_tried_once_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = _counted(monkeypatch)
    for _ in range(2):
        for options in ({"max_norm": 1.0}, {"max_norm": 2.0, "lr": 1e-3}):
            with pytest.raises(NotImplementedError, match=r"got different results of ToyPreNorm.*after step 1"):
                shardable.check_unknown(ToyPreNorm, options)
    assert len(tries) == 2
    with torch.device("meta"), pytest.raises(NotImplementedError, match="ToyPreNorm"):
        check_shardable(ToyPreNorm)  # wherever tensors are made by default
    tries.pop()
    shardable.check_unknown(SGD, {"lr": 0.1})  # torch's own
    shardable.check_unknown(partial(ToyPreNorm), {})  # a function
    shardable.check_unknown(ToyPreNorm, {"max_norm": object()})  # no number
    assert len(tries) == 2
    shardable.check_unknown(ToyPreNorm, {"colour": "red"})  # the constructor will say so
    assert len(tries) == 3


def test_an_unknown_class_is_tried_with_the_keys_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = _counted(monkeypatch)
    params = [torch.zeros(3) for _ in range(4)]
    rates = [{"params": params, "lr": lr, "weight": 0.0} for lr in (0.1, 0.2, 0.3, 0.0)]
    for _ in range(2):
        shardable.check_unknown(ToyByPlace, {}, [{"params": params}])
        shardable.check_unknown(ToyByPlace, {}, rates)
    assert len(tries) == 3, "once, and in two orders with keys; rates count as one but for that of 0"
    assert [len(keys) for _, _, keys, *_ in tries] == [1, 2, 2]
    shardable.check_unknown(ToyByPlace, {}, [{"params": params, "by_place": object()}])  # the class's own matter
    for own in ({"by_place": True}, {"scales": [1.0, 2.0, 3.0, 4.0]}):
        for groups in ([own], [{"lr": 1.0}, own], [own, {"lr": 1.0}]):
            with pytest.raises(NotImplementedError, match=r"different results of ToyByPlace.*\[ZERO-112\]$"):
                shardable.check_unknown(ToyByPlace, {}, [{"params": params, **keys} for keys in groups])


def test_each_class_is_tried_with_the_keys_of_its_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = _counted(monkeypatch)
    groups = [{"params": [torch.zeros(3)], "optimizer_class": ToyByPlace}, {"params": [torch.zeros(2)], "by_place": 1}]
    read, kind = read_classes(groups, SGD)
    shardable.check_unknown_classes(kind, {"lr": 0.1}, read)
    assert len(tries) == 1
    groups[0]["by_place"] = True
    read, kind = read_classes(groups, SGD)
    with pytest.raises(NotImplementedError, match="ToyByPlace"):
        shardable.check_unknown_classes(kind, {"lr": 0.1}, read)
