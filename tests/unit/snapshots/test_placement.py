"""Receivers of copies, the two slots, and the newest complete snapshot, as tables."""

import pytest

from ddp_zero.snapshots.placement import Progress, Turns, newest_complete, receivers, source_of
from ddp_zero.snapshots.seals import Seal

LATE, FAILED, KEPT, COPIED = Progress


@pytest.mark.parametrize(
    ("hosts", "copies", "expected"),
    [
        ("a", 1, [[]]),
        ("aa", 1, [[1], [0]]),
        ("aaa", 2, [[1, 2], [2, 0], [0, 1]]),
        ("aaa", 0, [[], [], []]),
        ("ab", 1, [[1], [0]]),
        ("ab", 3, [[1], [0]]),
        ("aabb", 1, [[2], [3], [0], [1]]),
        ("abab", 1, [[1], [0], [3], [2]]),
        ("aaab", 1, [[3], [3], [3], [0]]),
        ("abcd", 2, [[1, 2], [2, 3], [3, 0], [0, 1]]),
    ],
)
def test_receivers_of_copies_are_on_other_hosts_if_there_are_any(
    hosts: str, copies: int, expected: list[list[int]]
) -> None:
    assert receivers(hosts, copies) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("per_host", [1, 2, 8])
def test_every_part_has_its_copies_elsewhere_and_no_rank_keeps_many(world_size: int, per_host: int) -> None:
    hosts = [str(rank // per_host) for rank in range(world_size)]
    found = receivers(hosts, 2)
    number = len(set(hosts))
    for rank, theirs in enumerate(found):
        assert rank not in theirs
        assert len(set(theirs)) == len(theirs) == min(2, (number if number > 1 else world_size) - 1)
        if number > 1:
            assert len({hosts[one] for one in theirs} | {hosts[rank]}) == len(theirs) + 1
    kept = [sum(rank in theirs for theirs in found) for rank in range(world_size)]
    assert max(kept) <= 2 * per_host if world_size % per_host else max(kept) <= 2


@pytest.mark.parametrize(
    ("outcomes", "slots"),
    [
        ([COPIED, COPIED, COPIED, COPIED], "abab"),
        ([COPIED, FAILED, FAILED, COPIED, COPIED], "aaaba"),  # nothing complete yet: the same slot again
        ([COPIED, COPIED, FAILED, FAILED, COPIED], "abbba"),
        ([COPIED, KEPT, KEPT, KEPT], "abab"),  # without copies ever: the newest is spared
        ([COPIED, COPIED, KEPT, KEPT, COPIED, KEPT], "abbbaa"),
        ([COPIED, KEPT, FAILED, COPIED], "abba"),
    ],
)
def test_the_slot_of_the_complete_snapshot_is_never_written(outcomes: list[Progress], slots: str) -> None:
    turns, found, complete, kept = Turns(), "", None, None
    for outcome in outcomes:
        if found:
            if outcome is COPIED:
                complete, kept = found[-1], None
            elif outcome is KEPT:
                kept = found[-1]
        slot = turns.next(outcome)
        assert slot != complete
        assert complete is not None or slot != kept
        found += slot
    assert found == slots


def seal(rank: int, step: int = 10, world_size: int = 2, part: str = "0", name: str = "") -> Seal:
    return Seal(name or f"{'f' * 32}-{step}", step, world_size, rank, part * 64, 100)


def test_newest_complete_finds_the_newest_snapshot_with_all_parts() -> None:
    old, new = [seal(rank) for rank in range(2)], [seal(rank, 20) for rank in range(2)]
    found, reasons = newest_complete({"a": [*old, new[0]], "b": [new[1], old[0]]})
    assert found is not None
    assert (found.step, found.seals, found.places) == (20, tuple(new), (("a",), ("b",)))
    assert reasons == []
    found, reasons = newest_complete({"a": [*old, new[0]], "b": [old[0]]})
    assert found is not None
    assert (found.step, found.places) == (10, (("a", "b"), ("a",)))
    assert reasons == ["snapshot of step 20: no part of rank 1 of 2"]
    assert newest_complete({"a": [], "b": []}) == (None, [])
    assert newest_complete({"a": [old[0]]}) == (None, ["snapshot of step 10: no part of rank 1 of 2"])


def test_newest_complete_leaves_out_snapshots_with_contradictory_parts() -> None:
    name = f"{'f' * 32}-10"
    for other in (seal(1, part="1"), seal(1, world_size=3, name=name), seal(1, step=11, name=name)):
        found, reasons = newest_complete({"a": [seal(0), seal(1)], "b": [other]})
        assert found is None
        assert "contradict" in reasons[0]


def test_parts_of_a_different_attempt_are_not_mixed_in() -> None:
    other = seal(1, name=f"{'e' * 32}-10")
    found, reasons = newest_complete({"a": [seal(0), other]})
    assert found is None
    assert len(reasons) == 2


def test_hosts_take_parts_from_themselves_or_in_turns() -> None:
    seals = [seal(rank, world_size=4) for rank in range(4)]
    found, _ = newest_complete({"a": seals, "b": seals, "c": []})
    assert found is not None
    assert [source_of(found, part, "c") for part in range(4)] == ["a", "b", "a", "b"]
    assert [source_of(found, part, "b") for part in range(4)] == ["b"] * 4
