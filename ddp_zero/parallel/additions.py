"""Parameter groups that are added to a `ParallelOptimizer`: into which member they go, and how it takes them.

A group goes into the member with its process group that is reduced as it is: by the same DDP model, or in
``opt.step()``. If there is none it becomes a new member. Ranks without parameters of the group follow the others.

Nothing is final until all ranks of the mesh have agreed, so that after an error the optimizer is as before.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ddp_zero.core.comm import Communicator
from ddp_zero.core.ddp import in_buckets
from ddp_zero.core.engine import AddedGroup
from ddp_zero.core.local import ParamGroup
from ddp_zero.core.plan import GroupRank
from ddp_zero.optimizer import engine_of, shard_of
from ddp_zero.parallel.gradients import check_same_values
from ddp_zero.parallel.members import Axes, Member, SharedGroups, nonfinite
from ddp_zero.parallel.names import GlobalNames
from ddp_zero.parallel.whole import Cut

_NEW = -1
"""In place of a member's number."""


@dataclass
class Recipe:
    """Arguments of the constructor from which members are built, also later ones; ``nonfinite`` has its default."""

    optimizer_class: Callable[..., Optimizer]
    options: dict[str, Any]
    shard_group: ProcessGroup | None
    global_names: GlobalNames | None
    groups: InitVar[Sequence[ParamGroup]]

    def __post_init__(self, groups: Sequence[ParamGroup]) -> None:
        action = nonfinite(self.options, groups)
        self._steps_unasked = self.options.get("nonfinite") is None and action == "step"
        self.options = {**self.options, "nonfinite": action}

    def check_added(self, group: ParamGroup) -> None:
        """ValueError for the first limit of any group if the action for gradients that are not finite depends on it."""
        if group.get("max_grad_norm") is not None and self._steps_unasked:
            raise ValueError(
                "Expected nonfinite= in the constructor, got an added group with the first max_grad_norm: steps with "
                "gradients that are not finite have been taken so far, and would be skipped from now on. Pass "
                "nonfinite='skip' or nonfinite='step' to the constructor. [ZERO-105]"
            )


def parse_group(groups: Sequence[ParamGroup], param_group: ParamGroup, model: nn.Module | None) -> ParamGroup:
    """An added group as torch parses it beside these, with names of the model if these have names.

    TypeError or ValueError as in any optimizer of torch.
    """
    parser = Optimizer([dict(group) for group in groups], {})
    if isinstance(param_group, dict):
        param_group = dict(param_group)
        if "param_names" in parser.param_groups[0]:
            AddedGroup.add_param_names(param_group, parser.param_groups, [] if model is None else [model])
    parser.add_param_group(param_group)
    return parser.param_groups[-1]


# The member


def check_belongs(members: Sequence[SharedGroups], added: SharedGroups) -> None:
    """Check that an added group can go into one member.

    Raises ValueError if a DDP model reduces only some of its parameters that train, or parameters of a member with
    other ranks; for another shard group than the member's.
    """
    if added.ddp is not None:
        reduced = {id(param) for _, param in in_buckets(added.ddp)}
        trained = [local for local in added.local_params if local.param.requires_grad]
        unreduced = next((local.label for local in trained if id(local.param) not in reduced), None)
        if unreduced is not None:
            raise ValueError(
                f"Expected the DDP model to reduce all parameters that train of an added group, or none, got "
                f"{unreduced}, which was frozen when DDP wrapped the model, among others that it reduces. Add those "
                "that it does not reduce as a group of their own. [ZERO-803]"
            )
        of_same_ddp = [member for member in members if member.ddp is added.ddp]
        on_other_ranks = next((member for member in of_same_ddp if member.group is not added.group), None)
        if on_other_ranks is not None:
            raise ValueError(
                f"Expected process_group of an added group to be that of {on_other_ranks.describe()}, which the same "
                "DDP model reduces, got a different one. Pass the same object, or leave it out in both. [ZERO-803]"
            )
    on_same_ranks = next((member for member in members if member.group is added.group), None)
    if on_same_ranks is not None and on_same_ranks.shard_group is not added.shard_group:
        raise ValueError(
            f"Expected the shard_group of {on_same_ranks.describe()} in an added group with the same process_group, "
            "got a different one. [ZERO-511]"
        )


@dataclass(frozen=True)
class _Choice:
    """The member to which a rank would add its parameters of an added group."""

    member: int | None  # the member's index, or `_NEW`; None if the rank has no parameters of the group
    is_reduced: bool  # whether a DDP model reduces the parameters
    possible: list[int]  # indices of the members with the group's process group


def gather_choices(
    members: Sequence[Member], added: SharedGroups, optimizer_class: Callable[..., Optimizer], data_comm: Communicator
) -> list[str]:
    """Each data-parallel rank's `_Choice` for an added group, as JSON, for `choose_member`. A collective."""
    possible = [index for index, member in enumerate(members) if member.shared.group is added.group]
    fitting = [
        index
        for index in possible
        if members[index].shared.ddp is added.ddp
        and (added.ddp is not None or _can_gather(members[index], added, optimizer_class))
    ]
    first = fitting[0] if fitting else _NEW
    choice = first if added.local_params else None
    return data_comm.all_gather_text(json.dumps([choice, added.ddp is not None, possible]))


