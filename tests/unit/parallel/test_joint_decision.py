"""One decision of several members: norms over levels, digests, the order in which members begin, and shared errors."""

import inspect
import math
from collections.abc import Callable, Generator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_zero.core.comm.ranks import StepFailedElsewhereError
from ddp_zero.core.local.loop_options import digest_of
from ddp_zero.core.step.clipping import GradientStats, NonfiniteGradient
from ddp_zero.parallel.joint_decision import (
    GlobalErrorCheck,
    HeldErrors,
    JointDecision,
    NormLevel,
    OtherMembers,
    describe_errors,
    join_norms,
)


class Level:
    """The connections of a level of one process: every peer sends what ``peers`` makes of this rank's numbers."""

    def __init__(self, *peers: Callable[[Tensor], Tensor], texts: tuple[str, ...] = ()) -> None:
        self.peers = peers
        self.texts = texts
        self.sent: list[Tensor] = []

    def all_gather_tensor(self, mine: Tensor) -> list[Tensor]:
        self.sent.append(mine.clone())
        return [mine, *(peer(mine.clone()) for peer in self.peers)]

    def all_gather_text(self, mine: str) -> list[str]:
        return [mine, *self.texts]

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def global_rank(self, rank: int) -> int:
        return 10 + rank


def level(*peers: Callable[[Tensor], Tensor], texts: tuple[str, ...] = ()) -> Any:
    return Level(*peers, texts=texts)


def stats(totals: dict[int, float | None], flag: float = 0.0, dtype: torch.dtype = torch.float32) -> GradientStats:
    numbers = {key: None if total is None else torch.tensor(total, dtype=dtype) for key, total in totals.items()}
    return GradientStats(numbers, flag=torch.tensor(flag))


def numbers_of(found: GradientStats) -> dict[int, float]:
    return {key: math.nan if total is None else float(total) for key, total in found.totals.items()}


def dtypes_of(found: GradientStats) -> set[torch.dtype]:
    return {total.dtype for total in found.totals.values() if total is not None}


# Norms


def test_join_norms_adds_norms_of_ranks_and_members_that_count() -> None:
    table = torch.tensor([[[3.0], [4.0]], [[12.0], [84.0]]], dtype=torch.float64)  # ranks, members, keys
    assert join_norms(table, None, 2.0).tolist() == [math.sqrt(9 + 16 + 144 + 84 * 84)]
    assert join_norms(table, [[True, True], [True, False]], 2.0).tolist() == [13.0], "by member and rank"
    assert join_norms(table, None, math.inf).tolist() == [84.0]
    assert join_norms(table, [[True, False], [True, False]], 1.0).tolist() == [7.0]


def test_a_norm_that_does_not_count_may_be_nan_or_infinite() -> None:
    table = torch.tensor([[[2.0, 1.0]], [[math.nan, math.inf]]])
    assert join_norms(table, [[True, False]], 2.0).tolist() == [2.0, 1.0]


def test_digests_tell_subjects_apart_and_are_exact_in_fp64() -> None:
    subjects = [list(subject) for subject in product(([0], [0, 1]), (1.0, 2.0), ([0], [1]))]
    digests = [digest_of(subject) for subject in subjects]
    assert len(set(digests)) == len(subjects)
    assert digests == [digest_of(subject) for subject in subjects]
    assert all(0 <= digest < 2**48 and digest == int(digest) for digest in digests), "those of errors are negative"


# Decisions


PLAIN = [range(30), range(30)]  # members whose groups have the positions that users see

Part = Generator[GradientStats, GradientStats, Any]


def deciding(own: GradientStats) -> Part:
    return (yield own)


def decide(joint: JointDecision, stats_of_members: list[GradientStats]) -> list[GradientStats]:
    return joint.run([deciding(one) for one in stats_of_members])


def test_norms_and_flags_of_members_are_added_over_two_levels() -> None:
    double, other_stage = level(lambda theirs: theirs), level(lambda theirs: theirs)
    everyone = NormLevel(double, [[True, True], [True, False]])
    joint = JointDecision([everyone, NormLevel(other_stage)], GlobalErrorCheck([double, other_stage]), PLAIN)
    first, second = decide(joint, [stats({-1: 3.0}), stats({-1: 4.0, 1: 5.0}, flag=1.0)])
    total = 2 * (2 * 9 + 16)  # two stages; of two equal ranks, both count for the first member, one for the second
    assert numbers_of(first) == {-1: pytest.approx(math.sqrt(total))}
    assert numbers_of(second)[1] == pytest.approx(math.sqrt(2 * 25))
    assert first.flag == second.flag == 4.0, "of two ranks in two stages"
    assert dtypes_of(second) == {torch.float32}


def test_norms_that_are_not_finite_raise_the_flag_also_where_they_do_not_count() -> None:
    alone = level()
    joint = JointDecision([NormLevel(alone, [[False]])], GlobalErrorCheck([alone]), PLAIN)
    (found,) = decide(joint, [stats({-1: math.inf})])
    assert numbers_of(found) == {-1: 0.0}
    assert found.flag == 1.0


def test_totals_are_as_wide_as_the_widest_of_any_rank() -> None:
    def wide(theirs: Tensor) -> Tensor:
        theirs[2] = 1.0  # subject, flag, whether a norm is in fp64
        return theirs

    peer = level(wide)
    joint = JointDecision([NormLevel(peer)], GlobalErrorCheck([peer]), PLAIN)
    (found,) = decide(joint, [stats({-1: 1.0})])
    assert dtypes_of(found) == {torch.float64}


