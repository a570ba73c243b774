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
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ddp_zero.core.comm import Agreement, Communicator, difference_in_options
from ddp_zero.core.local import CLASS_KEY, ParamGroup, comparable_text, digest_of, parameters_of, sample_values
from ddp_zero.core.plan import GroupRank
from ddp_zero.optimizer import shard_of
from ddp_zero.parallel.members import Axes, Member, SharedGroups
from ddp_zero.parallel.placement import LocalParameter

_DECIDING = ("max_grad_norm", "norm_type", "nonfinite", "loss_scale", "stage", "overlap")
_HOLDERS = 11
"""Sets of pipeline stages that compare groups of their own; a message has room for no more."""


class _PlacedOptions(NamedTuple):
    """The options of a group, as text, and the group's position among all groups."""

    position: int
    options: dict[str, str]


# When the optimizer is built


def arguments_of(optimizer_class: object, options: Mapping[str, Any]) -> dict[str, object]:
    """The class and all options of the constructor, for `agree_across`."""
    texts = {
        f"argument {name}=": str(value) if name in _DECIDING else comparable_text(value)
        for name, value in options.items()
    }
    return {"optimizer class": _name(optimizer_class), **texts}


def declare_groups(
    axes: Axes,
    agreements: Sequence[Agreement],
    groups: Sequence[ParamGroup],
    members: Sequence[SharedGroups],
    optimizer_class: Callable[..., Optimizer],
    model: nn.Module,
    first: int = 0,
) -> None:
    """Declare what must be equal of these groups on the ranks along each axis: number, classes, options, parameters.

    ``agreements`` has an agreement per axis, the data-parallel one first. ``first`` is the position of the first of
    these groups among all groups; above 0 they are being added, on all ranks of the mesh.
    """
    names = {id(param): name.removeprefix("module.") for name, param in model.named_parameters()}
    split_params = [member.find_split_parameters(optimizer_class) for member in members]
    for dim, agreement in zip([None, *axes.comm_of_dim], agreements, strict=True):
        if dim is not None:
            facts = [split.facts() for of_dim in split_params for split in of_dim.get(dim, ())]
            agreement.declare(f"parts along {dim!r} of matrices that are stepped whole", facts)
        is_pipeline = dim is not None and dim == axes.pipeline
        if is_pipeline and first == 0:
            continue
        if not is_pipeline:
            agreement.declare("number of parameter groups", first + len(groups))
        for position, group in enumerate(groups, first):
            kind = group.get(CLASS_KEY, optimizer_class)
            place = "the added group" if is_pipeline else f"parameter group {position}"  # stages may have more groups
            agreement.declare_options(group, parameters_of(kind) or (), place)
            agreement.declare(f"optimizer_class of {place}", _name(kind))
        if dim is not None and not is_pipeline:
            _declare_parameters(agreement, members, dim, names)


def _declare_parameters(
    agreement: Agreement, members: Sequence[SharedGroups], dim: str, names: Mapping[int, str]
) -> None:
    """Declare dtype, sizes and ``requires_grad`` of the parameters that must be alike along a mesh dimension."""
    for position, number, local in _each_parameter(members):
        is_cut = dim in local.cut_over
        if is_cut and local.source is None and local.declared.get(dim) is None:
            continue  # in an unknown way: a rank may have parameters that are parts of nothing
        cut = local.single_cut()
        cut_dims = [] if not is_cut else range(local.param.dim()) if cut is None else [cut[1]]
        sizes = ["part" if at in cut_dims else size for at, size in enumerate(local.param.shape)]
        name = names.get(id(local.given), number)  # by which a part may be called differently on each rank
        what = local.label if is_cut else f"parameter {name} of parameter group {position}"
        agreement.declare(what, f"{local.param.dtype} {sizes}{'' if local.given.requires_grad else ', frozen,'}")


def declare_values(axes: Axes, agreements: Sequence[Agreement], members: Sequence[SharedGroups]) -> None:
    """State the first values of parameters that are replicated along the tensor dimension; see `declare_groups`."""
    for dim, agreement in zip([None, *axes.comm_of_dim], agreements, strict=True):
        if dim is not None and dim != axes.pipeline:
            replicated = _replicated_parameters(members, dim)
            for local, sample in zip(replicated, sample_values([local.param for local in replicated]), strict=True):
                agreement.declare(f"values of {local.label}, which is taken as replicated along {dim!r},", sample)


def _replicated_parameters(members: Sequence[SharedGroups], dim: str) -> list[LocalParameter]:
    """Parameters that ranks along a dimension hold alike; not those whose process group says which ranks hold them."""
    return [
        local
        for member in members
        if member.group is None
        for local in member.local_params
        if dim not in local.cut_over
    ]


def _each_parameter(members: Sequence[SharedGroups]) -> Iterator[tuple[int, int, LocalParameter]]:
    """For each parameter: the position of its group among all groups, its index in the group, and the parameter."""
    for member in members:
        remaining = iter(member.local_params)
        for position, group in zip(member.positions, member.groups, strict=True):
            for index_in_group, _ in enumerate(group["params"]):
                yield position, index_in_group, next(remaining)


def _name(kind: object) -> str:
    return getattr(kind, "__qualname__", repr(kind))


# In each step