def _can_gather(member: Member, added: SharedGroups, optimizer_class: Callable[..., Optimizer]) -> bool:
    """True if this member's steps gather the parts of all matrices in an added group that must be stepped whole."""
    of_dim = added.find_split_parameters(optimizer_class)
    classes = {split.optimizer_class for split_params in of_dim.values() for split in split_params}
    return classes <= member.gathering_classes.keys()


def choose_member(texts: Sequence[str], members: Sequence[Member], data_comm: Communicator) -> Member | None:
    """The member to which all ranks add a group, or None for a new member; ``texts`` are from `gather_choices`.

    A rank without parameters of the group follows the others. ValueError on all ranks if choices contradict each other.
    """
    choices = [_Choice(*json.loads(text)) for text in texts]
    choosing = [rank for rank, choice in enumerate(choices) if choice.member is not None]
    if not choosing:
        possible = [members[index] for index in choices[data_comm.group_rank].possible]
        averaged_here = [member for member in possible if member.shared.ddp is None]
        return [*averaged_here, *possible][0] if choices[0].possible else None
    first = choices[choosing[0]]
    for rank, choice in enumerate(choices):
        if choice.member is not None:
            agrees = (choice.member, choice.is_reduced) == (first.member, first.is_reduced)
        else:
            agrees = not first.is_reduced if first.member == _NEW else first.member in choice.possible
        if not agrees:
            names = [data_comm.name(GroupRank(peer)) for peer in (choosing[0], rank)]
            raise ValueError(
                f"Expected an added group to go to parameters that are held and reduced alike on all data-parallel "
                f"ranks, got {_in_words(first, members)} on {names[0]} and {_in_words(choice, members)} "
                f"on {names[1]}. Pass groups with the same process_group= as before, and wrap their parameters in DDP "
                "alike, on all of them. [ZERO-506]"
            )
    return None if first.member is None or first.member == _NEW else members[first.member]


def _in_words(choice: _Choice, members: Sequence[Member]) -> str:
    if choice.member is None:
        return "no parameters"
    reduced = "that DDP reduces" if choice.is_reduced else "averaged in opt.step()"
    of_new = "a process group of their own"
    place = of_new if choice.member == _NEW else f"those of {members[choice.member].shared.describe()}"
    return f"parameters {reduced}, beside {place}"


# Adding it


def extend(
    member: Member, added: SharedGroups, recipe: Recipe, axes: Axes, model: nn.Module, undoing: ExitStack
) -> Callable[[], None]:
    """Prepare to add a group to a member, and agree on it with the member's ranks. A collective of these ranks.

    Returns a function that completes the addition: the member steps the group from then on. Closing ``undoing`` instead
    takes the preparation back. Neither communicates.

    Raises:
        ValueError: if parameters are in a group already, or differ between ranks.
        NotImplementedError: for matrices that have to meet as the first ones of their class in a member, or in parts
            of different sizes as the first ones there.
        TypeError: for an optimizer that needs whole parameters where ranks hold parts, or that the member does not
            have.
    """
    (group,) = added.groups
    gathers = added.plan_gathers(recipe.optimizer_class, axes, recipe.options.get("max_byte_imbalance"), member)
    ungathered = next(
        (needs_wholes for needs_wholes in gathers.cuts if needs_wholes not in member.gathering_classes), None
    )
    if ungathered is not None:
        first = next(iter(gathers.cuts[ungathered].values()))
        raise NotImplementedError(
            f"Expected an elementwise optimizer for {first.label}, which is cut and added "
            f"to parameters that DDP reduces, got {ungathered.__name__}, which steps whole matrices and has stepped "
            "none in parts here. Give the constructor a group of such matrices, or build a new ParallelOptimizer and "
            "load the state_dict() of this one. [ZERO-812]"
        )
    group = member.with_gathering_class(group)
    for needs_wholes, cuts in gathers.cuts.items():
        known_cuts = member.gathering_classes[needs_wholes].cuts
        known_cuts.update(cuts)
        undoing.callback(_remove_keys, known_cuts, cuts)
    agreed = AddedGroup(engine_of(member.zero).attachment, group)
    undoing.callback(agreed.undo)
    member.check_whole(agreed.table, [*member.shared.local_params, *added.local_params])
    if member.shared.ddp is None:
        check_same_values(shard_of(member.zero).ranks.everyone, agreed.table)

    def commit() -> None:
        agreed.commit()
        member.follow_added(added, gathers.comms, model)

    return commit


def _remove_keys(cuts: dict[int, Cut], numbers: Iterable[int]) -> None:
    for number in numbers:
        del cuts[number]
