"""State dicts whose tensors hold only their own bytes."""

import copy
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_zero.local.awaited import wait_for

T = TypeVar("T")


def compact(state_dict: T) -> T:
    """A copy of a state dict for `torch.save`, which writes the whole storage behind every tensor.

    With ``parameters_as_bucket_view=True`` the parameters of a model lie in flat storage, so a file with the weights of
    one layer, or of an adapter, would also contain the other weights::

        torch.save(ddp_zero.compact(model.head.state_dict()), path)

    A file of all weights is the same size without it. Parameters in flight (``sync="forward"``) are waited for.

    Alternatives considered: a hook that makes every ``state_dict()`` such a copy. It would cost the model's memory each
    time, and the tensors of a state dict would no longer be the parameters' memory, to which users may write.

    Args:
        state_dict: any nesting of dicts, lists and tuples, such as a model's or an optimizer's, or both.

    Returns:
        The same nesting, with attributes such as ``_metadata``. A tensor that is a part of a larger storage is copied,
        with its strides; tensors that are the same part share one copy. All other values are returned as given.
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