class Comparison:
    """Compares groups and parameters of these members between ranks. Construction is a collective of the mesh."""

    def __init__(self, axes: Axes, members: Sequence[Member]) -> None:
        self._members = members
        self.note_options(is_silent=False)
        self._dims: dict[int, str | None] = {id(axes.data_comm): None}
        self._dims |= {id(comm): dim for dim, comm in axes.comm_of_dim.items()}
        self._pipeline_dim = axes.pipeline
        groups = [member.shared for member in members]
        replicating_dims = [dim for dim in axes.comm_of_dim if dim != axes.pipeline]
        self._replicated = {dim: _replicated_parameters(groups, dim) for dim in replicating_dims}
        pipeline = axes.comm_of_dim.get(axes.pipeline or "")
        self._common = [] if pipeline is None else self._common_along(pipeline)

    def note_options(self, is_silent: bool) -> None:
        """Note the options that the loop has set; ``is_silent`` on a rank that has joined: it compares nothing."""
        self._is_silent = is_silent
        for member in self._members:
            shard_of(member.zero).local_step.options.note_changes_of_loop(member.zero.param_groups)

    def numbers(self, comm: Communicator) -> list[float]:
        dim = self._dims[id(comm)]
        if self._is_silent:
            return []
        if dim is not None and dim == self._pipeline_dim:
            groups = self._groups_of_stage()
            return [
                float(digest_of([groups[key].options for key in keys])) if comm.group_rank in ranks else 0.0
                for ranks, keys in self._common
            ]
        digests = [float(digest_of(self._options()))]
        if dim is not None:
            digests.append(float(digest_of([_training(local) for local in self._replicated[dim]])))
        return digests

    def difference(self, comm: Communicator) -> tuple[GroupRank, str]:
        dim = self._dims[id(comm)]
        options = self._groups_of_stage() if dim is not None and dim == self._pipeline_dim else self._options()
        training = {local.label: _training(local) for local in self._replicated.get(dim or "", ())}
        if self._is_silent:
            options, training = {}, {}
        gathered = [json.loads(text) for text in comm.all_gather_text(json.dumps([options, training]))]
        for rank, (options, training) in enumerate(gathered):
            for earlier, (earlier_options, earlier_training) in enumerate(gathered[:rank]):
                names = comm.name(GroupRank(earlier)), comm.name(GroupRank(rank))
                for key in sorted(earlier_options.keys() & options.keys()):
                    (position, before), (_, now) = earlier_options[key], options[key]
                    name = next((name for name in before | now if before.get(name) != now.get(name)), None)
                    if name is not None:
                        values = before.get(name, "none"), now.get(name, "none")
                        message = difference_in_options(position, name, *zip(values, names, strict=True))
                        return GroupRank(rank), message
                for label, state in training.items():
                    if (earlier_state := earlier_training.get(label, state)) != state:
                        return GroupRank(rank), _trains_elsewhere(label, (earlier_state, names[0]), (state, names[1]))
        raise AssertionError("numbers have differed")

    def _options(self) -> dict[str, _PlacedOptions]:
        """The options of all groups on this rank, by position."""
        placed = [options for member in self._members for options in _options_of(member)]
        return {str(options.position): options for options in sorted(placed, key=lambda options: options.position)}

    def _groups_of_stage(self) -> dict[str, _PlacedOptions]:
        """The options of groups without a process group, by their number and what all of these were built with."""
        pairs: list[tuple[_PlacedOptions, list[tuple[str, str]]]] = []
        for member in self._members:
            if member.shared.group is None:
                initial = shard_of(member.zero).local_step.options.initial
                pairs += zip(_options_of(member), [sorted(options.items()) for options in initial], strict=True)
        pairs.sort(key=lambda pair: pair[0].position)
        built = digest_of([initial for _, initial in pairs])  # stages with other groups number them differently
        return {f"{number} {built}": options for number, (options, _) in enumerate(pairs)}

    def _common_along(self, comm: Communicator) -> list[tuple[frozenset[int], list[str]]]:
        """Groups that several stages were built with, by the ranks that have them. A collective of the pipeline."""
        keys_of_ranks = [json.loads(text) for text in comm.all_gather_text(json.dumps([*self._groups_of_stage()]))]
        keys_of_holders: dict[frozenset[int], list[str]] = {}
        for key in sorted({key for keys in keys_of_ranks for key in keys}):
            holders = frozenset(rank for rank, keys in enumerate(keys_of_ranks) if key in keys)
            if len(holders) > 1:
                keys_of_holders.setdefault(holders, []).append(key)
        return sorted(keys_of_holders.items(), key=lambda item: (-len(item[0]), item[1]))[:_HOLDERS]


def _options_of(member: Member) -> list[_PlacedOptions]:
    """The options of a member's groups, as the training loop has set them last."""
    values = shard_of(member.zero).local_step.options.values
    return [_PlacedOptions(*pair) for pair in zip(member.shared.positions, values, strict=True)]


def _training(local: LocalParameter) -> str:
    if not local.param.requires_grad:
        return "frozen"
    return "without a gradient" if local.param.grad is None else "with a gradient"


def _trains_elsewhere(label: str, *state_and_rank: tuple[str, str]) -> str:
    shown = " and ".join(f"{state} on {rank}" for state, rank in state_and_rank)
    return (
        f"Expected {label}, which these ranks replicate, to be stepped on all of them or on none, got {shown}. "
        "Freeze it and drop its gradient alike on all ranks, or declare by sharded_over= that each holds a part of it. "
        "Steps inside backward may have been taken: restart from a checkpoint. [ZERO-821]"
    )
