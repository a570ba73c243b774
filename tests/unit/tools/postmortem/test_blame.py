"""Merging the records of ranks, on made-up events."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_zero.__main__ import main
from ddp_zero.insight.record_format import UNCAUGHT
from ddp_zero.tools.postmortem.blame import blame
from ddp_zero.tools.postmortem.command import report
from ddp_zero.tools.postmortem.records import Collective, Event, Record


def record(rank: int, *events: Event, members: int = 4, error: str = "", started: float = 0.0) -> Record:
    reason = "an error in wait_sync of bucket 1" if error else "no event for 9.0 s of a time-out of 12.0 s"
    stack = {"MainThread": ["  line 1", "  File 'train.py', line 7, in load"]}
    return Record(rank, range(members), 0, f"host{rank}", 100 + rank, started, 50.0, reason, error, stack, events)


def done(phase: str, bucket: int = 0, step: int = 3, number: int = 0, received: int = 0) -> Event:
    return Event(number, 0, step, phase, bucket, 40.0, 40.5, received=received)


def waiting(peer: int | None, bucket: int = 1, step: int = 3, number: int = 9, failed: bool = False) -> Event:
    name = "" if peer is None else f"rank {peer % 2} (global rank {peer})"
    what = f"the sync of bucket {bucket}"
    ended = 49.0 if failed else None
    return Event(number, 0, step, "wait_sync", bucket, 41.0, ended, message=what, peer=name, failed=failed)


def step(number: int = 1) -> Event:
    return Event(number, 0, 3, "step", -1, 39.0, None)


def test_a_rank_without_a_record_that_others_wait_for_is_named() -> None:
    records = [record(rank, step(), done("sync", 1, number=2, received=4096), waiting(2)) for rank in (0, 1, 3)]
    verdict = blame(records)
    assert (verdict.culprits, verdict.silent) == ([2], [2])
    text = report(records)
    assert "3 of 4 ranks have left a record" in text
    assert "Everyone waited for rank 2: it has left no record: it was killed or stopped" in text
    assert (
        "What 3 of 3 other ranks with a record waited for: step 3, wait_sync of bucket 1, message 'the sync of "
        "bucket 1'." in text
    )
    assert "rank 0 (host0, process 100)" in text
    assert "from rank 0 (global rank 2), 4,096 bytes in all, for 9.0 s" in text
    assert "rank 2: no record" in text


def test_in_a_ring_each_waits_for_the_one_before_and_the_chain_ends_at_the_lost_one() -> None:
    records = [record(rank, waiting((rank - 1) % 4)) for rank in (0, 1, 3)]  # 0 <- 3 <- 2, and 1 <- 0
    assert blame(records).culprits == [2]


def test_of_several_silent_ranks_those_that_others_wait_for_are_named() -> None:
    assert blame([record(0, waiting(3)), record(1, waiting(0))]).culprits == [3]
    assert blame([record(0, waiting(None)), record(1, waiting(None))]).culprits == [2, 3]


def test_a_rank_outside_the_library_that_all_others_wait_for_is_blamed() -> None:
    outside = record(1, done("sync", step=2), done("wait_sync", step=2, number=1))
    records = [record(0, waiting(1)), outside, record(2, waiting(1)), record(3, waiting(2))]
    verdict = blame(records)
    assert (list(verdict.culprits), verdict.silent) == ([1], [])
    text = report(records)
    assert "Everyone waited for rank 1: the others waited for it, and it waited for none." in text
    assert "rank 1 (host1, process 101): outside the library for 9.5 s, after step 2, wait_sync of bucket 0" in text
    assert "File 'train.py', line 7, in load" in text


def test_a_rank_that_computes_while_others_wait_for_it_is_named() -> None:
    computing = Event(9, 0, 3, "forward", -1, 41.0, None)
    for records in ([record(0, waiting(1)), record(1, computing)], [record(0, waiting(None)), record(1, computing)]):
        alone = [Record(**{**vars(one), "members": (0, 1)}) for one in records]
        assert blame(alone).culprits == [1]
        assert "rank 1 (host1, process 101): step 3, forward, for 9.0 s" in report(alone)


def test_without_peers_the_rank_outside_the_library_is_named_or_the_one_behind() -> None:
    in_collective = [record(rank, done("reduce"), waiting(None)) for rank in (0, 1, 3)]
    assert blame([*in_collective, record(2, done("reduce"))]).culprits == [2]
    behind = record(2, waiting(None, bucket=0, number=4))
    assert blame([*in_collective, behind]).culprits == [2]
    earlier = record(2, done("reduce", step=2), done("sync", step=2), waiting(None, step=2))
    assert blame([*in_collective, earlier]).culprits == [2]


def test_nobody_is_named_where_some_wait_in_a_collective_of_the_script() -> None:
    """As where one rank skips a barrier: those in it are not to blame."""
    frames = [
        '  File "train.py", line 9, in main',
        '  File "/x/torch/distributed/distributed_c10d.py", line 5, in barrier',
    ]
    in_barrier = [Record(**{**vars(record(rank, done("sync"))), "stacks": {"MainThread": frames}}) for rank in (0, 2)]
    verdict = blame([in_barrier[0], record(1, waiting(None)), in_barrier[1], record(3, waiting(None))])
    assert verdict.culprits == []
    assert "cannot tell, because rank 0, rank 2 stood in a collective of the script" in verdict.why


# Collectives that torch has recorded


def in_collective(
    rank: int, number: int, operation: str = "all_reduce", *events: Event, goes_on: bool = True
) -> Record:
    """A rank outside the library, in a collective; it has called those before with all others."""
    before = [Collective("0", earlier, "all_reduce", "[[4]]", 30.0 + earlier, False) for earlier in range(1, number)]
    last = Collective("0", number, operation, "[[4]]", 30.0 + number, goes_on)
    return Record(**{**vars(record(rank, *events)), "collectives": [*before, last]})


def test_a_rank_that_has_not_entered_the_collective_of_the_others_is_named() -> None:
    late = in_collective(2, 6, goes_on=False)
    records = [in_collective(rank, 7) for rank in (0, 1, 3)]
    verdict = blame([*records, late])
    assert verdict.culprits == [2]
    assert [pending.number for pending in verdict.collectives.values()] == [7, 7, 7]
    text = report([*records, late])
    assert (
        "What 3 of 3 other ranks with a record waited for: all_reduce [[4]], collective 7 of process group '0'" in text
    )
    assert blame(records).culprits == [2], "killed in a reduction of DDP"


def test_of_ranks_that_wait_in_a_circle_the_one_that_went_a_way_of_its_own_is_named() -> None:
    barrier = [in_collective(rank, 7, "barrier") for rank in (0, 1, 3)]
    skipped = blame([*barrier, in_collective(2, 7)])
    assert (skipped.culprits, "the others went on to barrier" in skipped.why) == ([2], True)
    reducing = Event(9, 0, 3, "wait_reduce", 0, 41.0, None, peer="rank 0 (global rank 0)")
    again = [Event(number, 0, 3, "reduce", 0, 37.0 + number, 37.1 + number) for number in range(2)]
    decide = Event(5, 0, 3, "decide", -1, 39.0, None, peer="rank 2 (global rank 2)")
    deciding = [record(rank, again[0], Event(4, 0, 3, "step", -1, 39.0, None), decide) for rank in (0, 1, 3)]
    verdict = blame([*deciding, record(2, *again, reducing)])
    assert verdict.culprits == [2]
    assert (
        "the others went on to opt.step() in step 3, and it to reduce of bucket 0 in step 3 in backward" in verdict.why
    )


def test_two_ranks_in_different_collectives_are_not_blamed() -> None:
    pair = [in_collective(0, 7, "barrier"), in_collective(1, 7)]
    verdict = blame([Record(**{**vars(one), "members": (0, 1)}) for one in pair])
    assert verdict.culprits == []
    assert "cannot tell, because ranks went on in different ways, with no majority: rank 0 to barrier" in verdict.why


def test_a_rank_that_ended_with_an_error_of_its_own_is_named_before_those_that_lost_it() -> None:
    own = Record(**{**vars(record(1)), "reason": UNCAUGHT, "error": "ValueError: a broken file"})
    lost = Record(
        **{**vars(in_collective(0, 7, goes_on=False)), "reason": UNCAUGHT, "error": "Connection closed by peer"}
    )
    verdict = blame([lost, own])
    assert verdict.culprits == [1]
    assert "an error of its own, ValueError: a broken file" in verdict.why
    assert verdict.collectives[0].number == 7, "what failed counts as ended for torch"


def test_without_torchs_recorder_a_rank_in_backward_is_not_blamed() -> None:
    frames = ['  File "/x/torch/autograd/graph.py", line 5, in _engine_run_backward']
    inside = Record(**{**vars(record(0, done("sync"))), "stacks": {"MainThread": frames}, "members": (0, 1)})
    verdict = blame([inside, record(1, waiting(0), members=2)])
    assert verdict.culprits == []
    assert "rank 0 stood in backward, where DDP may wait, and torch's flight recorder was off" in verdict.why


# What else the report says


def test_a_rank_whose_own_step_has_failed_is_named_before_all_others() -> None:
    broken = Event(9, 0, 3, "local_step", 0, 41.0, 41.1, failed=True)
    records = [record(0, waiting(1, failed=True)), record(1, step(), broken), record(2, waiting(1))]
    verdict = blame(records)
    assert verdict.culprits == [1]
    assert "its own step has failed" in report(records)


def test_the_wait_of_a_rank_is_its_failed_event_and_no_later_one() -> None:
    failed, later = waiting(2, failed=True, number=5), Event(6, 0, 3, "share_errors", -1, 49.0, None)
    assert blame([record(0, step(), failed, later)]).waits[0] is failed


def test_equal_ranks_and_circles_name_nobody() -> None:
    for peers in ((None, None), (1, 0)):
        records = [record(rank, waiting(peer), members=2) for rank, peer in enumerate(peers)]
        verdict = blame(records)
        assert verdict.culprits == []
        assert "No single rank to name: cannot tell, because all ranks have come equally far." in report(records)


def test_records_of_runs_that_began_at_different_times_are_pointed_out() -> None:
    records = [record(0, waiting(1), started=0.0), record(1, started=7200.0)]
    assert "warning: ranks started up to 7200 s apart" in report(records)


def test_events_and_stacks_are_shown_on_demand() -> None:
    records: Sequence[Record] = [record(0, done("sync", received=10), waiting(1), members=2)]
    assert "last events" not in report(records)
    text = report(records, num_events=1, with_stacks=True)
    assert "step 3, wait_sync of bucket 1, message 'the sync of bucket 1': not ended" in text
    assert "step 3, sync of bucket 0: 500.000 ms, 0 bytes sent, 10 to receive" in report(records, num_events=2)
    assert "rank 0, MainThread" in text


def test_a_folder_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["postmortem", str(tmp_path)]) == 1
    assert "No flight records of attempt 0" in capsys.readouterr().err
