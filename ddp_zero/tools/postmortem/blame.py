"""Pure analysis of the events of all ranks: finds the rank for which all other ranks waited."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_zero.insight.record_format import UNCAUGHT
from ddp_zero.tools.postmortem.records import Collective, Event, Record

LOCAL = "local_step"
"""Phase in which a rank waits for no peer: an error there is its own."""

_BUSY = {LOCAL, "forward", "backward", "reduce", "sync"}
"""Phases in which a rank waits for no peer, as far as it knows."""

_ON_ALL_RANKS = {"step", "reduce"}
"""Phases of every rank, regardless of its shard."""

_OF_A_PEER = re.compile(
    r"onnection (closed|reset|refused)|[Tt]imed? ?out|roken pipe|no answer|to take part in|on every rank|gloo|NCCL"
    r"|DistBackend"
)
"""Matches errors caused by another rank."""

_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "torch/autograd/graph.py"
_INNERMOST = 3  # frames, among them torch's wrappers


@dataclass(frozen=True)
class Verdict:
    """Conclusion from all records."""

    culprits: Sequence[int]  # ranks for which all others waited, or that failed on their own; empty if undecidable
    why: str  # the reasoning, in words
    waits: Mapping[int, Event]  # by rank, this library's event that the rank was in at the end, if any
    silent: Sequence[int]  # ranks without a record
    # by rank, the collective outside this library that the rank was in at the end, if any
    collectives: Mapping[int, Collective] = field(default_factory=dict)


def blame(records: Sequence[Record]) -> Verdict:
    """Find the rank for which all others waited, from the records of one attempt, one per rank."""
    by_rank = {record.rank: record for record in records}
    members = sorted({rank for record in records for rank in record.members} | set(by_rank))
    silent = [rank for rank in members if rank not in by_rank]
    waits = {rank: wait for rank, record in by_rank.items() if (wait := last_wait(record)) is not None}
    inside = {rank for rank, wait in waits.items() if wait.phase not in _BUSY}
    collectives = {
        rank: last for rank, record in by_rank.items() if rank not in inside and (last := _last_collective(record))
    }

    def verdict(culprits: Sequence[int], why: str) -> Verdict:
        return Verdict(culprits, why, waits, silent, collectives)

    failed = [rank for rank, wait in waits.items() if wait.phase == LOCAL and wait.failed]
    if failed:
        return verdict(failed, "its own step has failed")
    failed = [rank for rank, record in by_rank.items() if record.error and not _OF_A_PEER.search(record.error)]
    if failed and len(failed) < len(members):
        return verdict(failed, f"it has ended with an error of its own, {by_rank[failed[0]].error:.200}")
    awaited = {rank: set[int]() if (peer := waits[rank].peer_rank) is None else {peer} for rank in inside}
    for rank, pending in collectives.items():
        awaited[rank] = {other for other in members if not _has_entered(by_rank.get(other), pending)}
    ends = Counter(end for rank in awaited for end in _ends_of_chains(rank, awaited))
    if silent:
        waited_for = [rank for rank in silent if ends[rank]]
        why = "it has left no record: it was killed or stopped, or ended before it could write one"
        return verdict(waited_for or silent, why)
    outside = [rank for rank in members if rank not in awaited]
    if awaited and outside and (unclear := _why_unclear([by_rank[rank] for rank in outside])):
        return verdict([], unclear)
    if ends:
        return verdict([ends.most_common(1)[0][0]], "the others waited for it, and it waited for none")
    if awaited and outside:
        return verdict(outside, "it was busy elsewhere while the others waited")
    return verdict(*_parting(records))


def last_wait(record: Record) -> Event | None:
    """The innermost unfinished or failed event of a rank, preferably with a peer; None if outside the library."""
    unfinished = [event for event in record.events if event.failed or event.ended is None]
    return max(unfinished, key=lambda event: (bool(event.peer), event.failed, event.number), default=None)


# Who waits for whom


def _last_collective(record: Record) -> Collective | None:
    """The unfinished collective, or the collective that ended the process: torch marks a failed collective as ended."""
    collectives = record.collectives or ()
    if record.reason == UNCAUGHT and collectives and _OF_A_PEER.search(record.error):
        return collectives[-1]
    return next((one for one in collectives if one.goes_on), None)


def _has_entered(record: Record | None, collective: Collective) -> bool:
    """True if a rank has called the same collective, or is not a member of its process group."""
    if record is None or record.collectives is None:
        return False
    in_group = [one for one in record.collectives if one.group == collective.group]
    if not in_group:
        return collective.number > 1  # members have called the earlier collectives
    return any(one.number == collective.number and one.operation == collective.operation for one in in_group)


def _ends_of_chains(rank: int, awaited: Mapping[int, set[int]]) -> set[int]:
    """Ranks at the ends of this rank's chains of waiting, which wait for none themselves."""
    seen = {rank}
    waiting = [rank]
    ends = set[int]()
    while waiting:
        for peer in awaited[waiting.pop()] - seen:
            seen.add(peer)
            if peer in awaited:
                waiting.append(peer)
            else:
                ends.add(peer)
    return ends


