"""The states of ``param.grad`` between passes: shown, absent, mixed and left averages, and sums carried to a pass.

Parameter 0 is this rank's, parameter 1 is rank 1's, and parameter 2 is cut: this rank has the first two of its three
elements.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.backward.owned_sums import ReduceContext
from ddp_zero.core.backward.visible_gradients import VisibleGradients
from ddp_zero.core.local.memory import mark_of
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.plan.ownership import Piece, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.values.placeholders import AbsentGradient

RANK_0, RANK_1 = GroupRank(0), GroupRank(1)
OWN, OTHERS, CUT = 0, 1, 2


class Rank:
    """What `VisibleGradients` knows of rank 0: three parameters of three elements, and sums carried over passes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)]
        self.pieces = [whole(RANK_0, 3), whole(RANK_1, 3), (Piece(RANK_0, 0, 2), Piece(RANK_1, 2, 3))]
        self.shard: Any = SimpleNamespace(
            table=ParameterTable([{"params": self.params, "param_names": ["own", "others", "cut"]}]),
            comm=SimpleNamespace(group_rank=RANK_0, world_size=2, name=lambda rank: f"rank {rank}"),
            binding=SimpleNamespace(pieces=self.pieces),
            masters=SimpleNamespace(wants=lambda index: dtype is not torch.float32),
            param_groups=[{"params": self.params}],
        )
        self.shard.stepped = stepped = StepTargets(self.shard.table, has_masters=False)
        stepped.create(CUT, None, slice(0, 2))
        self.carried: dict[int, Tensor] = {}
        context = SimpleNamespace(shard=self.shard, carried=self.carried, where="rank 0")
        self.visible = VisibleGradients(cast(ReduceContext, context))
        self.visible.follow_owners({CUT: slice(0, 2)})

    def begin(self, reduces: bool = True) -> list[Tensor]:
        """A backward pass begins; returns the parameters whose gradients stay in ``param.grad``."""
        self.visible.take_out(reduces)
        return [param for param in self.params if param.grad is not None]

    def show_all(self) -> None:
        """An average of ones, as after a reduced pass."""
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.visible.show(OWN, torch.ones_like(self.params[OWN]))
        self.visible.show(CUT, torch.ones(2, dtype=self.params[CUT].dtype))
        self.visible.hide([OTHERS], was_consumed=False)


def held(param: Tensor) -> Any:
    """The values of ``param.grad``, of this rank's part of it, or why there are none."""
    grad = param.grad
    if not isinstance(grad, AbsentGradient):
        return None if grad is None else grad.tolist()
    if grad.part is not None:
        return ("part", grad.part.tolist())
    return "consumed" if grad.consumed else "absent"


# Shown


@pytest.mark.parametrize(
    ("index", "owners"),
    [(OTHERS, r"'others' .* keeps it on rank 1 only"), (CUT, "on rank 0 to rank 1, each a part of it, only")],
)
def test_a_placeholder_names_the_ranks_that_have_the_gradient(index: int, owners: str) -> None:
    rank = Rank()
    rank.params[index].grad = torch.ones(3)
    rank.visible.hide([index], was_consumed=False)
    with pytest.raises(RuntimeError, match=rf"{owners} \(this is rank 0\).*\[ZERO-401\]"):
        rank.params[index].grad.add(1)  # type: ignore[union-attr]


def test_a_consumed_gradient_says_that_the_step_has_used_it_up() -> None:
    rank = Rank()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.hide([OWN], was_consumed=True)
    with pytest.raises(RuntimeError, match=r"used up the gradient of parameter 0 'own' .*\[ZERO-402\]"):
        rank.params[OWN].grad.add(1)  # type: ignore[union-attr]


def test_placeholders_are_reused_until_owners_change() -> None:
    rank = Rank()

    def hidden() -> Tensor | None:
        rank.params[OTHERS].grad = torch.ones(3)
        rank.visible.hide([OTHERS], was_consumed=False)
        return rank.params[OTHERS].grad

    first = hidden()
    assert hidden() is first
    rank.pieces[OTHERS] = whole(RANK_0, 3)
    rank.visible.follow_owners({})
    after = hidden()
    assert after is not first
    assert "on rank 0 only" in repr(after)


# Taken out and carried over


def test_a_pass_takes_averages_out_for_the_next_sum() -> None:
    rank = Rank()
    rank.show_all()
    shown = rank.params[OWN].grad
    assert rank.begin() == []
    assert rank.carried[OWN] is shown
    assert {index: total.tolist() for index, total in rank.carried.items()} == {OWN: [1, 1, 1], CUT: [1, 1]}
    assert [param.grad for param in rank.params] == [None] * 3
    assert [rank.visible.was_taken(index) for index in (OWN, OTHERS, CUT)] == [True] * 3, "absence too"


