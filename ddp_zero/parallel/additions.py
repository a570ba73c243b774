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
        trained = [one for one in added.held if one.param.requires_grad]
        lone = next((one.label for one in trained if id(one.param) not in reduced), None)
        if lone is not None:
            raise ValueError(
                f"Expected the DDP model to reduce all parameters that train of an added group, or none, got {lone}, "
                "which was frozen when DDP wrapped the model, among others that it reduces. Add those that it does not "
                "reduce as a group of their own. [ZERO-803]"
            )
        other = next((one for one in members if one.ddp is added.ddp and one.group is not added.group), None)
        if other is not None:
            raise ValueError(
                f"Expected process_group of an added group to be that of {other.describe()}, which the same DDP model "
                "reduces, got a different one. Pass the same object, or leave it out in both. [ZERO-803]"
            )
    same = next((one for one in members if one.group is added.group), added)
    if same.shard_group is not added.shard_group:
        raise ValueError(
            f"Expected the shard_group of {same.describe()} in an added group with the same process_group, got a "
            "different one. [ZERO-511]"
        )


@dataclass(frozen=True)
class _Wish:
    """The member into which a rank would put its parameters of an added group."""

    member: int | None  # its number, or `_NEW`; None if it has no parameters
    is_reduced: bool  # by a DDP model
    possible: list[int]  # members with the process group


def wishes(
    members: Sequence[Member], added: SharedGroups, optimizer_class: Callable[..., Optimizer], everyone: Communicator
) -> list[str]:
    """The member for an added group by the choice of each data-parallel rank, for `choose_member`. A collective."""
    possible = [number for number, one in enumerate(members) if one.shared.group is added.group]
    fits = [
        number
        for number in possible
        if members[number].shared.ddp is added.ddp
        and (added.ddp is not None or _can_meet(members[number], added, optimizer_class))
    ]
    wish = [*fits, _NEW][0] if added.held else None
    return everyone.all_gather_text(json.dumps([wish, added.ddp is not None, possible]))


def _can_meet(member: Member, added: SharedGroups, optimizer_class: Callable[..., Optimizer]) -> bool:
    """True if parts of matrices in an added group can meet in this member's steps, or need not."""
    return all(one.kind in member.meeting for wholes in added.find_wholes(optimizer_class).values() for one in wholes)


def choose_member(texts: Sequence[str], members: Sequence[Member], everyone: Communicator) -> Member | None:
    """The member into which an added group goes on all ranks, None for a new one; ValueError on all if they differ."""
    every = [_Wish(*json.loads(text)) for text in texts]
    stated = {rank: one for rank, one in enumerate(every) if one.member is not None}
    number: int | None = _NEW
    if stated:
        first = next(iter(stated))
        number, is_reduced = stated[first].member, stated[first].is_reduced
        other = next(
            (
                rank
                for rank, one in enumerate(every)
                if (rank in stated and (one.member, one.is_reduced) != (number, is_reduced))
                or (rank not in stated and (is_reduced if number == _NEW else number not in one.possible))
            ),
            None,
        )
        if other is not None:
            names = [everyone.name(GroupRank(rank)) for rank in (first, other)]
            raise ValueError(
                f"Expected an added group to go to parameters that are held and reduced alike on all data-parallel "
                f"ranks, got {_in_words(every[first], members)} on {names[0]} and {_in_words(every[other], members)} "
                f"on {names[1]}. Pass groups with the same process_group= as before, and wrap their parameters in DDP "
                "alike, on all of them. [ZERO-506]"
            )
    elif every[0].possible:
        possible = [members[one] for one in every[everyone.group_rank].possible]
        return next((one for one in possible if one.shared.ddp is None), possible[0])
    return None if number is None or number == _NEW else members[number]


def _in_words(wish: _Wish, members: Sequence[Member]) -> str:
    if wish.member is None:
        return "no parameters"
    reduced = "that DDP reduces" if wish.is_reduced else "averaged in opt.step()"
    of_new = "a process group of their own"
    place = of_new if wish.member == _NEW else f"those of {members[wish.member].shared.describe()}"
    return f"parameters {reduced}, beside {place}"


# Taking it


def extend(
    member: Member, added: SharedGroups, recipe: Recipe, axes: Axes, model: nn.Module, undoing: ExitStack
) -> Callable[[], None]:
    """Agree with the ranks of a member that it takes a group. A collective of these ranks.

    Returns a function that steps the group from then on. Closing ``undoing`` leaves it out after all. Neither
    communicates.

    Raises:
        ValueError: if parameters are in a group already, or differ between ranks.
        NotImplementedError: for matrices that have to meet as the first ones of their class in a member, or in parts
            of different sizes as the first ones there.
        TypeError: for an optimizer that needs whole parameters where ranks hold parts, or that the member does not
            have.
    """
    (group,) = added.groups
    found, over = added.find_cuts(recipe.optimizer_class, axes, recipe.options.get("max_byte_imbalance"), member)
    unmet = next((kind for kind in found if kind not in member.meeting), None)
    if unmet is not None:
        raise NotImplementedError(
            f"Expected an elementwise optimizer for {next(iter(found[unmet].values())).label}, which is cut and added "
            f"to parameters that DDP reduces, got {unmet.__name__}, which steps whole matrices and has stepped none in "
            "parts here. Give the constructor a group of such matrices, or build a new ParallelOptimizer and load the "
            "state_dict() of this one. [ZERO-812]"
        )
    group = member.with_meeting(group)
    for kind, cuts in found.items():
        member.meeting[kind].cuts.update(cuts)
        undoing.callback(_drop, member.meeting[kind].cuts, cuts)
    agreed = AddedGroup(engine_of(member.zero).attachment, group)
    undoing.callback(agreed.undo)
    member.check_whole(agreed.table, [*member.shared.held, *added.held])
    if member.shared.ddp is None:
        check_same_values(shard_of(member.zero).ranks.everyone, agreed.table)

    def commit() -> None:
        agreed.commit()
        member.take(added, over, model)

    return commit


def _drop(known: dict[int, Cut], numbers: Iterable[int]) -> None:
    for number in numbers:
        del known[number]
