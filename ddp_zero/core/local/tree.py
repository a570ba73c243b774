"""Trees of tensors and plain values as JSON plus a list of tensors; no pickle in either direction.

A *tree* is built of None, bool, int, float, str, `torch.dtype`, `torch.Size`, dense tensors, lists, tuples and dicts
with str or int keys, including `OrderedDict` and `Counter`. Other subclasses of these are refused: the receiver could
not reconstruct them. Parameters whose values are in flight are waited for.
Floats survive exactly, infinities and NaN included. `flatten` turns a tree into (JSON text, tensors in order);
`TensorSpec` describes the memory that the receiver must allocate for each tensor before it arrives.
"""

import ctypes
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.local.placeholders import Awaited, wait_for
from ddp_zero.core.plan.shapes import is_dense
from ddp_zero.error_codes import coded

Tree = Any
_MAPPINGS = (dict, OrderedDict, Counter)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (None: contiguous), dtype and device type of a tensor that is about to arrive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device_type: str

    @property
    def has_gaps(self) -> bool:
        return self.stride is not None and not is_dense(self.shape, self.stride)


def flatten(tree: Tree) -> tuple[str, list[Tensor]]:
    """The tree as JSON text with places for its tensors, and these; TypeError naming the place of a wrong value."""
    tensors: list[Tensor] = []
    return json.dumps(_encode(tree, tensors, "")), tensors


def specs_in(text: str) -> list[TensorSpec]:
    """The specs that `flatten` wrote for the tensors of the tree, in their order; ValueError if one comes twice."""
    found: list[Any] = []
    _build(json.loads(text), found.append)
    specs: dict[int, TensorSpec] = {}
    for one in found:
        shape, stride, dtype, device_type = one["spec"]
        stride = None if stride is None else tuple(stride)
        specs[one["tensor"]] = TensorSpec(tuple(shape), stride, _dtype(dtype), device_type)
    if len(specs) < len(found):
        raise ValueError("A tensor is at several places of the tree. [ZERO-622]")
    return [specs[place] for place in range(len(specs))]


def unflatten(text: str, tensors: Sequence[object]) -> Tree:
    """Rebuild the tree, with these tensors or their stand-ins in its numbered places."""
    return _build(json.loads(text), lambda one: tensors[one["tensor"]])


def _encode(value: Tree, tensors: list[Tensor], path: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Awaited):
        wait_for(value, on_host=True)  # its type is a plain one from then on
    if type(value) in (Tensor, torch.nn.Parameter) and _can_travel(value):
        tensors.append(value.detach().resolve_conj().resolve_neg())
        stride = list(value.stride()) if is_dense(value.shape, value.stride()) else None
        spec = [list(value.shape), stride, _dtype_name(value.dtype), value.device.type]
        return {"tensor": len(tensors) - 1, "spec": spec}
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, tensors, f"{path}[{position}]") for position, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) in _MAPPINGS and all(type(key) in (str, int) for key in value):
        items = [[key, _encode(item, tensors, f"{path}[{key!r}]")] for key, item in value.items()]
        return {"dict": items} if type(value) is dict else {"dict": items, "of": _MAPPINGS.index(type(value))}
    raise TypeError(
        "Expected dense tensors, numbers, strings, lists, tuples and dicts with str or int keys, got "
        f"{type(value).__module__}.{type(value).__qualname__} at {path or 'the top'}. [ZERO-611]"
    )


def _build(value: Any, tensor: Callable[[Any], object]) -> Tree:
    """The tree of parsed JSON; ``tensor`` gives the value for the numbered place of each tensor."""
    if isinstance(value, list):
        return [_build(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value)
    if "dtype" in value:
        return _dtype(value["dtype"])
    if "size" in value:
        return torch.Size(value["size"])
    if "tuple" in value:
        return tuple(_build(item, tensor) for item in value["tuple"])
    mapping = {key: _build(item, tensor) for key, item in value["dict"]}
    return _MAPPINGS[value["of"]](mapping) if "of" in value else mapping


def fill(tree: Tree, kind: type, of: Callable[[Any], Any]) -> Tree:
    """The tree with each value of a kind replaced by the result of ``of``, called for one after the other."""
    if isinstance(tree, kind):
        return of(tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: fill(value, kind, of) for key, value in tree.items()})  # type: ignore[call-arg]
    if type(tree) in (list, tuple):
        return type(tree)(fill(value, kind, of) for value in tree)
    return tree


def copy_tree(tree: Tree) -> Tree:
    """The tree with a copy of every tensor, which holds only the tensor's own elements."""
    text, tensors = flatten(tree)
    return unflatten(text, [tensor.clone() for tensor in tensors])


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements in logical order, as a 1-D tensor of bytes; the same memory if it is contiguous."""
    flat = tensor.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # view(-1) keeps the odd stride of one element


def memory_of(plain: Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor as bytes; they keep the tensor alive."""
    if not plain.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    memory.owner = plain  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def check_can_travel(value: Any, label: str) -> None:
    """Check that a state can be sent; TypeError with ``label`` as the parameter's name if not."""
    try:
        flatten(value)
    except TypeError as error:
        message = f"Expected a state that can be sent without pickle for {label}. {error}"
        raise TypeError(coded(message, "[ZERO-611]")) from error


def _can_travel(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Expected the name of a torch dtype, got {name!r}. [ZERO-622]")
    return dtype
