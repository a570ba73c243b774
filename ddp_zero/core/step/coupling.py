"""Detects optimizers that compute a value from all parameters at once, which is wrong in a shard.

Prodigy and D-Adaptation keep a step size in their groups that is a sum over all parameters. Sharded, every rank, and
every bucket of a rank, would sum over its own part and step with a different number. What an optimizer keeps in a group
or on itself is one value for all parameters, so a float there that differs after a step proves such coupling.

Values are compared in the first steps, and then less and less often: after each bucket on this rank, and between ranks
by one small collective at the end of the step. Parameters are not compared; see `core.engine.shardable` for coupling
that leaves no trace in options, such as a global norm.

If the optimizer changes options of a group only when the group has gradients, a rank that has stepped nothing of the
group keeps old values. Then it copies the values of ranks that have stepped the group, from then on after every step.

Options that loops of different ranks set differently are no coupling: they are compared first. `LoopOptions` compares
them in all other steps.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.comm.groups import Peers
from ddp_zero.core.comm.ranks import difference_in_options, digest
from ddp_zero.core.local.inner import LocalStep, ParamGroup, options_of, suboptimizer_for, suboptimizers_of
from ddp_zero.core.local.loop_options import LoopOptions
from ddp_zero.core.plan.partition import GroupRank

GroupIndex = int | None
"""The number of the group that holds a value, or None for one outside of groups."""
Values = dict[str, str]
"""Values by name, as text: equal texts are equal values."""

_FIRST_STEPS, _EVERY = 8, 1000


def is_checked_step(step: int) -> bool:
    """True if values are compared after a step: the first 8, every power of two, every thousandth."""
    return step <= _FIRST_STEPS or step & (step - 1) == 0 or step % _EVERY == 0


def values_in(holder: Mapping[Any, Any], prefix: str = "") -> Values:
    """The floats and one-element floating-point tensors that a mapping has under string keys."""
    return {
        prefix + name: _text_of(value) for name, value in holder.items() if isinstance(name, str) and _is_number(value)
    }


def values_of(
    optimizer: Optimizer, groups: Sequence[ParamGroup], stepped: Sequence[int]
) -> Iterator[tuple[GroupIndex, Values]]:
    """Values that a step may change: of each stepped group, with its index; then of the optimizer itself, with None.

    The optimizer's values include those of the optimizers that it wraps. ``stepped`` are indices of groups; without any
    there is nothing.
    """
    for place in stepped:
        yield place, values_in(options_of(groups[place]))
    if not stepped:
        return
    outside_groups = {**values_in(optimizer.state), **values_in(vars(optimizer))}
    wrapped = [(name, value) for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    stepping = {id(suboptimizer_for(optimizer, groups[place])) for place in stepped}
    wrapped += [(type(part).__name__, part) for part in suboptimizers_of(optimizer)[1:] if id(part) in stepping]
    for name, inner in wrapped:
        outside_groups |= {**values_in(inner.state, f"{name}."), **values_in(vars(inner), f"{name}.")}
    yield None, outside_groups


@dataclass
class OptionSnapshot:
    """The values of a rank, after a step or after one of its buckets."""

    who: str  # the rank or bucket, for messages
    values: dict[GroupIndex, Values]  # without groups in which nothing was stepped

    def mismatch(self, other: "OptionSnapshot") -> str:
        """A sentence about the first value that differs between the snapshots, or an empty text."""
        for place, mine in self.values.items():
            theirs = other.values.get(place, {})
            for name, value in mine.items():
                if theirs.get(name, value) != value:
                    where = "an attribute or state of the optimizer" if place is None else f"an option of group {place}"
                    return (
                        f"Expected {name!r}, {where}, to be the same after a step wherever parameters were stepped, "
                        f"got {value} on {self.who} and {theirs[name]} on {other.who}."
                    )
        return ""


class _Report(NamedTuple):
    """What a rank tells other ranks about one group, or about the optimizer outside groups; digests compare values."""

    has_stepped: int  # 1 if the rank has stepped parameters of the group
    values: int  # digest of the values after the step
    counters: int  # digest of all numbers in the group's options


def _report(values: Mapping[GroupIndex, Values], index: GroupIndex, counters: Values) -> _Report:
    return _Report(int(index in values), _digest(values.get(index, {})), _digest(counters))


class CouplingWatch:
    """Compares the values that an optimizer keeps for all parameters, in the steps that `is_checked_step` selects.

    The local step calls `note` after every bucket; `check` is called after the step. Once options were copied from
    other ranks, every step is checked.
    """

    def __init__(self, comm: Peers, local_step: LocalStep) -> None:
        self._comm = comm
        self._local_step = local_step
        self._inner = local_step.inner
        self.next_step = 1  # the next step that may be checked; `step_begins` need not be called before
        self._number = 0
        self._is_checked = False
        self._has_ended = False
        self._always_checks = False  # the same on every rank
        self._snapshots: list[OptionSnapshot] = []

    def step_begins(self, number: int) -> None:
        """Ask the local step for the values after each bucket, if this step is compared."""
        self._is_checked = self._always_checks or is_checked_step(number)
        self._local_step.after_bucket = self.note if self._is_checked else None
        self._number, self._has_ended = number, False
        self._snapshots = []

    def note(self, bucket: int, groups: Sequence[ParamGroup], stepped: Sequence[int]) -> None:
        """Note the values after a bucket's parameters were stepped, in those of these groups that have gradients."""
        me = self._comm.name(self._comm.group_rank)
        self._snapshots.append(
            OptionSnapshot(f"bucket {bucket} of {me}", dict(values_of(self._inner, groups, stepped)))
        )

    def step_ends(self, has_failed: bool) -> None:
        """The step has left its options; a rank whose step failed reports no values."""
        self._local_step.after_bucket = None
        # not in `step_begins`: a step that is skipped is followed by another of the same number
        further = (later for later in range(self._number + 1, self._number + _EVERY) if is_checked_step(later))
        self.next_step = 0 if self._always_checks else next(further, self._number + _EVERY)
        self._has_ended = True
        if has_failed:
            self._snapshots = []

    def check(self) -> None:
        """Compare values after the step. A collective in steps that are checked and were not skipped.

        Options of groups that this rank has not stepped are copied from ranks that have. Raises RuntimeError on every
        rank if a value differs between buckets or between ranks, or if loops have set options differently.
        """
        if not (self._is_checked and self._has_ended):
            return
        self._is_checked = False
        snapshots, self._snapshots = self._snapshots, []
        values_here: dict[GroupIndex, Values] = {}  # after all buckets
        for snapshot in snapshots:
            for index, values in snapshot.values.items():
                values_here[index] = values_here.get(index, {}) | values
        local_mismatch = next(filter(None, (snapshots[0].mismatch(later) for later in snapshots[1:])), "")
        groups = self._inner.param_groups
        reports = [_report(values_here, index, counters_in(group)) for index, group in enumerate(groups)]
        outside = _report(values_here, None, {})
        options = self._local_step.options
        head = [bool(local_mismatch), options.summary.digest, outside.has_stepped, outside.values]
        gathered = self._comm.all_gather_ints([*map(int, head), *chain(*reports)])
        if len({options_digest for _, options_digest, *_ in gathered}) > 1:
            self._raise_options_differ(options)
        outside_of_ranks = [_Report(numbers[2], numbers[3], 0) for numbers in gathered]
        starts = range(len(head), len(gathered[0]), len(outside))
        reports_of = [[_Report(*numbers[start : start + len(outside)]) for numbers in gathered] for start in starts]
        if not all(map(_agree, [outside_of_ranks, *reports_of])) or any(has_mismatch for has_mismatch, *_ in gathered):
            self._raise_mismatch(values_here, local_mismatch)
        stale = {index: ranks for index, ranks in enumerate(reports_of) if not _are_up_to_date(ranks)}
        if stale:
            self._always_checks, self.next_step = True, 0
            self._copy_from_stepping_rank(stale)

    def _raise_options_differ(self, options: LoopOptions) -> None:
        """Raise RuntimeError about the first option in which a rank differs from the first one. A collective."""
        gathered = [json.loads(text) for text in self._comm.all_gather_text(json.dumps(options.values))]
        rank = next(rank for rank, groups in enumerate(gathered) if groups != gathered[0])
        pairs = [*zip(gathered[0], gathered[rank], strict=False)]
        index, (first, other) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
        name = next(name for name in first | other if first.get(name) != other.get(name))
        of_ranks = [
            (values.get(name, "none"), self._comm.name(GroupRank(of))) for values, of in ((first, 0), (other, rank))
        ]
        raise RuntimeError(difference_in_options(options.position(index), name, *of_ranks))

    def _copy_from_stepping_rank(self, stale: Mapping[int, Sequence[_Report]]) -> None:
        """Copy options of groups that this rank has not stepped from the first rank that has. A collective.

        ``stale`` has the reports of all ranks about each group that is not up to date on some rank.
        """
        groups, me = self._inner.param_groups, self._comm.group_rank
        texts = self._comm.all_gather_text(json.dumps({index: counters_in(groups[index]) for index in stale}))
        unstepped = [index for index, reports in stale.items() if not reports[me].has_stepped]
        for index in unstepped:
            source = next(rank for rank, report in enumerate(stale[index]) if report.has_stepped)
            for name, value in json.loads(texts[source])[str(index)].items():
                _set_counter(groups[index], name, value)
        if unstepped:
            self._local_step.mirror_to_exposed()

    def _raise_mismatch(self, mine: dict[GroupIndex, Values], local_mismatch: str) -> None:
        """RuntimeError on every rank about the first value that differs between buckets or ranks. A collective."""
        shown = [local_mismatch, [[place, values] for place, values in mine.items()]]
        snapshots: list[OptionSnapshot] = []
        for rank, text in enumerate(self._comm.all_gather_text(json.dumps(shown))):
            message, values = json.loads(text)
            snapshots.append(OptionSnapshot(self._comm.name(GroupRank(rank)), {place: kept for place, kept in values}))
            message = message or next(filter(None, (earlier.mismatch(snapshots[-1]) for earlier in snapshots[:-1])), "")
            if message:
                name = type(self._inner).__name__
                raise RuntimeError(
                    f"{message} {name} computes it from all parameters that it steps, and every rank and bucket steps "
                    "only some: from this step on at the latest, parameters differ from those of the unsharded "
                    f"optimizer. Start again with {name} unsharded on every rank; ddp_zero.check_shardable() tests a "
                    "class beforehand. If it is a tensor on an accelerator that the training loop sets, set the same "
                    "value on every rank. [ZERO-112]"
                )


