"""Matches a checkpoint with a model and an optimizer by names, shapes and dtypes only, without tensors.

Every misfit becomes a line that a person can act on; a strict load raises with all lines, a lenient one skips the
misfits.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_zero.core.plan.global_names import renamed as renamed_by
from ddp_zero.core.plan.shapes import Value


@dataclass
class Fit:
    """The parts of a checkpoint that can be loaded.

    Attributes:
        values: names of the model whose saved value fits.
        groups: for each group of the optimizer, the saved group whose options it takes, or None.
        states: names of the optimizer's parameters that take their saved state.
        misfits: what does not fit, a line each.
        notes: expected differences, a line each.
    """

    values: list[str] = field(default_factory=list)
    groups: list[int | None] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """The new name of every saved name.

    Args:
        names: as saved.
        rename: maps old names or prefixes up to a dot to new ones, or to "" to drop a prefix. If several match, the
            longest is used.

    Raises:
        ValueError: for an old name that matches no saved name, or two names that become the same.
    """
    return renamed_by(names, rename, "rename=", "the checkpoint")


def fit_values(saved: Mapping[str, Value], live: Mapping[str, Value], fit: Fit) -> None:
    """Match a model's values by name and shape; a different dtype is a misfit, which a lenient load converts."""
    for name, value in live.items():
        if name not in saved:
            fit.misfits.append(f"{name!r} of the model is not in the checkpoint")
        elif saved[name].shape != value.shape:
            fit.misfits.append(f"{name!r} has shape {_shown(value.shape)}, saved is {_shown(saved[name].shape)}")
        else:
            fit.values.append(name)
            if saved[name].dtype != value.dtype:
                fit.misfits.append(f"{name!r} has dtype {value.dtype}, saved is {saved[name].dtype}")
    fit.misfits += [f"{name!r} of the checkpoint is not in the model" for name in saved if name not in live]


def fit_groups(
    saved: Sequence[Sequence[str]],
    live: Sequence[Sequence[str]],
    was_trainable: Collection[str],
    is_trainable: Collection[str],
    fit: Fit,
) -> None:
    """Match groups and states of an optimizer, after `fit_values`.

    A parameter may be on one side only because it was frozen then or is now; any other difference is a misfit.
    Parameters whose values do not fit are not reported again.

    Args:
        saved: names of the parameters in each saved group.
        live: names of the parameters in each group of the optimizer.
        was_trainable: names that were trainable when it was saved.
        is_trainable: names that are trainable now.
        fit: receives the result.
    """
    values = set(fit.values)
    group_of = {name: position for position, names in enumerate(saved) for name in names}
    for position, names in enumerate(live):
        known = Counter(group_of[name] for name in names if name in group_of and name in values)
        fit.groups.append(min(known, key=lambda one: (-known[one], one)) if known else None)
        if len(known) > 1:
            fit.misfits.append(f"group {position} has parameters of the saved groups {sorted(known)}")
        if not known and names:
            fit.notes.append(f"group {position} keeps its options: the saved optimizer has none of its parameters")
        for name in names:
            if name in values and name in group_of:
                fit.states.append(name)
            elif name in values and name in was_trainable:
                fit.misfits.append(f"{name!r} of the optimizer is not in the saved one")
            elif name in values:
                fit.notes.append(f"{name!r} starts without state: it was frozen and not in the optimizer")
    here = {name for names in live for name in names}
    for name in group_of:
        if name not in here and name in values:
            if name in is_trainable:
                fit.misfits.append(f"{name!r} of the saved optimizer is not in this one")
            else:
                fit.notes.append(f"the state of {name!r} is left out: it is frozen and not in the optimizer")


def listed(lines: Sequence[str], most: int = 20) -> str:
    """Lines as a list for a message: at most the first ``most``, then the number of the others."""
    shown = [f"\n  - {line}" for line in lines[:most]]
    return "".join(shown) + (f"\n  and {len(lines) - most} more" if len(lines) > most else "")


def _shown(shape: Sequence[int] | None) -> str:
    return "none: it is no tensor" if shape is None else str(list(shape))