def test_many_limits_take_a_second_message() -> None:
    peer = level(lambda theirs: theirs)
    joint = JointDecision([NormLevel(peer)], GlobalErrorCheck([peer]), PLAIN)
    (found,) = decide(joint, [stats({key: float(key) for key in range(30)})])
    assert [len(sent) for sent in peer.sent] == [15, 18]
    assert numbers_of(found) == pytest.approx({key: key * math.sqrt(2) for key in range(30)})


def test_a_member_alone_is_refused() -> None:
    joint = JointDecision([], GlobalErrorCheck([]), PLAIN)
    with pytest.raises(RuntimeError, match=r"was stepped alone.*opt\.step\(\)"):
        OtherMembers(joint, []).stats_of_whole_model(stats({}))


def test_all_members_look_before_any_acts_at_the_same_depth_of_the_stack() -> None:
    joint = JointDecision([NormLevel(one := level())], GlobalErrorCheck([one]), PLAIN)
    seen: list[tuple[str, int, int]] = []

    def part(member: int) -> Part:
        depth = len(inspect.stack())
        seen.append(("look", member, depth))
        joined = yield stats({-1: 3.0 + member})
        seen.append(("act", member, len(inspect.stack())))
        return joined

    def without_a_decision() -> Part:
        seen.append(("nothing", 1, len(inspect.stack())))
        return None
        yield

    first, nothing, last = joint.run([part(0), without_a_decision(), part(2)])
    assert [one[:2] for one in seen] == [("look", 0), ("nothing", 1), ("look", 2), ("act", 0), ("act", 2)]
    assert len({depth for _, _, depth in seen}) == 1
    assert nothing is None
    assert numbers_of(first) == numbers_of(last) == {-1: pytest.approx(math.hypot(3.0, 5.0))}


def test_a_member_sees_limits_by_its_own_positions() -> None:
    alone = level()
    joint = JointDecision([NormLevel(alone)], GlobalErrorCheck([alone]), [[0, 2], [1]])
    ours, theirs = decide(joint, [stats({-1: 3.0, 1: 5.0}), stats({-1: 4.0, 0: 7.0})])
    assert set(ours.totals) == {-1, 1}
    assert set(theirs.totals) == {-1, 0}
    assert numbers_of(ours)[-1] == numbers_of(theirs)[-1] == 5.0
    assert (numbers_of(ours)[1], numbers_of(theirs)[0]) == (5.0, 7.0)
    counted = OtherMembers(joint, [True, False]).counted({0: torch.ones(()), 1: torch.ones(())})
    assert list(counted) == [0]


# Errors


def with_subject(subject: float) -> Callable[[Tensor], Tensor]:
    def send(theirs: Tensor) -> Tensor:
        theirs[0] = subject
        return theirs

    return send


def test_an_error_of_this_rank_comes_before_scales_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 10)
    failing = level(with_subject(-2.0), texts=("{}",))
    with pytest.raises(ValueError, match="own"):
        GlobalErrorCheck([failing]).check(ValueError("own"), "averaging gradients", 512.0)


def test_an_error_that_several_ranks_have_is_shown_once() -> None:
    assert describe_errors({3: "ValueError: a", 1: "KeyError: b", 0: "ValueError: a"}) == (
        "ValueError: a (global ranks 0, 3); KeyError: b (global rank 1)"
    )


def test_of_several_errors_the_own_one_is_kept() -> None:
    held = HeldErrors()
    for error in (StepFailedElsewhereError("of a peer"), ValueError("own"), StepFailedElsewhereError("later")):
        with held.catching():
            raise error
    with pytest.raises(ValueError, match="own"):
        held.raise_now()
    held.raise_now()  # once
    assert held.take() is None


def test_a_lost_peer_does_not_hide_this_ranks_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 4)

    def lost(theirs: Tensor) -> Tensor:
        raise RuntimeError("connection closed by peer")

    errors = GlobalErrorCheck([level(lost)])
    with pytest.raises(ValueError, match="own"):
        errors.conclude(ValueError("own"))
    with pytest.raises(RuntimeError, match="connection closed"):
        errors.conclude(None)
    errors.tell(ValueError("own"))  # raised by the caller, with its own traceback


# Culprits


def nonfinite_gradient(parameter: str) -> NonfiniteGradient:
    return NonfiniteGradient(parameter, 3, f"{parameter} is infinite on rank 3")


def test_a_culprit_is_asked_for_anew_in_every_decision() -> None:
    joint = JointDecision([NormLevel(one := level())], GlobalErrorCheck([one]), PLAIN)
    others = OtherMembers(joint, [])

    def part(name: str) -> Part:
        joined = yield GradientStats({}, find=lambda: nonfinite_gradient(name))
        return others.find_nonfinite(joined)

    for name in ("a", "b"):
        assert joint.run([part(name)]) == [nonfinite_gradient(name)]


def test_an_action_that_raises_ends_all_members_and_the_next_decision_is_whole() -> None:
    joint = JointDecision([NormLevel(one := level())], GlobalErrorCheck([one]), PLAIN)

    ended: list[str] = []

    def first() -> Part:
        try:
            yield stats({-1: 3.0})
        finally:
            ended.append("first")

    def fail() -> Part:
        raise ValueError("of the second member")
        yield

    with pytest.raises(ValueError, match="of the second member"):
        joint.run([first(), fail()])
    assert ended == ["first"]
    (found,) = decide(joint, [stats({-1: 4.0})])
    assert numbers_of(found) == {-1: 4.0}