def _why_unclear(outside: Sequence[Record]) -> str | None:
    """Reason for doubt: ranks outside the library, without recorded collectives, may still wait in a collective."""
    untraced = [record for record in outside if record.collectives is None]
    for place, words in ((_COLLECTIVES, "a collective of the script"), (_BACKWARD, "backward, where DDP may wait")):
        names = ", ".join(f"rank {record.rank}" for record in untraced if _stands_in(record, place))
        if names:
            return f"cannot tell, because {names} stood in {words}, and torch's flight recorder was off"
    return None


def _stands_in(record: Record, file: str) -> bool:
    return any(file in line for line in list(record.stacks.get("MainThread", ()))[-_INNERMOST:])


# Diverging ranks


def _parting(records: Sequence[Record]) -> tuple[Sequence[int], str]:
    """Ranks that diverged from the majority, with the reason; for circular waits, or waits of all ranks for all."""
    ways = _ways(records)
    shared = set.intersection(*(set(way) for way in ways.values()))
    following: dict[int, str | None] = {}
    for rank, way in ways.items():
        after = max((place for place, point in enumerate(way) if point in shared), default=-1) + 1
        following[rank] = way[after] if after < len(way) else None
    counts = Counter(following.values())
    if len(counts) == 1:
        progress = {record.rank: _progress(record) for record in records}
        behind = [rank for rank in progress if progress[rank] == min(progress.values())]
        if len(behind) < len(records):
            return behind, "it has come less far than the others"
        return [], "cannot tell, because all ranks have come equally far"
    (usual, count), *_ = counts.most_common()
    if usual is not None and 2 * count > len(records):
        parted = [rank for rank, point in following.items() if point != usual]
        went = following[parted[0]]
        return parted, f"the others went on to {usual}, and it " + ("did not" if went is None else f"to {went}")
    told = "; ".join(f"rank {rank} {f'to {point}' if point else 'no further'}" for rank, point in following.items())
    return [], f"cannot tell, because ranks went on in different ways, with no majority: {told}"


def _ways(records: Sequence[Record]) -> dict[int, list[str]]:
    """By rank, its events that all ranks go through: steps, reductions, collectives of common groups; in words."""
    groups = set.intersection(*({one.group for one in record.collectives or ()} for record in records))
    ways = {}
    for record in records:
        times = defaultdict[tuple[int, int, int], int](int)
        way = [(one.begun, str(one)) for one in record.collectives or () if one.group in groups]
        for event in record.events:
            if event.phase in _ON_ALL_RANKS:
                key = (event.optimizer, event.step, event.bucket)
                times[key] += event.phase == "reduce"
                bucket = f" of bucket {event.bucket}" if event.bucket >= 0 else ""
                again = f" in backward pass {times[key]}" if times[key] > 1 else ""
                optimizer = f" of optimizer {event.optimizer}" if event.optimizer else ""
                name = "opt.step()" if event.phase == "step" else event.phase
                way.append((event.begun, f"{name}{bucket} in step {event.step}{again}{optimizer}"))
        ways[record.rank] = [point for _, point in sorted(way, key=lambda one: one[0])]
    return ways


def _progress(record: Record) -> tuple[int, int]:
    last = max((event.step for event in record.events), default=0)
    return last, sum(event.step == last for event in record.events)
