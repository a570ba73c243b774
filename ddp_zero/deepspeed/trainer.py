"""A configuration for the Trainer of transformers: ``"auto"`` from its arguments, optimizer and schedule from the file.

`ddp_zero.integrations.transformers.ZeroTrainer` asks it; nothing here imports transformers.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import get_rank, get_world_size

from ddp_zero.core.comm.tracing import logger
from ddp_zero.deepspeed.build import sharding_options
from ddp_zero.deepspeed.config.auto import Auto
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.document import Source, value_at
from ddp_zero.deepspeed.config.keys import ConfigError
from ddp_zero.deepspeed.monitor import warn_once
from ddp_zero.deepspeed.optimizers import as_groups, choose
from ddp_zero.deepspeed.precision import cast
from ddp_zero.deepspeed.schedules import build_schedule
from ddp_zero.optimizer import ZeroRedundancyOptimizer

_OF_THE_TRAINER = (
    *(f"zero_optimization.{name}" for name in ("reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients")),
    *("zero_optimization.ignore_unused_parameters", "data_types.grad_accum_dtype", "torch_autocast", "tensorboard"),
    *("csv_monitor", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last"),
    *("checkpoint.tag_validation", "zero_optimization.load_from_fp32_weights", "fp16.auto_cast"),
)
"""Keys of what the Trainer does by its own arguments: buckets, autocast, logs, data, checkpoints."""


class TrainerConfig:
    """A configuration that is completed once the Trainer knows its model and the number of steps.

    Args:
        source: see `ddp_zero.deepspeed.config.document.read`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """The completed configuration."""
        assert self._config is not None, "the Trainer completes it before it builds anything"
        return self._config

    def complete(self, args: Any, model: nn.Module, training_steps: int) -> None:
        """Fill in what is ``"auto"``, check it, and cast the model for bf16 or fp16.

        Args:
            args: the training arguments.
            model: not wrapped; changed in place.
            training_steps: how many will be taken.

        Raises:
            ConfigError: for a configuration that cannot be used, or contradicts the arguments.
        """
        auto, ranks = Auto(self._source), get_world_size()
        document = auto.document
        document.setdefault("gradient_clipping", args.max_grad_norm)
        if "train_batch_size" not in document:
            document.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
            document.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
        auto.fill_from_trainer(args, ranks)
        auto.fill_from_model(getattr(model, "config", None))
        auto.fill_steps(training_steps, args.get_warmup_steps(training_steps))
        config = Config.parse(auto.finish(), ranks)
        if self._config is None:
            warn_once(config.findings, get_rank())
            _warn_of_others(document)
        self._config = config
        if config.has_low_precision:
            cast(model, config)

    def options(self) -> dict[str, Any]:
        """Options of `ZeroRedundancyOptimizer`.

        Raises:
            ConfigError: for ``communication_data_type`` in stage 1, which the Trainer's DDP model does not take.
        """
        options = sharding_options(self.config)
        if options.pop("hook", None) is not None:
            raise ConfigError("Expected no communication_data_type for the Trainer in stage 1, got one. Use stage 2.")
        options.pop("accumulate_in_fp32", None)
        return {"overlap_with_ddp": options.pop("overlap"), "parameters_as_bucket_view": True, **options}

    def optimizer(self, model: nn.Module) -> ZeroRedundancyOptimizer | None:
        """The configuration's optimizer, sharded, over all of the model; None if it has none. A collective."""
        if self.config.optimizer is None:
            return None
        names = {param: name for name, param in model.named_parameters()}
        choice = choose(self.config.optimizer, as_groups(None, model), names)
        options: Mapping[str, Any] = {**self.options(), **choice.options}
        return ZeroRedundancyOptimizer(choice.groups, choice.optimizer_class, **options)

    def scheduler(self, optimizer: ZeroRedundancyOptimizer) -> Any:
        """The configuration's schedule; None if it has none."""
        return None if self.config.scheduler is None else build_schedule(self.config.scheduler, optimizer)


def _warn_of_others(document: Mapping[str, Any]) -> None:
    given = [path for path in _OF_THE_TRAINER if value_at(document, path) is not None]
    if given and get_rank() == 0:
        logger.warning("%s: no effect in the Trainer, which does this by its own arguments.", ", ".join(given))
