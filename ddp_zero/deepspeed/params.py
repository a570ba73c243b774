"""DeepSpeed's ``safe_*`` functions: a parameter's fp32 value, gradient and optimizer state, held by its owners.

They work for any `ddp_zero.ZeroRedundancyOptimizer`, with the engine or without. Functions that get a whole value are
collectives; functions that set one take the same whole value on every rank. The ``local`` forms access this rank's
owned part, and never communicate.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of

_optimizers = WeakTensorKeyDictionary()  # parameter: weak reference to its optimizer

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_ABSENT, _OF_PARAMETER, _SCALAR, _OTHER = range(4)


class _Place:
    def __init__(self, param: Tensor, optimizer: ZeroRedundancyOptimizer) -> None:
        engine = engine_of(optimizer)
        self.param, self.optimizer, self.attachment = param, optimizer, engine.attachment
        self.shard, self.gradients = engine.shard, engine.gradients
        self.index = self.shard.table.index_of[param]

    @property
    def is_owned(self) -> bool:
        return self.shard.binding.owns(self.index)

    @property
    def has_master(self) -> bool:
        return self.shard.masters.needs_master(self.index)

    @property
    def master(self) -> Tensor | None:
        return self.shard.masters.get(self.index)

    def owned_elements(self, value: Tensor) -> Tensor:
        return self.shard.targets.owned_elements(self.index, value)

    def owned_gradient(self) -> Tensor | None:
        """The averaged gradient of this rank's part; None if there is none here."""
        return self.shard.targets.owned_gradient(self.index) if self.is_owned else None

    def states(self) -> dict[str, Any]:
        inner = self.optimizer.optim
        return inner.state.get(self.shard.targets[self.index], {}) if self.is_owned else {}


