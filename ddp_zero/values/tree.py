"""Trees of tensors and plain values as JSON plus a list of tensors; no pickle in either direction.

A *tree* is built of None, bool, int, float, str, `torch.dtype`, `torch.Size`, dense tensors, lists, tuples and dicts
with str or int keys, including `OrderedDict` and `Counter`. Other subclasses of these are refused: the receiver could
not reconstruct them. An object of a class that was declared by `state_class` is, in the tree, a dict with the class's
name and its state, and so is a deque; `restore` makes it an object again, and knows no other classes. Parameters whose
values are in flight are waited for.
Floats survive exactly, infinities and NaN included. `flatten` turns a tree into (JSON text, tensors in order);
`TensorSpec` describes the memory that the receiver must allocate for each tensor before it arrives.
"""

import ctypes
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_zero.error_codes import coded
from ddp_zero.values.placeholders import Awaited, wait_for
from ddp_zero.values.shapes import is_dense

Tree = Any
Flat = tuple[str, list[Tensor]]
"""A tree as `flatten` gives it."""
_MAPPINGS = (dict, OrderedDict, Counter)
_CLASS, _STATE = "__class__", "state"
"""Keys of the dict that stands for an object."""
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class _Declared:
    """A class whose objects may be in a tree."""

    name: str
    to_state: Callable[[Any], Tree]
    from_state: Callable[[Tree], Any]


_declared: dict[type, _Declared] = {}


def state_class(
    kind: _Class, to_state: Callable[[Any], Any] | None = None, from_state: Callable[[Any], Any] | None = None
) -> _Class:
    """Declare a class whose objects an optimizer keeps in its state, so that they can be saved; also a decorator.

    Call it on every rank, at any time before a save or load, as in each program that loads. Nothing is pickled: a
    checkpoint holds the class's name and plain values, and a class that a program has not declared is not loaded.

    Args:
        kind: the class.
        to_state: returns an object's state: tensors, numbers, strings, lists and dicts of these. By default its
            attributes.
        from_state: builds an object from that. By default an object with these attributes, without calling ``kind``.

    Returns:
        The class.

    Raises:
        TypeError: if it is not a class.
    """
    if not isinstance(kind, type):
        raise TypeError(f"Expected a class whose objects are in an optimizer's state, got {kind!r:.80}. [ZERO-611]")

    def with_attributes(state: Mapping[str, Any]) -> Any:
        made: Any = object.__new__(kind)
        vars(made).update(state)
        return made

    name = f"{kind.__module__}.{kind.__qualname__}"
    _declared[kind] = _Declared(name, to_state or (lambda made: dict(vars(made))), from_state or with_attributes)
    return kind


state_class(deque, lambda made: [list(made), made.maxlen], lambda state: deque(*state))


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


def flatten(tree: Tree) -> Flat:
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
        raise ValueError("A tensor is at several places of the tree.")
    return [specs[place] for place in range(len(specs))]


def allocate(specs: Sequence[TensorSpec]) -> tuple[list[Tensor], list[memoryview]]:
    """Empty tensors on the host for those that are about to arrive, and the bytes of each in the order of memory."""
    tensors = [
        torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        if spec.stride is None
        else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
        for spec in specs
    ]
    return tensors, [memory_of(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)) for tensor in tensors]


def unflatten(text: str, tensors: Sequence[object]) -> Tree:
    """Rebuild the tree, with these tensors or their stand-ins in its numbered places; see `restore`."""
    return _build(json.loads(text), lambda one: tensors[one["tensor"]])


def _encode(value: Tree, tensors: list[Tensor], path: str) -> Any:
    """A tree as values of JSON. Its tensors are appended to ``tensors``. TypeError for other values."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Awaited):
        wait_for(value, on_host=True)  # its type is plain from then on
    if type(value) in (Tensor, torch.nn.Parameter) and _can_travel(value):
        tensors.append(value.detach().resolve_conj().resolve_neg())
        is_whole = value.is_contiguous() or is_dense(value.shape, value.stride())
        stride = list(value.stride()) if is_whole else None
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
    if type(value) in _declared:
        declared = _declared[type(value)]
        return _encode({_CLASS: declared.name, _STATE: declared.to_state(value)}, tensors, path)
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


def rebuild(text: str, tensors: Sequence[object]) -> Tree:
    """The tree that was flattened, its objects included, with these tensors."""
    tree = unflatten(text, tensors)
    return restore(tree) if f'"{_CLASS}"' in text else tree


def restore(tree: Tree) -> Tree:
    """The tree with the objects that were in it when it was flattened; TypeError for one of an undeclared class."""
    if isinstance(tree, Mapping):
        found = {key: restore(value) for key, value in tree.items()}
        return type(tree)(found) if _CLASS not in found else _object_of(found)  # type: ignore[call-arg]
    return type(tree)(map(restore, tree)) if type(tree) in (list, tuple) else tree


def check_declared(tree: Tree) -> None:
    """Check that `restore` knows the classes of all objects, whatever is in the places of tensors; TypeError if not."""
    if isinstance(tree, Mapping):
        if _CLASS in tree:
            _declared_as(tree[_CLASS])  # raises for an unknown name
        tree = list(tree.values())
    if type(tree) in (list, tuple):
        for value in tree:
            check_declared(value)


def _object_of(entry: Mapping[str, Any]) -> Any:
    """The object that an entry of a tree stands for, built from the name of its class and its state."""
    return _declared_as(entry[_CLASS]).from_state(entry[_STATE])


def _declared_as(name: object) -> _Declared:
    """The class that was declared by this name; TypeError if there is none."""
    declared = next((known for known in _declared.values() if known.name == name), None)
    if declared is None:
        raise TypeError(
            f"Expected objects of declared classes, got the state of a {name!s:.200}. Call ddp_zero.state_class(...) "
            "with this class on every rank. [ZERO-611]"
        )
    return declared


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements in logical order, as a 1-D tensor of bytes; the same memory if it is contiguous."""
    flat = tensor.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # view(-1) keeps the odd stride of one element


def memory_of(plain: Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor as bytes; they keep the tensor alive."""
    if not plain.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    memory.owner = plain  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def flatten_states(states: Mapping[int, Any], label: Callable[[int], str]) -> Flat:
    """A dict of states as it is sent; TypeError, with the name that ``label`` gives the key, if one cannot be."""
    tensors: list[Tensor] = []
    items: list[Any] = []
    for index, state in states.items():
        try:
            items.append([index, _encode(state, tensors, "")])
        except TypeError as error:
            message = (
                f"Expected a state that can be sent without pickle for {label(index)}. {error} Declare the class by "
                "ddp_zero.state_class(...) on every rank; it may be now."
            )
            raise TypeError(coded(message, "[ZERO-611]")) from error
    return json.dumps({"dict": items}), tensors


def _can_travel(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Expected the name of a torch dtype, got {name!r}.")
    return dtype
