"""Forms of DeepSpeed's files that the committed files do not have, written here with classes of the same names."""

import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_zero import checkpoint
from ddp_zero.checkpoint.foreign import deepspeed

WORLD_SIZE, LENGTH = 3, 6


@pytest.fixture
def address_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """DeepSpeed's name for a place in a flat tensor, and a scaler, in modules of its names."""

    @dataclass
    class fragment_address:
        numel: int
        start: int

    class DynamicLossScaler:
        pass

    for name in ("deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, kind in (("utils.tensor_fragment", fragment_address), ("runtime.fp16.loss_scaler", DynamicLossScaler)):
        module = types.ModuleType(f"deepspeed.{name}")
        kind.__module__, kind.__qualname__ = f"deepspeed.{name}", kind.__name__
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, f"deepspeed.{name}", module)
    return fragment_address


def write(root: Path, address: Any, states: dict[str, Tensor], group: dict[str, Any], **more: Any) -> None:
    """A checkpoint of one group with ``weight`` of 3 x 4 and ``bias`` of 3, on three ranks with six elements each."""
    root.mkdir()
    shapes = OrderedDict(weight=torch.Size([3, 4]), bias=torch.Size([3]))
    values = torch.arange(WORLD_SIZE * LENGTH) + 0.5
    module = OrderedDict(weight=values[:12].view(3, 4).clone(), bias=values[12:15].clone())
    common = {
        "global_steps": 5,
        "dp_world_size": WORLD_SIZE,
        "buffer_names": [],
        "shared_params": {},
        "ds_version": "x",
    }
    torch.save({"module": module, "param_shapes": [shapes], **common}, root / "mp_rank_00_model_states.pt")
    for rank in range(WORLD_SIZE):
        mapping = {}
        for name, begin, end in (("weight", 0, 12), ("bias", 12, 15)):
            first, last = max(begin, rank * LENGTH), min(end, (rank + 1) * LENGTH)
            if first < last:
                mapping[name] = address(numel=last - first, start=first - rank * LENGTH)
        window = slice(rank * LENGTH, (rank + 1) * LENGTH)
        flat = values[window][: LENGTH if rank < WORLD_SIZE - 1 else 3].clone()  # saved without padding; states have it
        optimizer = {
            "zero_stage": 2,
            "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [OrderedDict(mapping)],
            "base_optimizer_state": {
                "state": {0: {key: value[window].clone() if value.dim() else value for key, value in states.items()}},
                "param_groups": [{**group, "params": [0]}],
            },
            **more,
        }
        torch.save({"optimizer_state_dict": optimizer}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def build(kind: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 3)
    return model, kind(model.parameters(), lr=9.0, **options)


def test_adam_of_deepspeed_loads_with_the_step_of_its_group(tmp_path: Path, address_class: type) -> None:
    states = {"exp_avg": torch.randn(18), "exp_avg_sq": torch.rand(18)}
    group = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "step": 4}
    write(tmp_path / "a", address_class, states, group)
    model, opt = build(torch.optim.AdamW)
    loaded = checkpoint.load(tmp_path / "a", model, opt)
    assert (loaded.step, loaded.skipped) == (5, ())
    assert torch.equal(model.get_parameter("bias").detach(), torch.tensor([12.5, 13.5, 14.5]))
    for param, window in ((model.get_parameter("weight"), slice(0, 12)), (model.get_parameter("bias"), slice(12, 15))):
        for key, value in states.items():
            assert torch.equal(opt.state[param][key].flatten(), value[window])
        assert opt.state[param]["step"] == 4, "the group's count, not global_steps"
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]) == (0.25, (0.5, 0.75))
    assert "bias_correction" not in opt.param_groups[0]


@pytest.mark.parametrize(
    ("states", "kind", "options"),
    [
        ({"momentum_buffer": torch.randn(18)}, torch.optim.SGD, {"momentum": 0.5}),
        ({"sum": torch.rand(18), "step": torch.tensor(5.0)}, torch.optim.Adagrad, {}),
    ],
)
def test_state_loads_only_into_the_same_class(
    tmp_path: Path, address_class: type, states: Any, kind: Any, options: Any
) -> None:
    write(tmp_path / "a", address_class, states, {"lr": 0.25})
    model, opt = build(kind, **options)
    checkpoint.load(tmp_path / "a", model, opt)
    key = next(iter(states))
    assert torch.equal(opt.state[model.get_parameter("bias")][key], states[key][12:15])
    with pytest.raises(ValueError, match=r"the optimizer is torch\.optim\.adamw\.AdamW"):
        checkpoint.load(tmp_path / "a", *build(torch.optim.AdamW))