# Whole values


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 value of a parameter: its master if it has one. A collective if it has.

    Args:
        param: the parameter.

    Returns:
        A new tensor in the parameter's shape; None if the parameter is in no sharded optimizer.
    """
    place = _place(param)
    return None if place is None else full_fp32_param(place.optimizer, param)


def full_fp32_param(optimizer: ZeroRedundancyOptimizer, param: Tensor) -> Tensor:
    place = _Place(param, optimizer)
    if not place.has_master:
        return param.detach().float().clone()
    found = _gather(place, place.master)
    assert found is not None, "its owner has a master"
    return found


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter, and its master.

    Args:
        param: the parameter.
        value: the new value, in the parameter's shape, the same on every rank.

    Raises:
        ValueError: for a parameter in no sharded optimizer, or a value of another shape.
        RuntimeError: between a backward pass that has stepped and ``opt.step()``.
    """
    place = _require_place(param)
    _check_shape(param, value)
    place.attachment.check_before_step("safe_set_full_fp32_param()")
    shard = place.shard
    with torch.no_grad(), shard.changing_state():
        shard.snapshot = None
        param.copy_(value)
        if place.master is not None:
            place.master.copy_(place.owned_elements(value))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The averaged gradient of a parameter, times the loss scale if there is one. A collective.

    Args:
        param: the parameter.

    Returns:
        A new tensor, fp32 for a parameter with a master; None if there is no gradient.

    Raises:
        RuntimeError: if the step inside backward has consumed the gradient, or if no reduction has averaged it.
    """
    place = _place(param)
    if place is None:
        return None if param.grad is None else param.grad.detach().clone()
    grad = place.gradients.gather_grad(param)
    return grad.float() if grad is not None and place.has_master else grad


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the averaged gradient of a parameter, before the step.

    Args:
        param: the parameter.
        value: the new gradient, in the parameter's shape, the same on every rank.

    Raises:
        ValueError: for a value of another shape, or a parameter without a gradient.
        RuntimeError: if a step has consumed the gradient.
    """
    _check_shape(param, value)
    if param.grad is None:
        raise ValueError("The parameter has no gradient. Call this between backward and the step. [ZERO-713]")
    place = _place(param)
    if place is None:
        param.grad.copy_(value)
        return
    place.gradients.edit_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A value of a parameter's optimizer state, such as ``"exp_avg"``. A collective.

    Args:
        param: the parameter.
        optim_state_key: key of the state.

    Returns:
        A new tensor, in the parameter's shape or a scalar; None if there is no such state yet.

    Raises:
        TypeError: for a state that is neither of the parameter's shape nor a number.
    """
    place = _place(param)
    return None if place is None else _gather(place, place.states().get(optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a value of a parameter's optimizer state.

    Args:
        param: the parameter.
        value: the new value, in the parameter's shape or a scalar, the same on every rank.
        optim_state_key: key of the state.

    Raises:
        ValueError: for a parameter in no sharded optimizer, or on its owner for a state that does not exist yet.
    """
    place = _require_place(param)
    states, shard = place.states(), place.shard
    held = states.get(optim_state_key)
    if held is None and place.is_owned:
        raise ValueError(
            f"There is no state {optim_state_key!r} of {shard.table.label(place.index)} yet. It exists after the "
            "first step. [ZERO-713]"
        )
    if isinstance(held, Tensor):
        value = place.owned_elements(value) if value.shape == param.shape else value
        if value.numel() != 1:
            _check_shape(held, value, "it in the parameter's shape, or a scalar")
    with torch.no_grad(), shard.changing_state():
        shard.snapshot = None
        if isinstance(held, Tensor):
            held.copy_(value)
        elif held is not None:
            states[optim_state_key] = type(held)(value.item())


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each parameter's gradient by a function of it. A collective.

    Args:
        param_list: the parameters; those without a gradient are skipped.
        update_func: function of the gradient and the parameter that returns the new gradient.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# This rank's part


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the fp32 value of this rank's part of a parameter; None if this rank owns no part.

    Args:
        param: the parameter.

    Raises:
        ValueError: for a parameter in no sharded optimizer.
    """
    place = _require_place(param)
    return place.shard.targets[place.index].detach().float().clone() if place.is_owned else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of a parameter's fp32 master; the model has it after the next step.

    Args:
        param: the parameter.
        value: the new value, in the shape of the part.

    Raises:
        ValueError: if this rank owns no part of the parameter, or for another shape.
        NotImplementedError: for a parameter without a master, whose copies on other ranks would differ.
    """
    place = _require_place(param)
    if not place.has_master:
        raise NotImplementedError(
            "An fp32 parameter has no master that only its owner holds: every rank holds it. Use "
            "safe_set_full_fp32_param() on every rank. [ZERO-713]"
        )
    _set_held(place.master, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the averaged gradient of this rank's part of a parameter; None if there is none here.

    Args:
        param: the parameter.

    Raises:
        ValueError: for a parameter in no sharded optimizer.
    """
    own = _require_place(param).owned_gradient()
    return None if own is None else own.detach().clone()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the averaged gradient of this rank's part of a parameter; every rank that owns a part of it sets its own.

    Then the step, `safe_get_full_grad` and ``max_grad_norm`` take each part from its owner. Until the step, stage 1
    refuses ``opt.clip_grad_norm_()`` and ``opt.full_grad()``, since not all ranks know.

    Args:
        param: the parameter.
        value: the new gradient, in the shape of the part.

    Raises:
        ValueError: if this rank has no such gradient, or for another shape.
    """
    place = _require_place(param)
    _check_held(place.owned_gradient(), value)
    place.gradients.edit_own_part(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's part of a parameter's optimizer state; None if there is none here.

    Args:
        param: the parameter.
        optim_state_key: key of the state.

    Raises:
        ValueError: for a parameter in no sharded optimizer.
    """
    held = _require_place(param).states().get(optim_state_key)
    return torch.as_tensor(held).detach().clone() if held is not None else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a parameter's optimizer state.

    Args:
        param: the parameter.
        value: the new value, in the shape of the part.
        optim_state_key: key of the state.

    Raises:
        ValueError: if this rank has no such state, or for another shape.
    """
    place = _require_place(param)
    held = place.states().get(optim_state_key)
    _set_held(held if isinstance(held, Tensor) else None, value)
    place.shard.snapshot = None


# The optimizer of a parameter


def remember(optimizer: ZeroRedundancyOptimizer) -> None:
    """Register an optimizer as the optimizer of its parameters."""
    for param in shard_of(optimizer).table.params:
        _optimizers[param] = weakref.ref(optimizer)


def _place(param: Tensor) -> _Place | None:
    known = _optimizers.get(param)
    if known is None or known() is None:
        # only for optimizers built without the engine, which registers its own
        for one in gc.get_objects():
            if isinstance(one, ZeroRedundancyOptimizer) and hasattr(one, "_engine"):
                remember(one)
        known = _optimizers.get(param)
    optimizer = None if known is None else known()
    return None if optimizer is None else _Place(param, optimizer)


def _require_place(param: Tensor) -> _Place:
    place = _place(param)
    if place is None:
        raise ValueError(
            "The parameter belongs to no ZeroRedundancyOptimizer of this process. Pass an object from "
            "engine.module.parameters() that trains. [ZERO-713]"
        )
    return place


def _set_held(held: Tensor | None, value: Tensor) -> None:
    with torch.no_grad():
        _check_held(held, value).copy_(value)


def _check_held(held: Tensor | None, value: Tensor) -> Tensor:
    if held is None:
        raise ValueError(
            "This rank owns nothing of the parameter. Call it on its owner alone, opt.owner_of(param), or call the "
            "full function on every rank. [ZERO-713]"
        )
    _check_shape(held, value, "the part that this rank owns, in the shape in which the get function returns it")
    return held


def _check_shape(param: Tensor, value: Tensor, what: str = "the whole value, on every rank") -> None:
    if value.shape != param.shape:
        raise ValueError(
            f"Expected a value of shape {list(param.shape)}, got shape {list(value.shape)}. Pass {what}. [ZERO-713]"
        )


# Gathering


def _gather(place: _Place, held: Any) -> Tensor | None:
    """The owners' parts of a value, joined on every rank; None if there is none. A collective."""
    shard, index = place.shard, place.index
    param = shard.table.params[index]
    comm = shard.comm
    pieces = shard.binding.pieces[index]
    mine = None if held is None else torch.as_tensor(held).detach()
    kind = _kind(place.owned_elements(param.detach()), mine) if place.is_owned else _ABSENT
    code = 0 if mine is None or mine.dtype not in _DTYPES else _DTYPES.index(mine.dtype)
    kinds, codes = zip(*comm.all_gather_ints([kind, code]), strict=True)
    first = pieces[0].owner
    # decided on all ranks by the gathered kinds, so that all raise, return or broadcast together
    if any(kinds[piece.owner] == _OTHER for piece in pieces):
        raise TypeError(
            f"Expected a state of {shard.table.label(index)} of shape {list(param.shape)} or a scalar; its owner "
            "holds a state of a different shape. Read it there, by safe_get_local_optimizer_state(). [ZERO-713]"
        )
    if any(kinds[piece.owner] == _ABSENT for piece in pieces):
        return None
    dtype = _DTYPES[codes[first]]
    if kinds[first] == _SCALAR:
        number = torch.empty(1, dtype=dtype, device=param.device) if mine is None else mine.reshape(1).to(param.device)
        comm.broadcast_from_owner(number, first)
        return number.reshape(()).clone()
    whole = torch.empty_like(param, dtype=dtype)
    if mine is not None:
        place.owned_elements(whole).copy_(mine)
    shard.broadcast_from_owner(index, whole)
    return whole


def _kind(own: Tensor, mine: Tensor | None) -> int:
    if mine is None:
        return _ABSENT
    if mine.shape == own.shape:
        return _OF_PARAMETER
    return _SCALAR if mine.numel() == 1 else _OTHER
