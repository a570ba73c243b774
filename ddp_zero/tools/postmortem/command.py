"""``ddp-zero postmortem DIR``: the rank, bucket and message for which all ranks waited."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from ddp_zero.error_codes import coded
from ddp_zero.tools.postmortem.blame import Verdict, blame
from ddp_zero.tools.postmortem.records import Collective, Event, Record, read_folder

_POSTED_BY = {"wait_reduce": "reduce", "wait_sync": "sync"}
_SAME_RUN = 600.0  # seconds within which ranks of one attempt start


def main(given: Namespace) -> int:
    """Print the report. Returns the exit status: 0, or 1 if there are no records."""
    try:
        records = read_folder(given.folder, given.attempt)
    except (OSError, ValueError) as error:
        print(f"ddp-zero postmortem: error: {coded(str(error), '[ZERO-907]')}", file=sys.stderr)
        return 1
    print(report(records, num_events=given.events, with_stacks=given.stacks))
    return 0


def report(records: Sequence[Record], num_events: int = 0, with_stacks: bool = False) -> str:
    """The report in words: the verdict first, then a line per rank, then requested events and stacks."""
    verdict = blame(records)
    by_rank = {record.rank: record for record in records}
    members = sorted(by_rank | dict.fromkeys(verdict.silent))
    first = min(record.written for record in records)
    last = max(record.written for record in records)
    lines = [
        f"{len(records)} of {len(members)} ranks have left a record, attempt {records[0].attempt}, "
        f"written {_clock(first)} to {_clock(last)}"
    ]
    lines += [*_warnings(records), "", *_verdict(verdict), ""]
    for rank in members:
        if rank in by_rank:
            lines += _rank(by_rank[rank], verdict.waits.get(rank), verdict.collectives.get(rank))
        else:
            lines.append(f"rank {rank}: no record")
    for record in records:
        lines += _details(record, num_events, with_stacks)
    return "\n".join(lines)


def _warnings(records: Sequence[Record]) -> Iterator[str]:
    starts = [record.started for record in records]
    if max(starts) - min(starts) > _SAME_RUN:
        yield (
            f"warning: ranks started up to {max(starts) - min(starts):.0f} s apart; some records may be of an earlier "
            "run. Use a new folder for each run."
        )


def _verdict(verdict: Verdict) -> Iterator[str]:
    if not verdict.culprits:
        yield f"No single rank to name: {verdict.why}."
        return
    names = ", ".join(f"rank {rank}" for rank in verdict.culprits)
    told = {rank: _what(wait) for rank, wait in verdict.waits.items()}
    told |= {rank: str(pending) for rank, pending in verdict.collectives.items()}
    waits = [what for rank, what in told.items() if rank not in verdict.culprits]
    yield f"Everyone waited for {names}: {verdict.why}." if waits else f"{names}: {verdict.why}."
    if waits:
        common, count = Counter(waits).most_common(1)[0]
        yield f"What {count} of {len(waits)} other ranks with a record waited for: {common}."


def _rank(record: Record, wait: Event | None, pending: Collective | None) -> Iterator[str]:
    where = f"rank {record.rank} ({record.host}, process {record.process})"
    if pending is not None:
        yield f"{where}: {pending}, for {record.written - pending.begun:.1f} s"
        yield from (f"    {line.strip()}" for line in list(record.stacks.get("MainThread", ()))[-1:])
    elif wait is not None:
        until = record.written if wait.ended is None else wait.ended
        nbytes = _bytes_waited_for(record, wait)
        peer = f", from {wait.peer}" if wait.peer else ""
        size = f", {nbytes:,} bytes in all" if nbytes else ""
        yield f"{where}: {_what(wait)}{peer}{size}, for {until - wait.begun:.1f} s"
    elif record.events:
        last = record.events[-1]
        since = record.written - (last.ended or last.begun)
        yield f"{where}: outside the library for {since:.1f} s, after {_what(last)}"
        yield from (f"    {line.strip()}" for line in list(record.stacks.get("MainThread", ()))[-1:])
    else:
        yield f"{where}: no events"
    yield f"    written for {record.reason}" + (f"; {record.error}" if record.error else "")


def _bytes_waited_for(record: Record, wait: Event) -> int:
    posted = [
        event.received
        for event in record.events
        if (event.phase, event.step, event.bucket, event.optimizer)
        == (_POSTED_BY.get(wait.phase), wait.step, wait.bucket, wait.optimizer)
    ]
    return posted[-1] if posted else 0


def _details(record: Record, num_events: int, with_stacks: bool) -> Iterator[str]:
    if num_events:
        yield f"\nlast events of rank {record.rank}"
        for event in record.events[-num_events:]:
            took = "not ended" if event.ended is None else f"{(event.ended - event.begun) * 1e3:.3f} ms"
            moved = f", {event.sent:,} bytes sent, {event.received:,} to receive" if event.sent + event.received else ""
            yield f"    {_clock(event.begun)} {_what(event)}: {took}{', failed' if event.failed else ''}{moved}"
    if with_stacks:
        for name, stack in record.stacks.items():
            yield f"\nrank {record.rank}, {name}"
            yield from (f"    {line}" for lines in stack for line in lines.splitlines())


def _what(event: Event) -> str:
    bucket = f" of bucket {event.bucket}" if event.bucket >= 0 else ""
    message = f", message {event.message!r}" if event.message else ""
    return f"step {event.step}, {event.phase}{bucket}{message}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]