@pytest.mark.parametrize(
    ("current", "last_overflow", "good_steps"), [(0, -1, 0), (1, -1, 0), (2, -1, 1), (4, -1, 3), (5, -1, 0), (9, 3, 0)]
)
def test_a_loss_scale_grows_at_the_step_at_which_deepspeeds_would(
    tmp_path: Path, address_class: type, current: int, last_overflow: int, good_steps: int
) -> None:
    """DeepSpeed's grows when a multiple of the window has passed since the step after the last overflow."""
    scaler = sys.modules["deepspeed.runtime.fp16.loss_scaler"].DynamicLossScaler()
    vars(scaler).update(cur_scale=64.0, scale_window=4, cur_iter=current, last_overflow_iter=last_overflow)
    scaler.cur_hysteresis = 2
    write(tmp_path / "a", address_class, {}, {"lr": 0.25}, loss_scaler=scaler)
    found = deepspeed.read(tmp_path / "a")
    assert found.loss_scale == {"value": 64.0, "good_steps": good_steps, "patience": 2}
    theirs = next(step for step in range(1, 9) if (place := current + step - last_overflow - 2) > 0 and place % 4 == 0)
    is_right_after = current - last_overflow == 1  # then DeepSpeed waits for one step more
    assert theirs == 4 - good_steps + is_right_after


@pytest.mark.parametrize(
    ("what", "value", "said"),
    [
        ("numel", 99, r"at \(0, 6\) by param_shapes and at \(0, 99\)"),
        ("start", -1, r"at \(0, 6\) by param_shapes and at \(-1, 6\)"),
        ("start", 2.5, "Expected the place of 'weight'"),
        ("numel", 1, r"at \(0, 6\) by param_shapes and at \(0, 1\)"),
    ],
)
def test_places_outside_of_a_flat_tensor_are_refused(
    tmp_path: Path, address_class: type, what: str, value: Any, said: str
) -> None:
    def address(numel: int, start: int) -> Any:
        place = address_class(numel, start)
        if start == 0 and numel == LENGTH:
            setattr(place, what, value)
        return place

    write(tmp_path / "a", address, {}, {"lr": 0.25})
    with pytest.raises(ValueError, match=said):
        deepspeed.read(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_parameters_that_were_dealt_out_in_turn_are_read_in_that_order(
    tmp_path: Path, address_class: type, world_size: int, stage: int, dtype: torch.dtype
) -> None:
    """With ``round_robin_gradients`` a rank's mapping tells the places of the plain order, which are wrong."""
    torch.manual_seed(0)
    shapes = {"0.weight": (5, 4), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}
    masters = {name: torch.randn(shape).to(dtype).float() for name, shape in shapes.items()}
    moments = {name: torch.randn(shape) for name, shape in shapes.items()}
    dealt = [name for rank in range(world_size) for name in list(shapes)[rank::world_size]]
    length = -(-sum(value.numel() for value in masters.values()) // world_size)

    def parts(values: dict[str, Tensor], order: list[str]) -> tuple[Tensor, ...]:
        flat = torch.cat([values[name].flatten() for name in order])
        split: tuple[Tensor, ...] = nn.functional.pad(flat, (0, length * world_size - len(flat))).split(length)
        return split

    def plain_places(rank: int) -> dict[str, Any]:
        found, begin = {}, 0
        for name, value in masters.items():
            first, last = max(begin, rank * length), min(begin + value.numel(), (rank + 1) * length)
            begin += value.numel()
            if first < last:
                found[name] = address_class(last - first, first - rank * length)
        return found

    for folder, config in (("a", {"zero_optimization": {"round_robin_gradients": True}}), ("unknown", {})):
        (tmp_path / folder).mkdir()
        module = OrderedDict((name, value.to(dtype)) for name, value in masters.items())
        common = {"global_steps": 5, "dp_world_size": world_size, "buffer_names": [], "shared_params": {}}
        sizes = OrderedDict((name, torch.Size(shapes[name])) for name in dealt)
        model_states = {"module": module, "param_shapes": [sizes], "ds_version": "x", "ds_config": config, **common}
        torch.save(model_states, tmp_path / folder / "mp_rank_00_model_states.pt")
        for rank in range(world_size):
            optimizer = {
                "zero_stage": stage,
                "single_partition_of_fp32_groups": [parts(masters, dealt)[rank].clone()],
                "param_slice_mappings": [OrderedDict(plain_places(rank))],
                "base_optimizer_state": {
                    "state": {0: {"momentum_buffer": parts(moments, dealt)[rank].clone()}},
                    "param_groups": [{"lr": 0.25, "params": [0]}],
                },
            }
            file = tmp_path / folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "ds_config": config}, file)

    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(dtype)
    opt = torch.optim.SGD(model.named_parameters(), lr=9.0, momentum=0.5)
    if dealt != list(shapes):
        with pytest.raises(ValueError, match="Expected one order of parameters in"):
            checkpoint.load(tmp_path / "unknown", model, opt)
    checkpoint.load(tmp_path / "a", model, opt, strict=dtype is torch.float32)  # a plain optimizer has no masters
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), masters[name].to(dtype)), name
        momentum = opt.state[param]["momentum_buffer"]
        assert torch.equal(momentum, moments[name].to(momentum.dtype)), name


@pytest.mark.parametrize("missing", ["module", "param_shapes", "global_steps", "dp_world_size"])
def test_files_without_what_deepspeed_writes_are_refused(tmp_path: Path, address_class: type, missing: str) -> None:
    write(tmp_path / "a", address_class, {}, {"lr": 0.25})
    path = tmp_path / "a" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    del model[missing]
    torch.save(model, path)
    with pytest.raises(ValueError, match=r"Expected a checkpoint of DeepSpeed 0\.17 to 0\.19"):
        checkpoint.load(tmp_path / "a", build(torch.optim.AdamW)[0])
