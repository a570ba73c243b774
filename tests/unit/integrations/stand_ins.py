"""Modules in place of accelerate, lightning, Ray Train and transformers, with the names that an integration imports."""

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ddp_zero.integrations


@dataclass
class DistributedDataParallelKwargs:
    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = False


class AcceleratedOptimizer:
    _is_overflow = False

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self.optimizer, self.options = optimizer, options
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"state": "whole"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


class DDPStrategy:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.model: Any = None
        self.is_global_zero = True
        self.precision_plugin: Any = None
        self.calls: list[Any] = []

    def setup_optimizers(self, trainer: Any) -> None:
        self._optimizers, self.lr_scheduler_configs = trainer.optimizers, trainer.configs
        self.optimizers = self._optimizers

    def setup_precision_plugin(self) -> None:
        self.calls.append("setup_precision_plugin")

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", filepath))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(("read", path))
        return {"a": "checkpoint"}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        self.calls.append(("load", checkpoint))

    def remove_checkpoint(self, filepath: Any) -> None:
        self.calls.append(("remove", filepath))


class GradClipAlgorithmType(Enum):
    VALUE = "value"
    NORM = "norm"


class ParallelMode(Enum):
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"


class Trainer:
    """Of transformers. Methods that its training loop calls on itself have a public caller here, below each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args[0] if args else SimpleNamespace(parallel_mode=ParallelMode.DISTRIBUTED, max_grad_norm=1.0)
        self.kwargs = kwargs
        self.optimizer: Any = None
        self.optimizer_cls_and_kwargs: Any = kwargs.get("optimizer_cls_and_kwargs")
        self.lr_scheduler: Any = None
        self.model: Any = None
        self.model_wrapped: Any = None
        self.accelerator: Any = SimpleNamespace(gradient_state=SimpleNamespace(sync_gradients=True))
        self.calls: list[Any] = []
        self._created_lr_scheduler = False

    @property
    def created_its_schedule(self) -> bool:
        return self._created_lr_scheduler

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return self._build_accelerator_args(**kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any) -> tuple[Any, dict[str, Any]]:
        return args.optim, {"lr": args.learning_rate}

    def create_optimizer(self, model: Any = None) -> Any:
        kind, options = self.optimizer_cls_and_kwargs
        self.calls.append((kind, options))
        self.optimizer = kind((self.model if model is None else model).parameters(), **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.calls.append(("create_scheduler", num_training_steps))
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append("training_step")
        return "loss"

    def _prepare_for_training(self, max_steps: int, *args: Any) -> int:
        self.calls.append(("prepare", max_steps))
        return max_steps

    def begin_training(self, max_steps: int) -> None:
        assert self._prepare_for_training(max_steps) == max_steps

    def _clip_grad_norm(self, model: Any) -> Any:
        raise AssertionError("whole gradients are not here to be clipped")

    def clip_before_step(self) -> Any:
        return self._clip_grad_norm(self.model)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("log", grad_norm))

    def end_step(self, grad_norm: Any) -> None:
        self._maybe_log_save_evaluate(0.0, grad_norm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.calls.append(("save", output_dir))

    def save(self, folder: Any) -> None:
        self._save_optimizer_and_scheduler(str(folder))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self.calls.append(("load", checkpoint))

    def resume(self, folder: Any) -> None:
        self._load_optimizer_and_scheduler(None if folder is None else str(folder))

    def _load_best_model(self) -> None:
        self.calls.append("best")

    def end_training(self) -> None:
        self._load_best_model()


class Accelerator:
    """Of accelerate, as a job of several processes has it."""

    def __init__(self, distributed_type: str = "DistributedType.MULTI_CPU", ddp_handler: Any = None) -> None:
        self.distributed_type, self.ddp_handler = distributed_type, ddp_handler
        self.device_placement, self.scaler = True, None
        self._optimizers: list[Any] = []
        self.prepared: list[Any] = []
        self.saves: list[Any] = []
        self.loads: list[Any] = []
        self.unscaled = 0
        self.clipped: list[Any] = []

    def prepare_model(self, model: Any) -> Any:
        return model

    def prepare_optimizer(self, optimizer: Any) -> Any:
        self._optimizers.append(optimizer)

    def prepare(self, *objects: Any) -> Any:
        self.prepared.extend(objects)
        return objects[0] if len(objects) == 1 else objects

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> str:
        self.clipped.append(("norm", list(parameters), max_norm, norm_type))
        return "plain norm"

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self.clipped.append(("value", list(parameters), clip_value))

    def unscale_gradients(self) -> None:
        self.unscaled += 1

    @property
    def prepared_optimizers(self) -> list[Any]:
        return self._optimizers

    def register_save_state_pre_hook(self, hook: Any) -> None:
        self.saves.append(hook)

    def register_load_state_pre_hook(self, hook: Any) -> None:
        self.loads.append(hook)


class Checkpoint:
    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(path)


class CheckpointUploadMode(Enum):
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


ACCELERATE: dict[str, dict[str, Any]] = {
    "accelerate": {"Accelerator": Accelerator, "DistributedDataParallelKwargs": DistributedDataParallelKwargs},
    "accelerate.optimizer": {"AcceleratedOptimizer": AcceleratedOptimizer},
}
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "accelerate": ACCELERATE,
    "lightning": {
        "lightning": {},
        "lightning.pytorch": {"Trainer": object},
        "lightning.pytorch.strategies": {"DDPStrategy": DDPStrategy},
        "lightning.pytorch.utilities": {"GradClipAlgorithmType": GradClipAlgorithmType},
    },
    "ray": {"ray": {}, "ray.train": {"Checkpoint": Checkpoint, "CheckpointUploadMode": CheckpointUploadMode}},
    "transformers": {
        **ACCELERATE,
        "transformers": {"Trainer": Trainer},
        "transformers.trainer_utils": {"_is_peft_model": lambda model: getattr(model, "is_peft", False)},
        "transformers.training_args": {"ParallelMode": ParallelMode},
    },
}
"""What each integration finds, by framework and module."""


def imported(framework: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The integration with a framework, imported anew with stand-ins; forgotten at the end of the test."""
    for name, content in MODULES[framework].items():
        module = ModuleType(name)
        vars(module).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    for integration in MODULES:
        # recorded first, so that whatever the test imports is taken away again
        monkeypatch.setitem(sys.modules, f"ddp_zero.integrations.{integration}", ModuleType("old"))
        monkeypatch.setattr(ddp_zero.integrations, integration, None, raising=False)
        del sys.modules[f"ddp_zero.integrations.{integration}"]
    return importlib.import_module(f"ddp_zero.integrations.{framework}")