def _agree(reports: Sequence[_Report]) -> bool:
    """True if all ranks that have stepped parameters of a group report the same values."""
    return len({report.values for report in reports if report.has_stepped}) <= 1


def _are_up_to_date(reports: Sequence[_Report]) -> bool:
    """True if ranks that have stepped nothing of a group have the same numbers in it as ranks that have stepped."""
    stepped = {report.counters for report in reports if report.has_stepped}
    return not stepped or {report.counters for report in reports} == stepped


def counters_in(group: ParamGroup) -> Values:
    """All numbers in a group's options: flags, integers, floats and real tensors of one element."""
    return {name: _text_of(value) for name, value in options_of(group).items() if _is_counter(value)}


def _is_counter(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta or value.requires_grad)
    return isinstance(value, bool | int | float)


@torch.no_grad()
def _set_counter(group: ParamGroup, name: str, written: str) -> None:
    """Set an option to a number that another rank sent as text, in the form that it has here; a tensor in place."""
    now = group.get(name)
    if isinstance(now, Tensor):
        now.fill_(float(written))
    elif isinstance(now, float) or not written.lstrip("-").isdigit():
        group[name] = float(written)
    else:
        group[name] = type(now)(int(written)) if isinstance(now, bool | int) else int(written)


def _is_number(value: Any) -> bool:
    is_float = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
    return is_float and _is_counter(value)


@torch.no_grad()
def _text_of(value: Any) -> str:
    """A number with all its digits, without the sign of a zero."""
    return str(int(value)) if isinstance(value, int) else repr(float(value) + 0.0)


def _digest(values: Values) -> int:
    return digest(sorted(values.items()))
