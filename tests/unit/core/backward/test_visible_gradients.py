"""The states of ``param.grad`` between passes: shown, absent, mixed and left averages, and sums carried to a pass.

Parameter 0 is this rank's, parameter 1 is rank 1's, and parameter 2 is cut: this rank has the first two of its three
elements.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.backward.scratch_bucket import ReduceContext
from ddp_zero.core.backward.visible_gradients import VisibleGradients
from ddp_zero.core.local.parameters import ParameterTable, StepTargets
from ddp_zero.core.plan.ownership import Piece, whole
from ddp_zero.core.plan.partition import GroupRank

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
            masters=SimpleNamespace(needs_master=lambda index: dtype is not torch.float32),
            param_groups=[{"params": self.params}],
        )
        self.shard.targets = stepped = StepTargets(self.shard.table, has_masters=False)
        stepped.create(CUT, None, slice(0, 2))
        self.carried: dict[int, Tensor] = {}
        context = SimpleNamespace(shard=self.shard, carried=self.carried, where="rank 0")
        self.visible = VisibleGradients(cast(ReduceContext, context))
        self.visible.follow_owners({CUT: slice(0, 2)})

    def begin(self, reduces: bool = True) -> list[Tensor]:
        """A backward pass begins; returns the parameters whose gradients stay in ``param.grad``."""
        self.visible.take_up(reduces)
        return [param for param in self.params if param.grad is not None]

    def show_all(self) -> None:
        """An average of ones, as after a reduced pass."""
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.visible.show(OWN, torch.ones_like(self.params[OWN]))
        self.visible.show(CUT, torch.ones(2, dtype=self.params[CUT].dtype))
        self.visible.hide([OTHERS], was_consumed=False)


# Shown


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


# Put back


def test_a_gradient_stays_mixed_when_a_later_average_is_shown_until_it_is_dropped() -> None:
    rank = Rank()
    rank.show_all()
    rank.begin()
    rank.params[OWN].grad = torch.ones(3)
    rank.visible.restore()
    rank.visible.show(OWN, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        rank.begin()
    rank.visible.forget_all()
    assert not rank.visible.local_marks
    rank.visible.show(OWN, torch.ones(3))
    rank.begin()
    assert rank.visible.was_taken(OWN)


# Refused


def test_gradients_changed_after_zero_grad_contradict_no_earlier_edit() -> None:
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
    rank.visible.keep_published(OWN)
    return rank, grad


def test_an_average_that_was_left_is_restored_as_the_same_tensor() -> None:
    rank, grad = left()
    for _ in range(2):
        rank.begin()
        rank.visible.restore()
        assert rank.params[OWN].grad is grad
    rank.begin()
    assert OWN in rank.carried
