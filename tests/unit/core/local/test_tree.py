import json
import struct
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_zero.core.local.tree import TensorSpec, flatten, memory_of, specs_in, unflatten
from ddp_zero.core.plan.shapes import is_dense

DTYPES = [
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.bool),
]


def of_random_bytes(seed: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A tensor of any dtype with any bits in it, NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(torch.Size(shape).numel())
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = of_random_bytes(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), shape)
    layout = draw(st.sampled_from(["contiguous", "transposed", "every other", "parameter"]))
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if layout == "every other" and tensor.dim():
        return tensor[::2]
    if layout == "parameter" and tensor.dtype.is_floating_point:
        return nn.Parameter(tensor)
    return tensor


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.sampled_from([-0.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308])
    | st.text()
    | st.sampled_from(["tensor", "spec", "dtype", "tuple", "dict"])
    | st.sampled_from(DTYPES)
    | tensors()
)
keys = st.text() | st.integers() | st.sampled_from(["tensor", "spec", "dtype", "tuple", "dict", "1", 1])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def bytes_of(tensor: Tensor) -> bytes:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(fresh.view(-1).view(torch.uint8).tolist())


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def assert_same(one: Any, other: Any) -> None:
    """Equal types all the way down, equal bits at the bottom; a `Parameter` may come back as a plain tensor."""
    if isinstance(one, Tensor):
        assert type(other) is Tensor
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert bytes_of(one) == bytes_of(other)
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, float) and one == one:
        assert struct.pack("d", one) == struct.pack("d", other)
    elif isinstance(one, float):
        assert other != other
    else:
        assert one == other


# There and back


@settings(deadline=None, max_examples=300)
@given(trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    text, sent = flatten(tree)
    assert_same(tree, unflatten(text, sent))


@settings(deadline=None)
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
