"""The part of a whole state dict that one rank owns.

A *state dict* here is the unsharded optimizer's: ``{"state": {id: state}, "param_groups": [{..., "params": [id]}]}``,
where ids are parameter indices.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.inner import ParamGroup, check_epsilon
from ddp_zero.core.local.parameters import MASTER_KEY, ParameterTable, SteppedTensors
from ddp_zero.core.local.parts import narrowed


def restrict_state_dict(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[ParamGroup],
    table: ParameterTable,
    inner: torch.optim.Optimizer,
    stepped: SteppedTensors,
) -> tuple[dict[str, Any], list[int], dict[int, Tensor]]:
    """The part of a whole state dict that an inner optimizer over some of the parameters can load.

    Args:
        state_dict: the unsharded optimizer's; states of parameters that this rank does not own may be left out.
        param_groups: the exposed groups.
        table: their parameters.
        inner: the optimizer over this rank's parameters.
        stepped: what is stepped for each of them.

    Returns:
        The inner optimizer's state dict, the indices of all parameters that have a state, in the order found, and all
        masters. Tensors are not copied.

    Raises:
        ValueError: if it does not fit, naming the group or the parameter and why.
    """
    _check_groups(state_dict, param_groups)
    saved_groups = state_dict["param_groups"]
    check_epsilon(inner, saved_groups, table, stepped)
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    index_of_id = {saved_id: index for index, saved_id in enumerate(saved_ids)}
    local_id = {param: i for i, param in enumerate(param for group in inner.param_groups for param in group["params"])}

    local_state: dict[Any, Any] = {}
    masters: dict[int, Tensor] = {}
    for saved_id, value in state_dict["state"].items():
        if isinstance(saved_id, str) and saved_id not in index_of_id:
            local_state[saved_id] = value
            continue
        if saved_id not in index_of_id:
            raise ValueError(f"Expected state for parameters 0 to {len(saved_ids) - 1}, got some for {saved_id!r}.")
        index = index_of_id[saved_id]
        check_state(value, table, index, type(inner), stepped.part(index))
        if MASTER_KEY in value:
            masters[index] = _checked_master(value, table, index, stepped)
            value = {key: item for key, item in value.items() if key != MASTER_KEY}
        if stepped[index] in local_id and (value or index not in masters):
            part = stepped.part(index)
            local_state[local_id[stepped[index]]] = value if part is None else own_part(value, table, index, part)

    owned = {table.params[index] for index in range(len(table)) if stepped[index] in local_id}
    copied = copy.deepcopy([dict(group) for group in saved_groups])  # together: groups may share a tensor, such as lr
    _share_as_before(copied, param_groups)
    local_groups = [
        _localise_group(saved, exposed, inner_group, local_id, owned)
        for saved, exposed, inner_group in zip(copied, param_groups, inner.param_groups, strict=True)
    ]
    indices = [index_of_id[saved_id] for saved_id in state_dict["state"] if saved_id in index_of_id]
    return {"state": local_state, "param_groups": local_groups}, indices, masters


def _checked_master(value: Mapping[str, Any], table: ParameterTable, index: int, stepped: SteppedTensors) -> Tensor:
    master = value[MASTER_KEY]
    if not stepped.wants_master(index):
        raise ValueError(
            f"Expected state without {MASTER_KEY!r} for {table.label(index)}, which is stepped in "
            f"{table.params[index].dtype}, got some. Build the optimizer with master_weights=True over a model in low "
            f"precision, or leave {MASTER_KEY!r} out of the state to lose it."
        )
    if not isinstance(master, Tensor) or master.dtype != torch.float32:
        kind = master.dtype if isinstance(master, Tensor) else type(master).__name__
        raise ValueError(f"Expected {MASTER_KEY!r} of {table.label(index)} to be an fp32 tensor, got {kind}.")
    return master


def _localise_group(
    saved: Mapping[str, Any],
    exposed: ParamGroup,
    inner_group: ParamGroup,
    local_id: Mapping[Tensor, int],
    owned: Collection[Tensor],
) -> ParamGroup:
    kept = [position for position, param in enumerate(exposed["params"]) if param in owned]
    per_parameter = {"params": [local_id[param] for param in inner_group["params"]]}
    if "param_names" in saved:
        per_parameter["param_names"] = [saved["param_names"][position] for position in kept]
    return {**saved, **per_parameter}


def _share_as_before(loaded: Sequence[ParamGroup], exposed: Sequence[ParamGroup]) -> None:
    """Let loaded groups share tensors that the exposed ones share, if files have equal copies of them."""
    first: dict[int, Tensor] = {}
    for group, now in zip(loaded, exposed, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and not value.is_meta:
                one = first.setdefault(id(now[key]), value)
                if one.dtype == value.dtype and torch.equal(one, value):
                    group[key] = one


def _check_groups(state_dict: Mapping[str, Any], param_groups: Sequence[ParamGroup]) -> None:
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"Expected an optimizer's state dict with 'state' and 'param_groups', got no {key!r}.")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(param_groups):
        raise ValueError(f"Expected a state dict with {len(param_groups)} parameter groups, got {len(saved_groups)}.")
    for position, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        if "params" not in saved:
            raise ValueError(
                f"Expected a list of parameter ids in group {position} of the state dict, got no 'params'."
            )
        if len(saved.get("param_names", saved["params"])) != len(saved["params"]):
            raise ValueError(
                f"Expected a name for each of {len(saved['params'])} parameters in group {position} of the state dict, "
                f"got {len(saved['param_names'])}."
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"Expected {len(group['params'])} parameters in group {position} of the state dict, got "
                f"{len(saved['params'])}."
            )


def own_part(value: Mapping[str, Any], table: ParameterTable, index: int, part: slice) -> dict[str, Any]:
    """The state of this rank's part of a parameter, from that of the whole, in memory of its own."""
    mine = narrowed(value, table.params[index], None, part)
    return {
        key: item.clone() if isinstance(item, Tensor) and item is not value[key] else item for key, item in mine.items()
    }


def check_state(
    value: Any,
    table: ParameterTable,
    index: int,
    optimizer_class: type[torch.optim.Optimizer],
    part: slice | None = None,
) -> None:
    """Check that a state is a dict and, for torch's own optimizers, has no tensor of a different parameter's shape.

    Args:
        value: the state.
        table: the parameters.
        index: the parameter.
        optimizer_class: of the optimizer that is to load it.
        part: what this rank owns of a parameter that is cut; the state may be that of the part already.

    Raises:
        ValueError: if not, naming the parameter.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"Expected a dict as the state of {table.label(index)}, got {type(value).__name__}.")
    if not optimizer_class.__module__.startswith("torch.optim"):
        return
    shape = table.params[index].shape
    for key, tensor in value.items():
        is_of_part = part is not None and isinstance(tensor, Tensor) and tensor.shape == (part.stop - part.start,)
        if isinstance(tensor, Tensor) and tensor.dim() and not (is_of_part or _broadcasts(tensor.shape, shape)):
            raise ValueError(
                f"Expected state {key!r} of {table.label(index)} to fit its shape, got shape {list(tensor.shape)}. "
                "Is this the state dict of a different model, or were the parameters given in a different order?"
            )


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a state has its parameter's shape or, as Adafactor's, that shape with some dimensions reduced to 1."""
    return len(shape) == len(target) and all(one in (1, other) for one, other in zip(shape, target, strict=True))
