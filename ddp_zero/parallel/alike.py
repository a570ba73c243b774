"""What ranks must have alike along each axis of the job: options of groups, and the parameters that they replicate.

Parameters that ranks along the tensor dimension replicate drift apart if one of them steps with another rate, or leaves
one out. No gradient tells, so ranks compare themselves: when the optimizer is built, when a group is added, and in each
``opt.step()``, in a message that it sends in any case.

    data      options of all groups; parameters are compared by the members, over their own ranks
    tensor    options of all groups, parameters, and which of those that are replicated train
    pipeline  later on, options of groups that were built alike: stages may have rates of their own
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_zero.core.comm import Agreement, Communicator, difference_in_options
from ddp_zero.core.local import CLASS_KEY, ParamGroup, digest_of, parameters_of, sample_values, written
from ddp_zero.core.plan import GroupRank
from ddp_zero.optimizer import shard_of
from ddp_zero.parallel.members import Axes, Member, SharedGroups
from ddp_zero.parallel.placement import Held

_DECIDING = ("max_grad_norm", "norm_type", "nonfinite", "loss_scale", "stage", "overlap")
_HOLDERS = 11
"""Sets of pipeline stages that compare groups of their own; a message has room for no more."""

_Placed = tuple[int, dict[str, str]]
"""The position of a group among all, and its options."""

# When the optimizer is built


def arguments_of(optimizer_class: object, options: Mapping[str, Any]) -> dict[str, object]:
    """The class and all options of the constructor, for `agreements`."""
    shown = {name: str(value) if name in _DECIDING else written(value) for name, value in options.items()}
    return {"optimizer class": _name(optimizer_class), **{f"argument {name}=": one for name, one in shown.items()}}


def declare(
    axes: Axes,
    statements: Sequence[Agreement],
    groups: Sequence[ParamGroup],
    members: Sequence[SharedGroups],
    optimizer_class: Callable[..., Optimizer],
    model: nn.Module,
    first: int = 0,
) -> None:
    """State groups along each axis, in an agreement of each, the data-parallel one first.

    ``first`` is the position of the first of these groups among all; above 0 they are added, on all ranks of the mesh.
    """
    names = {id(param): name.removeprefix("module.") for name, param in model.named_parameters()}
    wholes = [one.find_wholes(optimizer_class) for one in members]
    for dim, statement in zip([None, *axes.along], statements, strict=True):
        if dim is not None:
            facts = [one.facts() for of_dim in wholes for one in of_dim.get(dim, ())]
            statement.declare(f"parts along {dim!r} of matrices that are stepped whole", facts)
        is_pipeline = dim is not None and dim == axes.pipeline
        if is_pipeline and first == 0:
            continue
        if not is_pipeline:
            statement.declare("number of parameter groups", first + len(groups))
        for position, group in enumerate(groups, first):
            kind = group.get(CLASS_KEY, optimizer_class)
            place = "the added group" if is_pipeline else f"parameter group {position}"  # stages may have more groups
            statement.declare_options(group, parameters_of(kind) or (), place)
            statement.declare(f"optimizer_class of {place}", _name(kind))
        if dim is not None and not is_pipeline:
            _declare_parameters(statement, members, dim, names)


def _declare_parameters(
    statement: Agreement, members: Sequence[SharedGroups], dim: str, names: Mapping[int, str]
) -> None:
    for position, number, one in _each(members):
        is_cut = dim in one.cut_over
        if is_cut and one.source is None and one.declared.get(dim) is None:
            continue  # in an unknown way: a rank may have parameters that are parts of nothing
        cut = one.single_cut()
        sizes = [
            "part" if is_cut and (cut is None or at == cut[1]) else size for at, size in enumerate(one.param.shape)
        ]
        name = names.get(id(one.given), number)  # by which a part may be called differently on each rank
        what = one.label if is_cut else f"parameter {name} of parameter group {position}"
        statement.declare(what, f"{one.param.dtype} {sizes}{'' if one.given.requires_grad else ', frozen,'}")


def declare_values(axes: Axes, statements: Sequence[Agreement], members: Sequence[SharedGroups]) -> None:
    """State the first values of parameters that are replicated along the tensor dimension; see `declare`."""
    for dim, statement in zip([None, *axes.along], statements, strict=True):
        if dim is not None and dim != axes.pipeline:
            replicated = _replicated_parameters(members, dim)
            for one, sample in zip(replicated, sample_values([one.param for one in replicated]), strict=True):
                statement.declare(f"values of {one.label}, which is taken as replicated along {dim!r},", sample)


def _replicated_parameters(members: Sequence[SharedGroups], dim: str) -> list[Held]:
    """Parameters that ranks along a dimension hold alike; not those whose process group says which ranks hold them."""
    return [one for member in members if member.group is None for one in member.held if dim not in one.cut_over]


def _each(members: Sequence[SharedGroups]) -> Iterator[tuple[int, int, Held]]:
    """Each parameter of members, with the position of its group among all and its number in that."""
    for member in members:
        of_member = iter(member.held)
        for position, group in zip(member.positions, member.groups, strict=True):
            for number, _ in enumerate(group["params"]):
                yield position, number, next(of_member)


def _name(kind: object) -> str:
    return getattr(kind, "__qualname__", repr(kind))


# In each step


class Comparison:
    """Compares groups and parameters of these members between ranks. Building one is a collective of the mesh."""

    def __init__(self, axes: Axes, members: Sequence[Member]) -> None:
        self._members = members
        self.look(is_silent=False)
        self._dims: dict[int, str | None] = {id(axes.everyone): None}
        self._dims |= {id(comm): dim for dim, comm in axes.along.items()}
        self._pipeline = axes.pipeline
        shared = [member.shared for member in members]
        self._replicated = {dim: _replicated_parameters(shared, dim) for dim in axes.along if dim != axes.pipeline}
        pipeline = axes.along.get(axes.pipeline or "")
        self._common = [] if pipeline is None else self._common_along(pipeline)

    def look(self, is_silent: bool) -> None:
        """Take note of options that the loop has given; ``is_silent`` where no loop does, on a rank that has joined."""
        self._is_silent = is_silent
        for member in self._members:
            shard_of(member.zero).local_step.options.note_changes_of_loop(member.zero.param_groups)

    def numbers(self, comm: Communicator) -> list[float]:
        dim = self._dims[id(comm)]
        if self._is_silent:
            return []
        if dim is not None and dim == self._pipeline:
            values = self._of_stage()
            return [
                float(digest_of([values[key][1] for key in keys])) if comm.group_rank in ranks else 0.0
                for ranks, keys in self._common
            ]
        found = [float(digest_of(self._options()))]
        if dim is not None:
            found.append(float(digest_of([_training(one) for one in self._replicated[dim]])))
        return found

    def difference(self, comm: Communicator) -> tuple[GroupRank, str]:
        dim = self._dims[id(comm)]
        options = self._of_stage() if dim is not None and dim == self._pipeline else self._options()
        training = {one.label: _training(one) for one in self._replicated.get(dim or "", ())}
        if self._is_silent:
            options, training = {}, {}
        every = [json.loads(text) for text in comm.all_gather_text(json.dumps([options, training]))]
        for rank, (theirs, trained) in enumerate(every):
            for one, (others, others_trained) in enumerate(every[:rank]):
                who = comm.name(GroupRank(one)), comm.name(GroupRank(rank))
                for key in sorted(others.keys() & theirs.keys()):
                    (position, mine), (_, own) = others[key], theirs[key]
                    name = next((name for name in mine | own if mine.get(name) != own.get(name)), None)
                    if name is not None:
                        values = mine.get(name, "none"), own.get(name, "none")
                        message = difference_in_options(position, name, *zip(values, who, strict=True))
                        return GroupRank(rank), message
                for label, state in trained.items():
                    if (other := others_trained.get(label, state)) != state:
                        return GroupRank(rank), _trains_elsewhere(label, (other, who[0]), (state, who[1]))
        raise AssertionError("numbers have differed")

    def _options(self) -> dict[str, _Placed]:
        placed = [one for member in self._members for one in _place(member)]
        return {str(position): (position, values) for position, values in sorted(placed, key=lambda one: one[0])}

    def _of_stage(self) -> dict[str, _Placed]:
        """The options of groups without a process group, by their number and what all of these were built with."""
        placed, firsts = [], []
        for member in (one for one in self._members if one.shared.group is None):
            placed += _place(member)
            firsts += [sorted(first.items()) for first in shard_of(member.zero).local_step.options.initial]
        ordered = sorted(zip(placed, firsts, strict=True), key=lambda one: one[0][0])
        built = digest_of([first for _, first in ordered])  # stages with other groups number them differently
        return {f"{number} {built}": one for number, (one, _) in enumerate(ordered)}

    def _common_along(self, comm: Communicator) -> list[tuple[frozenset[int], list[str]]]:
        """Groups that several stages were built with, by the ranks that have them. A collective of the pipeline."""
        every = [json.loads(text) for text in comm.all_gather_text(json.dumps([*self._of_stage()]))]
        holders: dict[frozenset[int], list[str]] = {}
        for key in sorted({key for keys in every for key in keys}):
            ranks = frozenset(rank for rank, keys in enumerate(every) if key in keys)
            if len(ranks) > 1:
                holders.setdefault(ranks, []).append(key)
        return sorted(holders.items(), key=lambda item: (-len(item[0]), item[1]))[:_HOLDERS]


def _place(member: Member) -> list[_Placed]:
    return [*zip(member.shared.positions, shard_of(member.zero).local_step.options.values, strict=True)]


def _training(one: Held) -> str:
    if not one.param.requires_grad:
        return "frozen"
    return "without a gradient" if one.param.grad is None else "with a gradient"


def _trains_elsewhere(label: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    shown = " and ".join(f"{state} on {rank}" for state, rank in (one, other))
    return (
        f"Expected {label}, which these ranks replicate, to be stepped on all of them or on none, got {shown}. "
        "Freeze it and drop its gradient alike on all ranks, or declare by sharded_over= that each holds a part of it. "
        "Steps inside backward may have been taken: restart from a checkpoint. [ZERO-821]"
    )
