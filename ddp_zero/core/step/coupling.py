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
from typing import Any

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
        mine: dict[GroupIndex, Values] = {}  # after all buckets
        for snapshot in snapshots:
            for place, values in snapshot.values.items():
                mine[place] = mine.get(place, {}) | values
        local_mismatch = next(filter(None, (snapshots[0].mismatch(later) for later in snapshots[1:])), "")
        groups = self._inner.param_groups
        statement = [int(bool(local_mismatch)), int(None in mine), _digest(mine.get(None, {}))]
        for place, group in enumerate(groups):
            statement += [int(place in mine), _digest(mine.get(place, {})), _digest(counters_in(group))]
        given = self._local_step.options
        everyone = self._comm.all_gather_ints([*statement, given.summary.digest])
        if len({rank[-1] for rank in everyone}) > 1:
            self._raise_options_differ(given)
        by_place = [[rank[3 * place : 3 * place + 3] for rank in everyone] for place in range(1, len(groups) + 1)]
        agree = [
            _agree([rank[1:3] for rank in everyone]),
            *(_agree([rank[:2] for rank in ranks]) for ranks in by_place),
        ]
        if not all(agree) or any(rank[0] for rank in everyone):
            self._raise_mismatch(mine, local_mismatch)
        stale = [place for place, ranks in enumerate(by_place) if not _are_up_to_date(ranks)]
        if stale:
            self._always_checks, self.next_step = True, 0
            self._copy_from_stepping_rank({place: by_place[place] for place in stale})

    def _raise_options_differ(self, given: LoopOptions) -> None:
        everyone = [json.loads(shown) for shown in self._comm.all_gather_text(json.dumps(given.values))]
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        pairs = [*zip(everyone[0], everyone[rank], strict=False)]
        place, (mine, theirs) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
        name = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
        shown = [
            (values.get(name, "none"), self._comm.name(GroupRank(of))) for values, of in ((mine, 0), (theirs, rank))
        ]
        raise RuntimeError(difference_in_options(given.position(place), name, *shown))

    def _copy_from_stepping_rank(self, stale: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Copy options of groups that this rank has not stepped from the first rank that has. A collective."""
        groups, me = self._inner.param_groups, self._comm.group_rank
        shown = self._comm.all_gather_text(json.dumps({place: counters_in(groups[place]) for place in stale}))
        changed = [place for place, ranks in stale.items() if not ranks[me][0]]
        for place in changed:
            source = next(rank for rank, (has_stepped, *_) in enumerate(stale[place]) if has_stepped)
            for name, value in json.loads(shown[source])[str(place)].items():
                _set_counter(groups[place], name, value)
        if changed:
            self._local_step.mirror_to_exposed()

    def _raise_mismatch(self, mine: dict[GroupIndex, Values], local_mismatch: str) -> None:
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


def _agree(statements: Sequence[Sequence[int]]) -> bool:
    """True if all ranks that have stepped report the same values."""
    return len({digest for has_stepped, digest in statements if has_stepped}) <= 1


def _are_up_to_date(statements: Sequence[Sequence[int]]) -> bool:
    """True if ranks that have stepped nothing of a group have the same numbers in it as ranks that have stepped."""
    known = {digest for has_stepped, _, digest in statements if has_stepped}
    return not known or {digest for _, _, digest in statements} == known


def counters_in(group: ParamGroup) -> Values:
    """All numbers in a group's options: flags, integers, floats and real tensors of one element."""
    return {name: _text_of(value) for name, value in options_of(group).items() if _is_counter(value)}


def _is_counter(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta or value.requires_grad)
    return isinstance(value, bool | int | float)


@torch.no_grad()
def _set_counter(group: ParamGroup, name: str, written: str) -> None:
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
