"""A bucket's way, compiled from the plan: the calls that are made once a bucket is full, in their order.

Everything that the plan, the regime of the pass and the options decide is decided here, once; the calls hold tensors,
messages and lists of their own. `PartitionedBuckets.start_acts`, `StepRunner.acts` and `ParameterSync.acts` make
them. With buckets ``k`` of the plan, of a model on one device:

    regime                 stage 2, bucket k is full                             stage 1
    overlapped             wait k - 1, reduce k, step k - 1, sync k - 1          wait k - 1, step k - 1, sync k - 1
    ... the last bucket    ... and wait, step, sync k                            ... and wait, step, sync k
    overlapped, no lag     wait k - 1, reduce k, keep k - 1                      -
    ... the last bucket    ... and wait k, step and sync 0 to k                  wait, step, sync 0 to k
    waiting, deferred      wait k - 1, reduce k, keep k - 1                      -

Small buckets are reduced first: reduce k, wait k - 1; see `BufferBytes.starts_early`.

A step of all buckets, as by ``opt.step()``, is a sequence of the same acts, given the source of its gradients; see
`StepRunner.run`. Where a rank steps in other memory (`OffloadedRunner`), whichever buckets are there by then are
stepped and sent. Other owners, buckets or parameters have programs of their own; see `OverlapHook`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ddp_zero.core.backward.bucket_gradients import BucketGradients
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.overlap_machine import OverlapMachine, Regime, turns
from ddp_zero.core.comm.recorder import Act, Label
from ddp_zero.core.step.runner import StepRunner

_MOST_WORDS = 8


class Program(NamedTuple):
    """The calls for a bucket of the plan that is full.

    Attributes:
        run: makes them.
        labels: of their events, in order.
    """

    run: Callable[[], None]
    labels: list[Label]


def compile_pass(
    gradients: Gradients, runner: StepRunner, machine: OverlapMachine, regime: Regime, begin: Callable[[range], object]
) -> list[Program]:
    """The programs of all buckets in a pass of a regime.

    ``begin`` is called with the buckets that are stepped next, before the first of them.
    """
    buckets, found, waited = gradients.buckets, list[Program](), set[int]()
    for place, due in enumerate(turns(regime, machine.lag, len(buckets))):
        bucket = buckets[place]
        is_last = place == len(buckets) - 1
        acts = gradients.start_acts(place)
        if acts and place:
            earlier = buckets[place - 1]
            wait = _on_stream_of(earlier, bucket, [(earlier.waiting, earlier.wait)])
            acts = [*acts, *wait] if bucket.starts_early else [*wait, *acts]
            waited.add(place - 1)
        if is_last:
            acts.append((None, machine.last_bucket_arrived))
        elif due and due.start == 0:
            acts.append((None, machine.step_began))
        if due and (due.start == 0 or gradients.is_users):
            acts.append((None, partial(begin, due)))
        for index in due:
            stepped = buckets[index]
            first: list[Act] = [] if index in waited else [(stepped.waiting, stepped.wait)]
            step: list[Act] = [(label, partial(act, stepped)) for label, act in runner.acts(index)]
            of_bucket = [*first, *step]
            if gradients.shares_memory:
                of_bucket.append((of_bucket[-1][0] if of_bucket else None, stepped.release))
            acts += _on_stream_of(stepped, bucket, of_bucket)
            waited.add(index)
        if not due and gradients.shares_memory:
            for kept in buckets[max(0, place - 1) : place]:
                acts += _on_stream_of(kept, bucket, [(None, kept.keep)])
        run = runner.shard.trace.sequence(acts)
        if (context := _context(bucket)) is not None:
            run = partial(_within, context, run)
        found.append(Program(run, [label for label, _ in groupby(acts, itemgetter(0)) if label is not None]))
    return found


def describe(programs: Sequence[Program]) -> list[str]:
    """A line for each kind of bucket: the events once it is full."""
    shown = [_in_words(program.labels, place) for place, program in enumerate(programs)]
    lines = []
    for text, group in groupby(range(len(shown)), shown.__getitem__):
        places = [*group]
        which = str(places[0]) if len(places) == 1 else f"{places[0]} to {places[-1]}"
        lines.append(f"bucket k = {which} is full: {text}")
    return lines


def _in_words(labels: Sequence[Label], place: int) -> str:
    words = [f"{label.phase} {f'k - {place - label.bucket}' if label.bucket < place else 'k'}" for label in labels]
    return ", ".join(words if len(words) <= _MOST_WORDS else [*words[: _MOST_WORDS // 2], "...", words[-1]])


def _on_stream_of(bucket: BucketGradients, current: BucketGradients, acts: list[Act]) -> list[Act]:
    """These acts on the stream of a bucket, in a program on the stream of another bucket."""
    context = _context(bucket)
    if context is None or bucket.on_stream is current.on_stream:
        return acts
    return [(label, partial(_within, context, act)) for label, act in acts]


def _context(bucket: BucketGradients) -> AbstractContextManager[object] | None:
    return None if isinstance(bucket.on_stream, nullcontext) else bucket.on_stream


def _within(context: AbstractContextManager[object], act: Callable[[], object]) -> None:
    with context:
        act()
