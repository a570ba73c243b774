"""What a parameter's owner holds of it, on every rank: the fp32 value, the gradient, the optimizer's state.

The functions have the names of DeepSpeed's, and work for any `ddp_zero.ZeroRedundancyOptimizer`, with the engine or
without. Those that get a whole value are collectives; those that set one take the whole value on every rank, the same
one. The ``local`` forms touch what this rank owns, and never communicate.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_zero.core.engine.gradient_access import full_grad
from ddp_zero.core.local.parts import whole_of
from ddp_zero.core.local.placeholders import on_this_rank
from ddp_zero.core.plan.ownership import home, is_cut
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, sharded_of

_found = WeakTensorKeyDictionary()  # parameter: weak reference to its optimizer

_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_ABSENT, _OF_PARAMETER, _SCALAR, _OTHER = range(4)


# Whole values


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 value of a parameter: its master if it has one. A collective if it has.

    Returns:
        A new tensor in the parameter's shape; None if the parameter is in no sharded optimizer.
    """
    optimizer = optimizer_of(param)
    return None if optimizer is None else full_fp32_param(optimizer, param)


def full_fp32_param(optimizer: ZeroRedundancyOptimizer, param: Tensor) -> Tensor:
    """See `safe_get_full_fp32_param`."""
    sharded, index = sharded_of(optimizer), _index(optimizer, param)
    if not sharded.stepped.wants_master(index):
        return param.detach().float().clone()
    found = _gathered(optimizer, index, sharded.stepped.master(index))
    assert found is not None, "its owner has a master"
    return found


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a parameter, and its master, to a value given on every rank.

    Raises:
        ValueError: for a parameter in no sharded optimizer, or a value of another shape.
        RuntimeError: between a backward pass that has stepped and ``opt.step()``.
    """
    optimizer = _needed(param)
    _check_shape(param, value)
    engine_of(optimizer).check_before_step("safe_set_full_fp32_param()")
    sharded, index = sharded_of(optimizer), _index(optimizer, param)
    with torch.no_grad(), sharded.changes.one([param.device]):
        sharded.snapshot = None
        param.copy_(value)
        master = sharded.stepped.master(index)
        if master is not None:
            master.copy_(sharded.stepped.own_part(index, value))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The averaged gradient of a parameter, times the loss scale if there is one. A collective in stage 2.

    Returns:
        A new tensor, fp32 for a parameter with a master; None if there is no gradient, or no sharded optimizer.

    Raises:
        RuntimeError: if the step inside backward has used the gradient up, or if no reduction has averaged it.
    """
    optimizer = optimizer_of(param)
    if optimizer is None:
        return None if param.grad is None else param.grad.detach().clone()
    grad = full_grad(engine_of(optimizer), param)
    has_master = sharded_of(optimizer).stepped.wants_master(_index(optimizer, param))
    return grad.float() if grad is not None and has_master else grad


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the averaged gradient of a parameter, before the step, to a value given on every rank.

    Raises:
        ValueError: for a value of another shape, or a parameter without a gradient.
        RuntimeError: if a step has used the gradient up.
    """
    _check_shape(param, value)
    if param.grad is None:
        raise ValueError("Expected a parameter with a gradient, between backward and the step, got one without.")
    optimizer = optimizer_of(param)
    if optimizer is None:
        param.grad.copy_(value)
        return
    engine_of(optimizer).let_gradients_wait()
    held = on_this_rank(param.grad)
    if held is not None:
        held.copy_(sharded_of(optimizer).stepped.own_part(_index(optimizer, param), value).reshape(held.shape))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A value of the optimizer's state of a parameter, such as ``"exp_avg"``. A collective.

    Returns:
        A new tensor, in the parameter's shape if that is the state's; None if there is no such state yet.

    Raises:
        TypeError: for a state that is neither of the parameter's shape nor a number.
    """
    optimizer = optimizer_of(param)
    if optimizer is None:
        return None
    return _gathered(optimizer, _index(optimizer, param), _held_state(optimizer, param, optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a value of the optimizer's state of a parameter to one given on every rank.

    Raises:
        ValueError: for a parameter in no sharded optimizer, or on its owner for a state that does not exist yet.
    """
    optimizer = _needed(param)
    held = _held_state(optimizer, param, optim_state_key)
    sharded, index = sharded_of(optimizer), _index(optimizer, param)
    if held is None and sharded.binding.owns(index):
        raise ValueError(f"Expected a state {optim_state_key!r} of {sharded.table.label(index)}, got none yet.")
    with torch.no_grad(), sharded.changes.one([param.device]):
        sharded.snapshot = None
        if isinstance(held, Tensor):
            held.copy_(sharded.stepped.own_part(index, value) if value.shape == param.shape else value)
        elif held is not None:
            optimizer.optim.state[sharded.stepped[index]][optim_state_key] = type(held)(value.item())


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set each parameter's gradient to what a function makes of it. A collective in stage 2."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


# This rank's part


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 value of what this rank owns of a parameter, a copy; None if that is nothing."""
    optimizer = _needed(param)
    held = _local(optimizer, param, lambda index: sharded_of(optimizer).stepped[index])
    return None if held is None else held.detach().float().clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set what this rank owns of a parameter; the model has it after the next step.

    Raises:
        ValueError: if this rank owns nothing of the parameter, or for another shape.
        NotImplementedError: for a parameter without a master, whose copies on other ranks would differ.
    """
    optimizer = _needed(param)
    index = _index(optimizer, param)
    master = sharded_of(optimizer).stepped.master(index)
    if not sharded_of(optimizer).stepped.wants_master(index):
        raise NotImplementedError(
            "Expected a parameter with an fp32 master, got one of fp32, which every rank holds. Use "
            "safe_set_full_fp32_param() on every rank."
        )
    _set_held(master, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """What this rank has of the averaged gradient of a parameter that it owns, a copy; None if that is nothing."""
    optimizer = _needed(param)
    if param.grad is None or not sharded_of(optimizer).binding.owns(_index(optimizer, param)):
        return None
    held = on_this_rank(param.grad)
    own = None if held is None else sharded_of(optimizer).stepped.own_part(_index(optimizer, param), held)
    return None if own is None else own.detach().clone()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set what this rank has of the averaged gradient of a parameter that it owns.

    Raises:
        ValueError: if that is nothing, or for another shape.
    """
    optimizer = _needed(param)
    index, sharded = _index(optimizer, param), sharded_of(optimizer)
    engine_of(optimizer).let_gradients_wait()
    held = on_this_rank(param.grad) if param.grad is not None and sharded.binding.owns(index) else None
    _set_held(None if held is None else sharded.stepped.own_part(index, held), value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """What this rank holds of the optimizer's state of a parameter, a copy; None if that is nothing."""
    held = _held_state(_needed(param), param, optim_state_key)
    return torch.as_tensor(held).detach().clone() if held is not None else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set what this rank holds of the optimizer's state of a parameter.

    Raises:
        ValueError: if that is nothing, or for another shape.
    """
    optimizer = _needed(param)
    held = _held_state(optimizer, param, optim_state_key)
    _set_held(held if isinstance(held, Tensor) else None, value)
    sharded_of(optimizer).snapshot = None


# Finding


def optimizer_of(param: Tensor) -> ZeroRedundancyOptimizer | None:
    """The sharded optimizer of a parameter, found among the objects of this process the first time."""
    known = _found.get(param)
    optimizer = known() if known is not None else None
    if optimizer is None:
        for one in gc.get_objects():
            if isinstance(one, ZeroRedundancyOptimizer) and hasattr(one, "_engine"):
                remember(one)
        known = _found.get(param)
        optimizer = known() if known is not None else None
    return optimizer


def remember(optimizer: ZeroRedundancyOptimizer) -> None:
    """Know the optimizer of its parameters."""
    for param in sharded_of(optimizer).table.params:
        _found[param] = weakref.ref(optimizer)


def _needed(param: Tensor) -> ZeroRedundancyOptimizer:
    optimizer = optimizer_of(param)
    if optimizer is None:
        raise ValueError("Expected a parameter of a ZeroRedundancyOptimizer of this process, got one of none.")
    return optimizer


def _index(optimizer: ZeroRedundancyOptimizer, param: Tensor) -> int:
    return sharded_of(optimizer).table.index_of[param]


def _local(optimizer: ZeroRedundancyOptimizer, param: Tensor, held: Callable[[int], Tensor]) -> Tensor | None:
    index = _index(optimizer, param)
    return held(index) if sharded_of(optimizer).binding.owns(index) else None


def _held_state(optimizer: ZeroRedundancyOptimizer, param: Tensor, key: str) -> Any:
    """A value of this rank's state of a parameter; None if there is none."""
    sharded, index = sharded_of(optimizer), _index(optimizer, param)
    if not sharded.binding.owns(index):
        return None
    return optimizer.optim.state.get(sharded.stepped[index], {}).get(key)


def _set_held(held: Tensor | None, value: Tensor) -> None:
    if held is None:
        raise ValueError("Expected something that this rank owns, got nothing here; see opt.owner_of(param).")
    _check_shape(held, value)
    with torch.no_grad():
        held.copy_(value)


def _check_shape(param: Tensor, value: Tensor) -> None:
    if value.shape != param.shape:
        raise ValueError(f"Expected a value of shape {list(param.shape)}, got one of {list(value.shape)}.")


def _gathered(optimizer: ZeroRedundancyOptimizer, index: int, held: Any) -> Tensor | None:
    """What the owners hold for a parameter, put together on every rank; None if they hold nothing. A collective."""
    sharded = sharded_of(optimizer)
    param, comm, pieces = sharded.table.params[index], sharded.comm, sharded.binding.pieces[index]
    mine = None if held is None else torch.as_tensor(held).detach()
    kind = _kind(sharded.stepped.own_part(index, param.detach()), mine) if sharded.binding.owns(index) else _ABSENT
    code = 0 if mine is None or mine.dtype not in _DTYPES else _DTYPES.index(mine.dtype)
    kinds, codes = zip(*comm.all_gather_ints([kind, code]), strict=True)
    first = home(pieces)
    if any(kinds[piece.owner] == _OTHER for piece in pieces):
        raise TypeError(
            f"Expected a state of {sharded.table.label(index)} of shape {list(param.shape)} or a scalar, its owner "
            "holds one of a different shape."
        )
    if any(kinds[piece.owner] == _ABSENT for piece in pieces):
        return None
    dtype = _DTYPES[codes[first]]
    if kinds[first] == _SCALAR:
        number = torch.empty(1, dtype=dtype, device=param.device) if mine is None else mine.reshape(1).to(param.device)
        comm.send_to_all(number, first)
        return number.reshape(()).clone()
    run = param.new_empty(param.numel(), dtype=dtype)
    for piece in pieces:
        window = run[piece.start : piece.stop]
        if mine is not None and piece.owner == comm.group_rank:
            window.copy_(mine if is_cut(pieces) else _run(mine, param))
        comm.send_to_all(window, piece.owner)
    return whole_of(run, param).clone()


def _kind(own: Tensor, mine: Tensor | None) -> int:
    if mine is None:
        return _ABSENT
    if mine.shape == own.shape:
        return _OF_PARAMETER
    return _SCALAR if mine.numel() == 1 else _OTHER


def _run(value: Tensor, param: Tensor) -> Tensor:
    """All elements of a value, 1-D, in the order of the parameter's memory."""
    return torch.empty_like(param, dtype=value.dtype).copy_(value).as_strided((param.numel(),), (1,))
