import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddp_zero import check_shardable
from ddp_zero.core.comm.groups import Alone, Peers
from ddp_zero.core.engine import shardable
from ddp_zero.core.local.inner import LocalStep
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.coupling import CouplingWatch, is_looked_at, values_in
from tests import HANG
from tests.coupled import ToyPreNorm, ToyProdigy, ToyScale
from tests.multiproc.cases import OPTIMIZERS, OptimizerCase

# When and what


def test_steps_that_are_looked_at() -> None:
    assert [step for step in range(1, 70) if is_looked_at(step)] == [*range(1, 9), 16, 32, 64]
    assert [step for step in range(1025, 4001) if is_looked_at(step)] == [2000, 2048, 3000, 4000]


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


# Between buckets and between ranks


class Together:
    """Ranks of one process, each a thread."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=HANG)
        self.texts = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class Member:
    def __init__(self, together: Together, rank: int) -> None:
        self._together = together
        self.group_rank = GroupRank(rank)
        self.world_size = together.world_size
        self.exchanges = 0

    def name(self, group_rank: GroupRank) -> str:
        return f"rank {group_rank}"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        self.exchanges += 1
        return self._together.exchange(self.group_rank, list(values))

    def all_gather_text(self, text: str) -> list[str]:
        self.exchanges += 1
        return self._together.exchange(self.group_rank, text)


def on_ranks(world_size: int, body: Callable[[Member], None]) -> list[str]:
    """What each rank has raised, or nothing."""
    together, errors = Together(world_size), [""] * world_size

    def run(rank: int) -> None:
        try:
            body(Member(together, rank))
        except RuntimeError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    return errors


def optimizer_with(groups: int = 2, grads: bool = True) -> Optimizer:
    params = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    if grads:
        for param in params:
            param.grad = torch.ones(2)
    return SGD([{"params": [param]} for param in params], lr=0.1)


def watch_over(peers: Peers, inner: Optimizer) -> CouplingWatch:
    local_step = LocalStep(inner, lambda: inner.param_groups)
    local_step.mirror_to_exposed()  # as when an optimizer is built
    return CouplingWatch(peers, local_step)


def test_ranks_that_agree_go_on_after_one_small_exchange() -> None:
    members = []

    def body(member: Member) -> None:
        members.append(member)
        watch = watch_over(member, inner := optimizer_with())
        for step in range(1, 12):
            watch.step_begins(step)
            watch.note(0, inner.param_groups)
            watch.step_ends(has_failed=False)
            watch.check()

    assert on_ranks(3, body) == [""] * 3
    assert [member.exchanges for member in members] == [8] * 3  # none in steps 9 to 11


def test_every_rank_hears_of_a_difference_between_two() -> None:
    def body(member: Member) -> None:
        watch = watch_over(member, inner := optimizer_with())
        inner.param_groups[1]["d"] = 0.5 + 0.25 * (member.group_rank == 2)
        watch.step_begins(1)
        watch.note(0, inner.param_groups)
        watch.step_ends(has_failed=False)
        watch.check()

    errors = on_ranks(3, body)
    assert len(set(errors)) == 1
    assert "'d', an option of group 1, to be the same" in errors[0]
    assert "got 0.5 on rank 0 and 0.75 on rank 2" in errors[0]
    assert "SGD unsharded" in errors[0]
    assert "check_shardable" in errors[0]


def test_every_rank_hears_of_a_difference_between_the_buckets_of_one() -> None:
    def body(member: Member) -> None:
        watch = watch_over(member, inner := optimizer_with())
        watch.step_begins(1)
        for bucket in (0, 1):
            if member.group_rank == 1:
                inner.scale = torch.tensor(float(bucket))  # type: ignore[attr-defined]
            watch.note(bucket, inner.param_groups)
        if member.group_rank == 1:
            inner.scale = 0.0  # type: ignore[attr-defined]
        watch.step_ends(has_failed=False)
        watch.check()

    errors = on_ranks(2, body)
    assert len(set(errors)) == 1
    assert "'scale', an attribute or state of the optimizer," in errors[0]
    assert "got 0.0 on bucket 0 of rank 1 and 1.0 on bucket 1 of rank 1" in errors[0]


def test_a_process_alone_compares_its_buckets() -> None:
    watch = watch_over(Alone(), inner := optimizer_with())
    watch.step_begins(4)
    watch.note(0, inner.param_groups)
    inner.param_groups[0]["lr"] = 0.2
    watch.note(1, inner.param_groups)
    watch.step_ends(has_failed=False)
    with pytest.raises(RuntimeError, match=r"'lr', an option of group 0.* bucket 0 of this process .* bucket 1"):
        watch.check()


def test_who_stepped_nothing_of_a_group_takes_over_its_options() -> None:
    found: dict[tuple[int, int], Any] = {}

    def body(member: Member) -> None:
        rank = member.group_rank
        watch = watch_over(member, inner := optimizer_with())
        first = inner.param_groups[0]
        first.update(d=1.0, k=0, on=False, mean=torch.tensor(0.5))
        if rank == 1:
            first["params"][0].grad = None
        if rank == 2:
            first["params"].clear()
            inner.param_groups[1]["params"].clear()
        for step in range(1, 11):
            watch.step_begins(step)
            if rank == 0 and step > 1:
                first.update(d=first["d"] / 3, k=step, on=True)
                first["mean"].add_(1)
            watch.note(0, inner.param_groups)
            watch.step_ends(has_failed=False)
            watch.check()
            found[rank, step] = (first["d"], first["k"], first["on"], first["mean"].item())

    assert on_ranks(3, body) == [""] * 3
    for step in range(1, 11):
        assert found[0, step] == found[1, step] == found[2, step]
        assert [type(one) for one in found[2, step]] == [float, int, bool, float]
    assert found[2, 10][1:] == (10, True, 9.5)


def test_a_step_that_was_not_taken_is_not_compared() -> None:
    """Or a rank would exchange at the next end of backward, where one under Join does something else."""

    def body(member: Member) -> None:
        watch = watch_over(member, inner := optimizer_with())
        watch.step_begins(1)
        watch.check()
        watch.step_begins(2)
        watch.note(0, inner.param_groups)
        watch.check()
        assert member.exchanges == 0

    assert on_ranks(2, body) == ["", ""]


def test_an_option_that_only_some_ranks_have_is_no_difference() -> None:
    def body(member: Member) -> None:
        watch = watch_over(member, inner := optimizer_with())
        inner.param_groups[0].update({"a": 1.0} if member.group_rank else {"b": 2.0, "nan": float("nan")})
        watch.step_begins(1)
        watch.note(0, inner.param_groups)
        watch.step_ends(has_failed=False)
        watch.check()

    assert on_ranks(2, body) == ["", ""]


def test_a_wrapped_optimizer_is_looked_at() -> None:
    def body(member: Member) -> None:
        watch = watch_over(member, inner := optimizer_with())
        inner.base = wrapped = optimizer_with()  # type: ignore[attr-defined]
        wrapped.state["mean"] = torch.tensor(float(member.group_rank))  # type: ignore[index]
        watch.step_begins(1)
        watch.note(0, inner.param_groups)
        watch.step_ends(has_failed=False)
        watch.check()

    errors = on_ranks(2, body)
    assert "'base.mean'" in errors[0]
    assert errors[0] == errors[1]


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
def test_optimizers_that_couple_parameters_cannot(optimizer_class: type[Optimizer], found: str) -> None:
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


def test_arguments_of_check_shardable() -> None:
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


def test_an_unknown_class_is_tried_once_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[str, Any]] = []

    def check(optimizer_class: Any, **options: Any) -> None:
        tries.append(options)
        check_shardable(optimizer_class, **options)

    monkeypatch.setattr(shardable, "refusals", {})
    monkeypatch.setattr(shardable, "check_shardable", check)
    for _ in range(2):
        for options in ({"max_norm": 1.0}, {"max_norm": 2.0, "lr": 1e-3}):
            with pytest.raises(NotImplementedError, match=r"got different results of ToyPreNorm.*after step 1"):
                shardable.check_unknown(ToyPreNorm, options)
    assert len(tries) == 2
    with torch.device("meta"), pytest.raises(NotImplementedError, match="ToyPreNorm"):
        check_shardable(ToyPreNorm)  # wherever tensors are made by default
    shardable.check_unknown(SGD, {"lr": 0.1})  # torch's own
    shardable.check_unknown(partial(ToyPreNorm), {})  # a function
    shardable.check_unknown(ToyPreNorm, {"max_norm": object()})  # no number
    assert len(tries) == 2
    shardable.check_unknown(ToyPreNorm, {"colour": "red"})  # the constructor will say so
    assert len(tries) == 3
