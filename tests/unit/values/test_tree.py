import json
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from ddp_zero.values.shapes import is_dense
from ddp_zero.values.tree import TensorSpec, flatten, memory_of, specs_in, unflatten
from tests.unit.values.trees import DTYPES, assert_same, of_random_bytes, trees


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


# There and back


@given(trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    text, sent = flatten(tree)
    assert_same(tree, unflatten(text, sent))


@given(trees)
def test_specs_are_those_of_the_tensors_in_order_of_appearance(tree: Any) -> None:
    text, sent = flatten(tree)
    expected = tensors_in(tree)
    assert [tensor.data_ptr() for tensor in sent] == [tensor.data_ptr() for tensor in expected]
    strides = [tuple(t.stride()) if is_dense(t.shape, t.stride()) else None for t in expected]
    assert specs_in(text) == [
        TensorSpec(tuple(t.shape), stride, t.dtype, "cpu") for t, stride in zip(expected, strides, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_name_that_comes_back(dtype: torch.dtype) -> None:
    tensor = of_random_bytes(3, dtype, [2, 3]).t()
    text, (sent,) = flatten({"exp_avg": [dtype, tensor]})
    assert specs_in(text) == [TensorSpec((3, 2), (1, 3), dtype, "cpu")]
    assert_same({"exp_avg": [dtype, tensor]}, unflatten(text, [sent]))


def test_the_tensors_that_came_take_the_places_of_those_that_were_sent() -> None:
    text, sent = flatten({"b": (torch.zeros(2), [torch.zeros(1)]), "a": torch.zeros(3)})
    assert [spec.shape for spec in specs_in(text)] == [(2,), (1,), (3,)]
    came = [torch.ones_like(tensor) for tensor in sent]
    tree = unflatten(text, came)
    assert tree["b"][0] is came[0]
    assert tree["b"][1][0] is came[1]
    assert tree["a"] is came[2]


def test_tensors_are_sent_detached_and_without_a_copy() -> None:
    param = nn.Parameter(torch.ones(3))
    _, (sent,) = flatten({"momentum": param})
    assert not sent.requires_grad
    assert sent.data_ptr() == param.data_ptr()


# The text


def test_the_text_is_json_that_any_reader_takes_apart() -> None:
    tree = {"step": 3, 7: (1.5, torch.bfloat16), "tensor": [torch.zeros(2, 3).t(), None, "ä\ud800"]}
    text, _ = flatten(tree)
    assert text.isascii()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "dict": [
            ["step", 3],
            [7, {"tuple": [1.5, {"dtype": "bfloat16"}]}],
            ["tensor", [{"tensor": 0, "spec": [[3, 2], [1, 3], "float32", "cpu"]}, None, "ä\ud800"]],
        ]
    }


HOSTILE = ["load", "nn", "__name__", "float32.itemsize", "no_such_thing", "Tensor", ""]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_in_torch_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"name of a torch dtype, got '{name}'"):
        unflatten(json.dumps({"tuple": [1, {"dtype": name}]}), [])
    with pytest.raises(ValueError, match=f"name of a torch dtype, got '{name}'"):
        specs_in(json.dumps([{"tensor": 0, "spec": [[1], [1], name, "cpu"]}]))


# What cannot travel


class Tagged(Tensor):
    """A subclass may hold anything beside its data."""


Pair = namedtuple("Pair", ["left", "right"])

STRANGERS: dict[str, tuple[Any, str]] = {
    "object": (object(), "builtins.object"),
    "bytes": (b"x", "builtins.bytes"),
    "set": ({1}, "builtins.set"),
    "complex": (1j, "builtins.complex"),
    "function": (len, "builtins.builtin_function_or_method"),
    "class": (int, "builtins.type"),
    "device": (torch.device("cpu"), "torch.device"),
    "generator": (torch.Generator(), "torch._C.Generator"),
    "named tuple": (Pair(1, 2), f"{__name__}.Pair"),
    "tensor subclass": (torch.ones(1).as_subclass(Tagged), f"{__name__}.Tagged"),
    "float key": ({1.5: 0}, "builtins.dict"),
    "bool key": ({True: 0}, "builtins.dict"),
    "tuple key": ({(1, 2): 0}, "builtins.dict"),
    "None key": ({None: 0}, "builtins.dict"),
}


@pytest.mark.parametrize(("stranger", "name"), STRANGERS.values(), ids=STRANGERS.keys())
def test_other_types_are_refused_naming_where_they_are(stranger: Any, name: str) -> None:
    with pytest.raises(TypeError) as deep:
        flatten({"good": torch.ones(1), "a": [0, (1, {7: stranger})]})
    assert str(deep.value).endswith(f"got {name} at ['a'][1][1][7]. [ZERO-611]")
    with pytest.raises(TypeError) as top:
        flatten(stranger)
    assert str(top.value).endswith(f"got {name} at the top. [ZERO-611]")


def test_the_bytes_of_a_tensor_keep_it_alive() -> None:
    tensor = torch.arange(5.0)
    alive, memory = weakref.ref(tensor), memory_of(tensor)
    del tensor
    assert alive() is not None
    assert torch.frombuffer(memory, dtype=torch.float32).tolist() == [0, 1, 2, 3, 4]
    del memory
    assert alive() is None
    assert bytes(memory_of(torch.ones(0))) == b""
