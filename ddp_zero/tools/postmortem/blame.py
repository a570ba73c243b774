"""Who waited for whom: pure, from the events of all ranks to the rank that the others waited for."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_zero.tools.postmortem.records import Event, Record

LOCAL = "local_step"
"""The phase in which a rank waits for nobody: an error there is its own."""

_BUSY = {LOCAL, "forward", "backward", "reduce", "sync"}
"""Phases in which a rank waits for nobody, as far as it knows."""

_POSTED_BY = {"wait_reduce": "reduce", "wait_sync": "sync"}


_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_INNERMOST = 3  # frames, among them torch's wrappers


@dataclass(frozen=True)
class Verdict:
    """What the records say together.

    Attributes:
        culprits: the ranks that the others waited for, or that failed on their own; empty if the records do not say.
        why: how they were found, in words.
        waits: what each rank was in at the end, by rank; of ranks that have left no record, nothing.
        silent: ranks without a record.
    """

    culprits: Sequence[int]
    why: str
    waits: Mapping[int, Event]
    silent: Sequence[int]


def last_wait(record: Record) -> Event | None:
    """What a rank was in when its record was written, or what has failed: the innermost event, one with a peer first.

    None if it was outside the library.
    """
    unfinished = [event for event in record.events if event.failed or event.ended is None]
    return max(unfinished, key=lambda event: (bool(event.peer), event.failed, event.number), default=None)


def bytes_waited_for(record: Record, wait: Event) -> int:
    """Expected size in bytes of the pending receive, if it was recorded."""
    posted = [
        event.received
        for event in record.events
        if (event.phase, event.step, event.bucket, event.optimizer)
        == (_POSTED_BY.get(wait.phase), wait.step, wait.bucket, wait.optimizer)
    ]
    return posted[-1] if posted else 0


def blame(records: Sequence[Record]) -> Verdict:
    """Find the rank that the others waited for.

    Args:
        records: of one attempt, one per rank.
    """
    by_rank = {record.rank: record for record in records}
    members = sorted({rank for record in records for rank in record.members} | set(by_rank))
    silent = [rank for rank in members if rank not in by_rank]
    waits = {rank: wait for rank, record in by_rank.items() if (wait := last_wait(record)) is not None}
    peers = {rank: wait.peer_rank for rank, wait in waits.items() if wait.phase not in _BUSY}
    failed = [rank for rank, wait in waits.items() if wait.phase == LOCAL and wait.failed]
    if failed:
        return Verdict(failed, "its own step has failed", waits, silent)
    ends = Counter(end for rank in peers if (end := _end_of_chain(rank, peers)) is not None)
    if silent:
        waited_for = [rank for rank in silent if ends[rank]]
        why = "it has left no record: it was killed or stopped, or ended before it could write one"
        return Verdict(waited_for or silent, why, waits, silent)
    if ends:
        return Verdict([ends.most_common(1)[0][0]], "the others waited for it, and it waited for none", waits, silent)
    outside = [rank for rank in members if rank not in peers]
    if outside and len(outside) < len(members):
        elsewhere = [rank for rank in outside if _is_in_collective(by_rank[rank])]
        if elsewhere:
            names = ", ".join(f"rank {rank}" for rank in elsewhere)
            why = f"cannot tell, because {names} waited in a collective of the script, others in one of the library"
            return Verdict([], why, waits, silent)
        return Verdict(outside, "it was busy elsewhere while the others waited", waits, silent)
    progress = {rank: _progress(record) for rank, record in by_rank.items()}
    behind = [rank for rank in members if progress[rank] == min(progress.values())]
    if len(behind) < len(members):
        return Verdict(behind, "it has come less far than the others", waits, silent)
    return Verdict([], "all ranks have come equally far", waits, silent)


def _is_in_collective(record: Record) -> bool:
    """Whether a rank outside the library stood in a collective that the script has called, such as a barrier."""
    return any(_COLLECTIVES in line for line in list(record.stacks.get("MainThread", ()))[-_INNERMOST:])


def _end_of_chain(rank: int, peers: Mapping[int, int | None]) -> int | None:
    """The rank at the end of a chain of waits, which waits for none; None if it ends with every rank or in a circle."""
    seen = {rank}
    following = peers.get(rank)
    while following is not None and following not in seen:
        seen.add(following)
        if following not in peers:
            return following
        following = peers[following]
    return None


def _progress(record: Record) -> tuple[int, int]:
    """The last step, and how many of its events there were."""
    last = max((event.step for event in record.events), default=0)
    return last, sum(event.step == last for event in record.events)
