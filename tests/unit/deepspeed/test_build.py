"""Options of the sharded optimizer from a configuration, schedules on an optimizer, and the dtypes of a model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from ddp_zero import DynamicLossScale
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.engine import cast_inputs
from ddp_zero.deepspeed.initialization import bucket_cap, cast, sharding_options
from ddp_zero.deepspeed.schedules import Schedule, build_schedule


def options(stage: int = 1, zero: dict[str, Any] | None = None, **document: Any) -> dict[str, Any]:
    block = {"stage": stage, **(zero or {})}
    return sharding_options(Config.parse({"train_batch_size": 4, "zero_optimization": block, **document}, 2))


BASE = {"stage": 1, "overlap": False, "max_grad_norm": 1.0, "master_weights": False, "accumulate_in_fp32": False}
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
        ({"gradient_clipping": 0}, {"max_grad_norm": float("inf")}),
        ({"zero": {"overlap_comm": True}}, {"overlap": True}),
        (BF16, {"master_weights": True, "nonfinite": "skip"}),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"master_weights": True, "nonfinite": "step"}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"nonfinite": "skip"},
        ),
        (
            {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
            {"master_weights": True, "nonfinite": "skip", "accumulate_in_fp32": True},
        ),
        ({"communication_data_type": "bf16"}, {"hook": bf16_compress_hook}),
        ({"fp16": {"enabled": True, "loss_scale": 64}}, {"master_weights": True, "loss_scale": 64.0}),
        (
            {
                "fp16": {
                    "enabled": True,
                    "initial_scale_power": 4,
                    "loss_scale_window": 5,
                    "consecutive_hysteresis": True,
                }
            },
            {
                "master_weights": True,
                "loss_scale": DynamicLossScale(
                    initial=16.0, growth_interval=5, first_interval=6, hysteresis=2, restores_hysteresis=True
                ),
            },
        ),
    ],
)
def test_keys_change_the_options_of_stage_1(given: dict[str, Any], changed: dict[str, Any]) -> None:
    assert options(**given) == BASE | changed


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 2}),
        ({"gradient_predivide_factor": 1.0, "prescale_gradients": True}, {}),
        ({"communication_data_type": "bf16"}, {"grad_comm_dtype": torch.bfloat16}),
        ({"communication_data_type": "fp32"}, {}),
    ],
)
def test_keys_change_the_options_of_stage_2(given: dict[str, Any], changed: dict[str, Any]) -> None:
    base = {name: value for name, value in BASE.items() if name != "accumulate_in_fp32"}
    assert options(2, **given) == base | {"stage": 2} | changed


def test_no_norm_is_computed_if_nobody_wants_one() -> None:
    assert "max_grad_norm" not in options(zero={"compute_grad_norm": False}, gradient_clipping=0)


def test_buckets_are_the_smaller_ones() -> None:
    model = nn.Linear(1000, 1000)
    sizes = {None: None, 10**9: None, 1000: 1000 * 4 / 2**20}
    for size, expected in sizes.items():
        config = Config.parse({"train_batch_size": 4, "zero_optimization": {"reduce_bucket_size": size}}, 2)
        assert bucket_cap(model, config) == expected


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)


def test_a_schedule_sets_every_group_and_resumes() -> None:
    params = {"warmup_num_steps": 2, "warmup_type": "linear"}
    optimizer = sgd(1.0, 2.0)
    schedule = build_schedule("WarmupLR", params, optimizer)
    found = []
    for _ in range(4):
        found.append([group["lr"] for group in optimizer.param_groups])
        assert schedule.get_last_lr() == found[-1]
        optimizer.step()
        schedule.step()
    assert found == [[0, 0], [0, 0], [0.5, 1.0], [1.0, 2.0]]
    other = build_schedule("WarmupLR", params, sgd(1.0, 2.0))
    other.load_state_dict({"last_batch_iteration": 1})
    assert other.get_last_lr() == [0.5, 1.0], "those of the iteration, also before the next step"
    other.load_state_dict({"last_batch_iteration": 0})
    other.step()
    assert other.get_last_lr() == [0.5, 1.0]
    assert other.state_dict() == {"last_batch_iteration": 1}


def test_one_cycle_sets_the_betas_of_adam_and_leaves_sgd_alone() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    adam = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    schedule = build_schedule("OneCycle", params, adam)
    assert adam.param_groups[0]["betas"] == (0.8, 0.99)
    schedule.step()
    assert adam.param_groups[0]["betas"] == (pytest.approx(0.85), 0.99)
    build_schedule("OneCycle", params, optimizer := sgd(1.0)).step()
    assert "betas" not in optimizer.param_groups[0]


def test_build_schedule_takes_torchs_classes_and_refuses_unknown_names() -> None:
    optimizer = sgd(1.0)
    assert type(build_schedule("StepLR", {"step_size": 2}, optimizer)).__name__ == "StepLR"
    with pytest.raises(ConfigError, match="did you mean 'WarmupLR'"):
        build_schedule("WarmUpLR", {}, optimizer)
    with pytest.raises(ConfigError, match=r"options of StepLR .* 'size'"):
        build_schedule("StepLR", {"size": 2}, optimizer)
    with pytest.raises(ConfigError, match="Expected 2 values in warmup_max_lr"):
        build_schedule("WarmupLR", {"warmup_max_lr": [1.0]}, sgd(1.0, 2.0))
    assert isinstance(build_schedule("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, sgd(1, 2)), Schedule)


class Net(nn.Module):
    _keep_in_fp32_modules = ("wide",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("wide", torch.ones(1))
        self.register_buffer("narrow", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.long))


def dtypes(document: dict[str, Any]) -> dict[str, torch.dtype]:
    model = Net()
    cast(model, Config.parse({"train_batch_size": 4, **document}, 2))
    return {name: value.dtype for name, value in model.state_dict().items() if name != "layer.bias"}


def test_parameters_are_cast_and_buffers_stay() -> None:
    low, full, whole = torch.bfloat16, torch.float32, torch.long
    fp16 = {"fp16": {"enabled": True}}
    named = dict(zip(("wide", "narrow", "count", "layer.weight"), (full, full, whole, low), strict=True))
    assert dtypes(BF16) == named
    assert dtypes({}) == named | {"layer.weight": full}
    buffers = {"data_types": {"buffer_dtype": "bf16"}}
    assert dtypes({**BF16, **buffers}) == named | {"wide": low, "narrow": low}
    half = {"data_types": {"buffer_dtype": "fp16"}}
    expected = {"wide": full, "narrow": torch.float16, "layer.weight": torch.float16}
    assert dtypes({**fp16, **half}) == named | expected, "the model lists what stays"
    chosen = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["narr*"]}}
    assert dtypes({**BF16, **chosen}) == named | {"wide": low}


def test_inputs_are_cast_where_they_are_floating() -> None:
    given = {"a": [torch.ones(1), torch.ones(1, dtype=torch.long)], "b": (3, torch.ones(1))}
    found = cast_inputs(given, torch.float16)
    assert [one.dtype for one in found["a"]] == [torch.float16, torch.long]
    assert found["b"][0] == 3
    assert found["b"][1].dtype is torch.float16


def test_a_low_precision_model_needs_its_mode() -> None:
    with pytest.raises(ConfigError, match=r"got layer\.weight of torch\.bfloat16"):
        cast(Net().bfloat16(), Config.parse({"train_batch_size": 4}, 2))
