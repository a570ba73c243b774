"""State dicts whose tensors bring only their own bytes along."""

import copy
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_zero.local.awaited import wait_for

T = TypeVar("T")


def compact(state_dict: T) -> T:
    """A copy of a state dict for `torch.save`, which writes the whole storage behind every tensor that it is given.

    With ``parameters_as_bucket_view=True`` the parameters of a model lie in flat storage, so a file of the weights of
    one layer, or of an adapter, would hold those of the others as well::

        torch.save(ddp_zero.compact(model.head.state_dict()), path)

    A file of all weights is as large without it. Parameters on their way (``sync="forward"``) are waited for.

    Alternatives considered: a hook that makes every ``state_dict()`` such a copy would cost the model's memory each
    time and break what holds for any module: that the tensors in it are the parameters', to be written to.

    Args:
        state_dict: any nesting of dicts, lists and tuples, such as a model's or an optimizer's, or both.

    Returns:
        The same nesting, with attributes such as ``_metadata``. A tensor that is a part of a larger storage is copied,
        with its strides, several that are the same part together; all others are those that were given.
    """
    return _compact(state_dict, {})  # type: ignore[no-any-return]


def _compact(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _own(value, copies)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _compact(item, copies)
        return copied
    if type(value) is list:
        return [_compact(item, copies) for item in value]
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
        items = [_compact(item, copies) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    return value


@torch.no_grad()
def _own(tensor: Tensor, copies: dict[tuple[Any, ...], Tensor]) -> Tensor:
    """The tensor, or a copy of the run of memory that it lies in."""
    wait_for(tensor)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor
    shape, strides, start = tensor.shape, tensor.stride(), tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if tensor.numel() else 0
    if length * tensor.element_size() == tensor.untyped_storage().nbytes():
        return tensor
    place = (tensor.untyped_storage().data_ptr(), start, shape, strides, tensor.dtype, tensor.device, tensor.is_conj())
    key = (*place, tensor.is_neg(), type(tensor), tensor.requires_grad)
    if key not in copies:
        run = tensor.detach().as_strided((length,), (1,), start).clone()
        part = run.as_strided(shape, strides, 0)
        is_param = type(tensor) is torch.nn.Parameter
        copies[key] = torch.nn.Parameter(part, tensor.requires_grad) if is_param else part
    return copies[key]