@pytest.mark.parametrize("is_dropped_by", ["the user", "forget_all"])
def test_dropped_averages_are_in_no_further_sum(is_dropped_by: str) -> None:
    rank = Rank()
    rank.show_all()
    for param in rank.params if is_dropped_by == "the user" else []:
        param.grad = None
    if is_dropped_by == "forget_all":  # as zero_grad(set_to_none=False): zeroed, and this rank's own from now on
        rank.visible.forget_all()
        for param in (rank.params[OTHERS], rank.params[CUT]):
            param.grad = None
    left = rank.begin()
    assert not rank.carried
    assert left == ([] if is_dropped_by == "the user" else [rank.params[OWN]])


# Put back


def test_a_pass_that_was_not_reduced_and_added_nothing_changes_nothing() -> None:
    rank = Rank()
    rank.show_all()
    for _ in range(3):
        rank.begin()
        rank.visible.put_back()
        assert [held(param) for param in rank.params] == [[1, 1, 1], "absent", ("part", [1, 1])]
        assert not rank.carried
        assert not rank.visible.was_taken(OWN)


@pytest.mark.parametrize("index", [OWN, OTHERS, CUT])
def test_a_local_gradient_is_added_to_the_average_and_never_averaged_again(index: int) -> None:
    rank = Rank()
    rank.show_all()
    rank.begin()
    rank.params[index].grad = torch.tensor([1.0, 2.0, 3.0])
    rank.visible.put_back()
    assert held(rank.params[index]) == {OWN: [2, 3, 4], OTHERS: "absent", CUT: ("part", [2, 3])}[index]
    assert rank.visible.local_marks == {index: mark_of(torch.tensor([1.0, 2.0, 3.0]))}
    name = ("own", "others", "cut")[index]
    with pytest.raises(RuntimeError, match=rf"'{name}' .*mixes a local backward pass.*rank 0.*\[ZERO-404\]"):
        rank.begin()


def test_a_gradient_stays_mixed_when_a_later_average_is_shown_until_it_is_dropped() -> None:
    rank = Rank()
    rank.show_all()
    rank.begin()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.put_back()
    rank.visible.show(OWN, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        rank.begin()
    rank.visible.forget_all()
    assert not rank.visible.local_marks
    rank.visible.show(OWN, torch.ones(3))
    rank.begin()
    assert rank.visible.was_taken(OWN)


# Refused


def test_a_further_pass_after_a_step_inside_backward_is_refused() -> None:
    rank = Rank()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.hide([OWN], was_consumed=True)
    with pytest.raises(RuntimeError, match=r"parameter 0 'own' .*before the next backward pass.*\[ZERO-403\]"):
        rank.begin()
    assert held(rank.params[OWN]) == "consumed", "it says so until it is dropped"


@pytest.mark.parametrize("index", [OWN, OTHERS, CUT])
def test_a_pass_under_no_sync_on_top_of_averages_is_refused(index: int) -> None:
    rank = Rank()
    rank.show_all()
    for other in {OWN, OTHERS, CUT} - {index}:
        rank.params[other].grad = None
    with pytest.raises(RuntimeError, match=rf"ddp.no_sync\(\) .*parameter {index} .*\[ZERO-404\]"):
        rank.begin(reduces=False)


def test_an_edit_belongs_to_the_gradients_that_were_shown() -> None:
    """A user who keeps a gradient over ``zero_grad()`` and changes it does not contradict an earlier edit."""
    rank, total = Rank(torch.bfloat16), torch.tensor([1.0 + 2.0**-12, 2.0 + 2.0**-11, 3.0])
    shown = total.bfloat16()
    rank.visible.show(OWN, shown, total)
    assert rank.visible.editable(OWN) is total
    rank.visible.forget_all()
    total.add_(1)
    shown.add_(2)
    rank.begin()
    assert not rank.carried
    assert rank.params[OWN].grad is shown


# Left in the reducer's memory, which later passes fill


def left() -> tuple[Rank, Tensor]:
    rank = Rank()
    grad = rank.params[OWN].grad = torch.ones(3)
    rank.visible.leave(OWN)
    return rank, grad


def test_a_left_average_is_carried_in_memory_of_its_own() -> None:
    rank, grad = left()
    rank.begin()
    grad.fill_(9)  # by the reducer, in the next pass
    assert rank.carried[OWN].tolist() == [1, 1, 1]
    assert rank.params[OWN].grad is None


def test_a_left_average_comes_back_as_it_was() -> None:
    rank, grad = left()
    for _ in range(2):
        rank.begin()
        rank.visible.put_back()
        assert rank.params[OWN].grad is grad
    rank.begin()
    assert OWN in rank.carried


def test_a_left_average_takes_up_a_local_gradient_and_is_mixed() -> None:
    rank, _ = left()
    rank.begin()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.put_back()
    assert held(rank.params[OWN]) == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        rank.begin()


def test_nothing_is_left_where_there_is_no_gradient() -> None:
    rank = Rank()
    rank.visible.leave(OWN)
    assert rank.begin() == []
    assert not rank.carried
