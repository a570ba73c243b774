"""The states of ``param.grad`` between passes: shown, absent, mixed and left averages, and sums carried to a pass.

Parameter 0 is this rank's, parameter 1 is rank 1's, and parameter 2 is cut: this rank has the first two of its three
elements.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.backward.gradients import ReducedBucket
from ddp_zero.core.backward.owned_sums import ReduceContext
from ddp_zero.core.backward.visible_gradients import SummedBucket, VisibleGradients, gather_gradient
from ddp_zero.core.local.memory import mark_of
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.local.placeholders import AbsentGradient
from ddp_zero.core.plan.ownership import Piece, whole
from ddp_zero.core.plan.partition import GroupRank

RANK_0, RANK_1 = GroupRank(0), GroupRank(1)
OWN, OTHERS, CUT = 0, 1, 2


class Peers:
    """A communicator of rank 0 whose peer states these numbers and sends these values."""

    group_rank, world_size = RANK_0, 2

    def __init__(self, stated: Sequence[int] = (), sends: float = 0.0) -> None:
        self.stated, self.sends = list(stated), sends
        self.told: list[list[int]] = []

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def all_gather_ints(self, mine: list[int]) -> list[list[int]]:
        self.told.append(mine)
        return [mine, self.stated]

    def send_to_all(self, tensor: Tensor, source: int) -> None:
        if source != self.group_rank:
            tensor.fill_(self.sends)


class Rank:
    """What `VisibleGradients` knows of rank 0: three parameters of three elements, and sums carried over passes."""

    def __init__(self, dtype: torch.dtype = torch.float32, steps_masters: bool = False, comm: Any = None) -> None:
        self.params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)]
        self.pieces = [whole(RANK_0, 3), whole(RANK_1, 3), (Piece(RANK_0, 0, 2), Piece(RANK_1, 2, 3))]
        self.shard: Any = SimpleNamespace(
            table=ParameterTable([{"params": self.params, "param_names": ["own", "others", "cut"]}]),
            comm=comm or Peers(),
            binding=SimpleNamespace(pieces=self.pieces),
            stepped=SimpleNamespace(
                own_part=lambda index, grad: grad[:2] if index == CUT and grad.numel() == 3 else grad
            ),
            masters=SimpleNamespace(wants=lambda index: steps_masters),
        )
        self.carried: dict[int, Tensor] = {}
        context = SimpleNamespace(shard=self.shard, carried=self.carried, where="rank 0")
        self.visible = VisibleGradients(cast(ReduceContext, context))

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
    rank.visible.forget()
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
    with pytest.raises(RuntimeError, match=rf"ddp.no_sync\(\) .*parameter {index} .*\[ZERO-405\]"):
        rank.begin(reduces=False)


def test_passes_under_no_sync_add_up_this_ranks_own_gradients() -> None:
    rank = Rank()
    rank.params[OWN].grad = torch.ones(3)
    assert rank.begin(reduces=False) == [rank.params[OWN]]
    assert rank.begin(reduces=True) == [rank.params[OWN]]


# Sums with more digits than the gradient that shows them

EXACT = torch.tensor([1.0 + 2.0**-12, 2.0 + 2.0**-11, float("nan")])


def in_bf16(steps_masters: bool = True, values: Tensor = EXACT) -> tuple[Rank, Tensor, Tensor]:
    """A rank that shows a sum in fp32 rounded to bf16, the gradient, and the sum."""
    rank, total = Rank(torch.bfloat16, steps_masters), values.clone()
    shown = total.bfloat16()
    rank.visible.show(OWN, shown, total)
    return rank, shown, total


def finite() -> Tensor:
    return torch.where(EXACT.isnan(), 3.0 + 2.0**-10, EXACT)


def test_a_gradient_that_the_user_has_changed_counts_instead_of_its_sum() -> None:
    rank, shown, _ = in_bf16(values=finite())
    assert rank.visible.exact(shown) is not None
    shown.mul_(2)
    assert rank.visible.exact(shown) is None
    assert rank.visible.editable(OWN) is shown
    rank.begin()
    assert rank.carried[OWN] is shown


@pytest.mark.parametrize("asks", ["exact", "take_out"])
def test_an_edit_of_the_sum_shows_in_the_gradient_and_is_carried(asks: str) -> None:
    rank, shown, total = in_bf16()
    edited = rank.visible.editable(OWN)
    assert edited is total
    edited.copy_(torch.tensor([5.0, 6.0, 7.0]))
    version = shown._version
    if asks == "exact":
        assert rank.visible.exact(shown) is total
    else:
        rank.begin()
        assert rank.carried[OWN] is total
    assert shown.tolist() == [5, 6, 7]
    assert shown._version == version, "the library's write is no change of the user's"


def test_a_sum_with_nans_that_nobody_has_changed_stays_exact() -> None:
    """A NaN differs from itself: the other elements of its parameter were rounded once."""
    rank, shown, total = in_bf16()
    assert rank.visible.exact(shown) is total
    for _ in range(2):
        assert rank.visible.editable(OWN) is total
        assert rank.visible.exact(shown) is total


@pytest.mark.parametrize("how", ["both", "through .data"])
def test_edits_that_contradict_each_other_are_refused(how: str) -> None:
    rank, shown, total = in_bf16()
    rank.visible.editable(OWN)
    if how == "both":
        total.add_(1)
        shown.add_(2)
    else:
        total.data.add_(1)  # counts no version: which one is right cannot be told
    with pytest.raises(RuntimeError, match=r"shape \[3\] .*owned_gradients.*\[ZERO-406\]"):
        rank.begin()


def test_an_edit_belongs_to_the_gradients_that_were_shown() -> None:
    """A user who keeps a gradient over ``zero_grad()`` and changes it does not contradict an earlier edit."""
    rank, shown, total = in_bf16(values=finite())
    rank.visible.editable(OWN)
    rank.visible.forget_all()
    total.add_(1)
    shown.add_(2)
    rank.begin()
    assert not rank.carried
    assert rank.params[OWN].grad is shown


# Left in the reducer's memory, which later passes fill


def left(is_owned: bool = True) -> tuple[Rank, Tensor]:
    rank = Rank()
    grad = rank.params[OWN].grad = torch.ones(3)
    rank.visible.leave(OWN, is_owned)
    return rank, grad


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_left_average_stays_whole_on_every_rank(is_owned: bool) -> None:
    rank, grad = left(is_owned)
    assert rank.params[OWN].grad is grad


def test_a_left_average_is_carried_in_memory_of_its_own() -> None:
    rank, grad = left()
    rank.begin()
    grad.fill_(9)  # by the reducer, in the next pass
    assert rank.carried[OWN].tolist() == [1, 1, 1]
    assert rank.params[OWN].grad is None


def test_a_left_average_without_owner_here_is_hidden_once_passes_have_added_up() -> None:
    rank, _ = left(is_owned=False)
    rank.begin()
    assert not rank.carried, "its owner carries it"
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.leave(OWN, is_owned=False)
    assert held(rank.params[OWN]) == "absent"


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_left_average_comes_back_as_it_was(is_owned: bool) -> None:
    rank, grad = left(is_owned)
    for _ in range(2):
        rank.begin()
        rank.visible.put_back()
        assert rank.params[OWN].grad is grad
    rank.begin()
    assert (OWN in rank.carried) == is_owned


def test_a_left_average_on_another_rank_takes_up_a_local_gradient_and_is_mixed() -> None:
    rank, _ = left(is_owned=False)
    rank.begin()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.put_back()
    assert held(rank.params[OWN]) == [2, 2, 2]
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        rank.begin()


def test_nothing_is_left_where_there_is_no_gradient() -> None:
    rank = Rank()
    rank.visible.leave(OWN, is_owned=True)
    assert rank.begin() == []
    assert not rank.carried


# The whole gradient on every rank


def test_a_rank_that_shows_all_of_a_cut_gradient_gives_its_own_part() -> None:
    """As an average that was left in place."""
    rank = Rank(comm=Peers(stated=[1], sends=5.0))
    rank.params[CUT].grad = torch.tensor([1.0, 2.0, 3.0])
    found = gather_gradient(rank.shard, CUT)
    assert found is not None
    assert found.tolist() == [1, 2, 5]


@pytest.mark.parametrize(("index", "stated"), [(OTHERS, 2), (CUT, 2)])
def test_a_gradient_that_its_owner_has_used_up_is_refused_everywhere(index: int, stated: int) -> None:
    rank = Rank(comm=Peers(stated=[stated]))
    rank.show_all()
    with pytest.raises(RuntimeError, match=rf"used up the gradient of parameter {index} .*\[ZERO-402\]"):
        gather_gradient(rank.shard, index)


# Stage 1 with sums in fp32


class Averaged:
    """A reduced bucket of which every average is a half."""

    def __init__(self, rank: Rank) -> None:
        self.params, self.on_stream, self.waits = rank.params, None, 0

    def wait(self) -> None:
        self.waits += 1

    def gradient(self, index: int) -> Tensor:
        return torch.full_like(self.params[index], 0.5)


def test_a_bucket_with_earlier_sums_adds_them_up_without_a_change_of_them() -> None:
    rank = Rank(torch.bfloat16)
    carried, averaged = {OWN: finite()}, Averaged(rank)
    bucket = SummedBucket(cast(ReducedBucket, averaged), carried, rank.shard)
    bucket.wait()
    assert averaged.waits == 1
    exact = bucket.in_accumulation_dtype(OWN)
    assert exact is not None
    assert torch.equal(exact, finite() + 0.5)
    assert torch.equal(bucket.gradient(OWN), (finite() + 0.5).bfloat16())
    assert torch.equal(carried[OWN], finite())
