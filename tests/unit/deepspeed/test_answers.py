"""Every public name of DeepSpeed's engine is here, or its error says what to do instead."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_zero.deepspeed import Engine, add_config_arguments
from ddp_zero.deepspeed.config.answers import ELSEWHERE, OF_THE_OPTIMIZER, SETTINGS, way_here
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.engine import EngineOptimizer

# of DeepSpeed 0.19.8: [n for n in dir(DeepSpeedEngine) if not n.startswith("_") and n not in dir(nn.Module)], and what
# its constructor sets
NAMES = (Path(__file__).parent / "engine_names.txt").read_text().split()
PAGE = Path(__file__).parents[3] / "docs" / "from-deepspeed.md"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_deepspeeds_engine_is_here_or_has_a_replacement(name: str) -> None:
    found = [hasattr(Engine, name), name in SETTINGS, way_here(name) is not None]
    assert sum(found) == 1, f"a method, a setting, elsewhere: {found}"


def test_ways_are_of_names_that_deepspeed_has_and_on_the_page() -> None:
    page = PAGE.read_text()
    for way, patterns in ELSEWHERE.items():
        for pattern in patterns.split():
            assert any(fnmatchcase(name, pattern) and way_here(name) for name in NAMES), pattern
            assert f"`{pattern}`" in page, pattern
        assert way in page
    assert way_here("train_batch") is None


def test_ways_for_the_optimizer_are_on_the_page_and_hide_nothing() -> None:
    page = PAGE.read_text()
    for way, patterns in OF_THE_OPTIMIZER.items():
        assert f"| {', '.join(f'`{pattern}`' for pattern in patterns.split())} | {way} |" in page
    scripts = ("backward", "overflow", "loss_scaler", "cur_scale", "set_lr", "get_lr", "refresh_fp32_params")
    more = ("get_partition_info", "initialize_optimizer_states", "timers", "is_moe_group", "reset_cpu_buffers")
    others = ("dp_process_group", "enable_universal_checkpoint", "loss_scale")
    for name in (*scripts, *more, *others, "override_loss_scale", "optimizer"):
        assert hasattr(EngineOptimizer, name) != (way_here(name, OF_THE_OPTIMIZER) is not None), name
    own = {name for name in dir(EngineOptimizer) if not name.startswith("_")} - {"optimizer"}
    assert not [name for name in own if way_here(name, OF_THE_OPTIMIZER)]


def test_settings_are_those_of_the_configuration() -> None:
    document = {
        "train_batch_size": 8,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    }
    config = Config.parse(document, 1)
    told = {name: setting(config) for name, setting in SETTINGS.items()}
    assert told["dynamic_loss_scale"] is True
    assert told["initial_dynamic_scale"] == 16
    assert told["optimizer_params"] == {"lr": 0.1}
    assert told["scheduler_name"] is None
    assert told["zero_optimization_partition_gradients"] is True
    assert told["zero_cpu_offload"] is True
    assert told["zero_overlap_comm"] is True


def test_errors_name_the_way_and_do_not_blame_the_model() -> None:
    engine = Engine.__new__(Engine)
    nn.Module.__init__(engine)
    engine.parsed = Config.parse({"train_batch_size": 2}, 1)
    engine.module = nn.Linear(2, 3)
    assert engine.in_features == 2
    assert engine.steps_per_print() is None
    with pytest.raises(AttributeError, match=r"got 'flops_profiler_enabled'\. Use torch\.profiler"):
        engine.flops_profiler_enabled()
    with pytest.raises(AttributeError, match=r"an attribute of the engine or of Linear, got 'nonsense'"):
        engine.nonsense  # noqa: B018


def test_weights_are_shown_without_frozen_ones() -> None:
    engine = Engine.__new__(Engine)
    nn.Module.__init__(engine)
    engine.module = nn.Linear(2, 3)
    engine.module.bias.requires_grad_(False)
    assert set(engine.module_state_dict(prefix="a.")) == {"a.weight", "a.bias"}
    assert set(engine.module_state_dict(prefix="a.", exclude_frozen_parameters=True)) == {"a.weight"}
    assert torch.equal(engine.module_state_dict()["weight"], engine.module.weight)


def test_scripts_take_deepspeeds_options() -> None:
    from argparse import ArgumentParser

    parser = add_config_arguments(ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (given.deepspeed, given.deepspeed_config) == (True, "ds.json")
    assert not parser.parse_args([]).deepspeed
