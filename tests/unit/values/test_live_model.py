from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

from ddp_zero.values.live_model import LiveModel, clean, value_of
from ddp_zero.values.shapes import Value
from tests.unit.checkpoint.saved import TENSORS, Tied


def compiled(module: nn.Module) -> Any:
    """The module as `torch.compile` returns it, never run."""
    wrapped: Any = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def checkpointed(module: nn.Module) -> Any:
    """The module as activation checkpointing wraps it."""
    return checkpoint_wrapper(module)


def inside_compiled(model: Tied) -> nn.Module:
    model.norm = compiled(model.norm)
    return model


def inside_checkpointed(model: Tied) -> nn.Module:
    model.norm = checkpointed(model.norm)
    return model


def inside_both(model: Tied) -> nn.Module:
    model.norm = compiled(checkpointed(model.norm))
    model.head = checkpointed(compiled(model.head))
    return model


WRAPPINGS: dict[str, Callable[[Tied], nn.Module]] = {
    "none": lambda model: model,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "compiled, checkpointed": lambda model: compiled(checkpointed(model)),
    "checkpointed, compiled": lambda model: checkpointed(compiled(model)),
    "a compiled module inside": inside_compiled,
    "a checkpointed module inside": inside_checkpointed,
    "both inside": inside_both,
    "all": lambda model: compiled(checkpointed(inside_both(model))),
}

every_wrapping = pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)


# Names


@every_wrapping
def test_wrappers_leave_no_trace_in_names(wrap: Callable[[Tied], nn.Module]) -> None:
    plain = Tied()
    tensors = {name: value for name, value in plain.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    live = LiveModel(wrap(plain))
    assert list(live.entries) == ["frozen", "_extra_state", *TENSORS[1:]]
    assert live.aliases == {"head.weight": "embedding.weight"}
    assert set(live.tensors) == set(TENSORS)
    for name in TENSORS:
        assert live.tensors[name] is tensors[name]
        assert live.tensor(name) is tensors[name]
    assert live.tensor("head.weight") is tensors["embedding.weight"]


@every_wrapping
def test_a_parameter_has_its_first_name(wrap: Callable[[Tied], nn.Module]) -> None:
    plain = Tied()
    embedding, frozen, bias = plain.embedding.weight, plain.frozen, plain.norm.bias
    live = LiveModel(wrap(plain))
    assert live.name_of(embedding, "parameter 0") == "embedding.weight"
    assert live.name_of(frozen, "parameter 1") == "frozen"
    assert live.name_of(bias, "parameter 2") == "norm.bias"


@every_wrapping
def test_state_that_is_no_tensor_goes_back_through_wrappers(wrap: Callable[[Tied], nn.Module]) -> None:
    plain = Tied()
    before = {name: value.clone() for name, value in plain.state_dict().items() if isinstance(value, Tensor)}
    LiveModel(wrap(plain)).load_extra({"_extra_state": {"epoch": 8}})
    assert plain.note == {"epoch": 8}
    after = LiveModel(plain).tensors
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("weight", "weight"),
        ("_orig_mod.a.weight", "a.weight"),
        ("a._orig_mod._checkpoint_wrapped_module.b._orig_mod.weight", "a.b.weight"),
        ("a_orig_mod.b", "a_orig_mod.b"),
        ("_orig_mod_.b", "_orig_mod_.b"),
        ("module.a", "module.a"),
        ("_fsdp_wrapped_module.a", "_fsdp_wrapped_module.a"),
        ("", ""),
    ],
)
def test_only_whole_parts_of_wrappers_go(name: str, cleaned: str) -> None:
    assert clean(name) == cleaned


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lacks parameter 3 'x' of the optimizer\. Give the model that the optimizer trains"
    ):
        LiveModel(Tied()).name_of(Tied().frozen, "parameter 3 'x'")


# Tied weights


class Shared(nn.Module):
    """A module under two names, a parameter under three, and a buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.third = nn.Linear(2, 2, bias=False)
        self.third.weight = self.first.weight
        table = torch.ones(2)
        self.register_buffer("table", table)
        self.register_buffer("same", table)


def test_every_further_name_is_an_alias_of_the_first() -> None:
    live = LiveModel(Shared())
    assert list(live.entries) == ["table", "first.weight", "first.bias"]
    assert live.aliases == {
        "same": "table",
        "second.weight": "first.weight",
        "second.bias": "first.bias",
        "third.weight": "first.weight",
    }


def test_views_of_one_memory_are_not_the_same_tensor() -> None:
    model = nn.Module()
    flat = torch.zeros(4)
    model.register_buffer("one", flat[:2])
    model.register_buffer("two", flat[:2])
    assert LiveModel(model).aliases == {}


# What is saved of a model


def test_buffers_that_are_not_persistent_are_left_out() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    model.register_buffer("nothing", None)
    model.register_parameter("no_bias", None)
    assert list(LiveModel(model).entries) == ["kept"]


def test_a_shared_buffer_that_is_persistent_under_one_name_is_saved_under_that() -> None:
    model = nn.Module()
    table = torch.ones(1)
    model.register_buffer("scratch", table, persistent=False)
    model.register_buffer("kept", table)
    live = LiveModel(model)
    assert (list(live.entries), live.aliases) == (["kept"], {})


def test_frozen_parameters_and_buffers_are_not_trainable() -> None:
    assert LiveModel(Tied()).trainable == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    model = Tied()
    model.embedding.weight.requires_grad_(False)
    assert LiveModel(model).trainable == ["norm.weight", "norm.bias"]


def test_a_parametrized_weight_has_torchs_name() -> None:
    model = nn.Linear(2, 2)
    parametrize.register_parametrization(model, "weight", nn.Identity())
    assert set(LiveModel(model).entries) == {"bias", "parametrizations.weight.original"}


# Values


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (torch.zeros(2, 0, dtype=torch.float8_e4m3fn), Value((2, 0), "float8_e4m3fn")),
        (torch.tensor(True), Value((), "bool")),
        (nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), Value((3,), "bfloat16")),
        (torch.zeros(2, device="meta"), Value((2,), "float32")),
        (None, Value(None, None)),
        ([torch.zeros(2)], Value(None, None)),
        (2.5, Value(None, None)),
    ],
)
def test_a_value_is_shape_and_dtype_of_a_tensor(entry: Any, value: Value) -> None:
    assert value_of("layer.weight", entry) == value
