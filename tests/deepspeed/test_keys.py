"""Every key that DeepSpeed reads from its configuration has a row in the table."""

import copy
from collections.abc import Iterator, KeysView
from typing import Any, ClassVar

import pytest

pytest.importorskip("deepspeed", minversion="0.19")

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as theirs
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from ddp_zero.deepspeed.config.table import ANY, TABLE, Kind

MODELS: dict[str, Any] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "zero_optimization.zenflow": ZenFlowConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "hybrid_engine": theirs.HybridEngineConfig,
}
"""Blocks that DeepSpeed reads into models of their own."""


def has_row(path: str) -> bool:
    """Whether a key has a row, or a block around it one that speaks for all that is in it."""
    block, _, name = path.rpartition(".")
    if path in TABLE or (block in TABLE and name in TABLE[block].holds):
        return True
    while block:
        if block in TABLE and TABLE[block].holds == ANY:
            return True
        block = block.rpartition(".")[0]
    return False


class Recording(dict[str, Any]):
    """A block that notes which keys are looked up in it."""

    seen: ClassVar[set[str]] = set()

    def __init__(self, content: dict[str, Any], prefix: str = "") -> None:
        super().__init__({name: self._wrapped(value, f"{prefix}{name}.") for name, value in content.items()})
        self.prefix = prefix

    @staticmethod
    def _wrapped(value: Any, prefix: str) -> Any:
        return Recording(value, prefix) if isinstance(value, dict) else value

    def __copy__(self) -> "Recording":
        return self

    def _note(self, name: object) -> None:
        Recording.seen.add(f"{self.prefix}{name}")

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)

    def keys(self) -> Any:  # looked into by ``name in block.keys()``
        return _Keys(self)


class _Keys(KeysView[str]):
    def __init__(self, block: Recording) -> None:
        self._block = block

    def __contains__(self, name: object) -> bool:
        return name in self._block

    def __iter__(self) -> Iterator[str]:
        return iter(dict.keys(self._block))

    def __len__(self) -> int:
        return len(self._block)


BLOCKS: dict[str, Any] = {
    "train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "torch_autocast": {"enabled": True},
    "data_types": {},
    "checkpoint": {"writer": {"type": "fast"}, "parallel_write": {}},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "aio": {"block_size": 1},
    "timers": {"throughput": {}},
    "autotuning": {"enabled": False},
    "data_efficiency": {"enabled": False},
}


def test_every_key_that_deepspeed_looks_up_has_a_row() -> None:
    Recording.seen.clear()
    theirs.DeepSpeedConfig(Recording(copy.deepcopy(BLOCKS)))
    assert len(Recording.seen) > 80, f"only {len(Recording.seen)} keys were looked up"
    assert {path for path in Recording.seen if not has_row(path)} == set()


@pytest.mark.parametrize("block", MODELS)
def test_every_field_of_a_block_has_a_row(block: str) -> None:
    fields = MODELS[block].model_fields
    names = set(fields) | {field.alias for field in fields.values() if field.alias}
    assert names
    assert {name for name in names if not has_row(f"{block}.{name}")} == set()


def test_what_deepspeed_has_removed_is_refused() -> None:
    removed = [*theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    removed += [f"zero_optimization.{name}" for name in theirs._REMOVED_ZERO_CONFIG_KEYS]
    assert len(removed) > 10
    assert {path for path in removed if TABLE[path].kind is not Kind.REFUSED} == set()
