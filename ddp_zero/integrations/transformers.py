"""`ZeroTrainer`: the Trainer of transformers with a sharded optimizer, in stage 1 or 2, stepped inside backward.

    trainer = ZeroTrainer(model=model, args=args, train_dataset=data, zero={"stage": 2})

``zero`` may also be the path of a DeepSpeed configuration.

In stage 1 without overlap the Trainer itself takes a `ddp_zero.ZeroRedundancyOptimizer` in place of any optimizer.
"""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size
from transformers import Trainer
from transformers.trainer_utils import _is_peft_model
from transformers.training_args import ParallelMode

from ddp_zero import ZeroRedundancyOptimizer, checkpoint
from ddp_zero.checkpoint.foreign.deepspeed import find
from ddp_zero.checkpoint.foreign.torch_file import load as read_plain
from ddp_zero.checkpoint.view import unwrap
from ddp_zero.core.comm import Agreement, logger
from ddp_zero.deepspeed.config.config import Auto, Config, Source
from ddp_zero.deepspeed.config.table import TABLE, ConfigError, value_at
from ddp_zero.deepspeed.initialization import as_groups, cast, check_no_experts, choose, sharding_options
from ddp_zero.deepspeed.progress import warn_once
from ddp_zero.deepspeed.schedules import build_schedule
from ddp_zero.integrations.accelerate import ShardedOptimizer
from ddp_zero.optimizer import engine_of, shard_of

FOLDER = "zero"
"""Folder of the sharded checkpoint within a folder ``checkpoint-<step>`` of the Trainer."""

_OF_DEEPSPEED = "global_step"

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ZeroTrainerMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shards the optimizer of a `transformers.Trainer`; put it before the Trainer among a class's bases.

    The optimizer's class, options and groups are the Trainer's own. The model is wrapped with
    ``gradient_as_bucket_view=True``. Gradients are clipped inside the step, to ``args.max_grad_norm``, and the norm in
    the log is ``last_step.grad_norm``; without clipping no norm is computed and none is logged. Norms of bf16 and fp16
    gradients are computed in their dtype, as by the Trainer, unless the optimizer has master weights.

    Every checkpoint holds, next to the Trainer's own files but instead of ``optimizer.pt`` and ``scheduler.pt``, a
    sharded one that any number of ranks loads. A checkpoint with these two, of the plain Trainer, is loaded as well,
    and one that the Trainer has written with DeepSpeed (``global_step.../``, ``latest``); one without any state raises.

    With the Trainer's default ``max_grad_norm=1.0`` a step waits for the end of backward. Set it to 0 to step inside.

    Args:
        *args: arguments of the Trainer.
        zero: options of `ZeroRedundancyOptimizer`, such as ``{"stage": 2}``; by default ``overlap_with_ddp`` and
            ``parameters_as_bucket_view`` are True, and ``max_grad_norm`` comes from the training arguments. Or the path
            of a DeepSpeed configuration, whose ``"auto"`` values are filled from the training arguments; the optimizer
            and the schedule are the file's if it has them, else the Trainer's. With ``fp16`` the model is cast, and the
            loss scale is the file's instead of accelerate's.
        exclude_frozen: leave parameters that do not require a gradient out of the sharded checkpoint; loading leaves
            them unchanged. None: leave them out of a PEFT model, whose base the Trainer's own files leave out too.
        **kwargs: options of the Trainer. An optimizer passed as ``optimizers=`` must already be sharded.

    Raises:
        RuntimeError: when training begins in a job that is not distributed.
        TypeError: for ``optimizers=`` with an optimizer that is not sharded, or ``TrainingArguments(deepspeed=...)``.
        ValueError: for ``resume_from_checkpoint`` of a folder without an optimizer's state.
        NotImplementedError: for ``args.optim`` that needs the whole model, or 8-bit ones of bitsandbytes, for which the
            Trainer registers exceptions by the model.
    """

    def __init__(
        self,
        *args: Any,
        zero: Mapping[str, Any] | str | Path = _NOTHING,
        exclude_frozen: bool | None = None,
        **kwargs: Any,
    ) -> None:
        given: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        file = getattr(given, "deepspeed", None)
        if file is not None:
            raise TypeError(
                f"ZeroTrainer does not read TrainingArguments(deepspeed={file!r:.80}), which sets accelerate up for "
                "DeepSpeed itself. Pass the file as ZeroTrainer(zero=...), and take --deepspeed from the command line "
                "first, as docs/frameworks.md shows. [ZERO-911]"
            )
        self._exclude_frozen = exclude_frozen
        self._zero_config = _TrainerConfig(zero) if isinstance(zero, str | Path) else None
        self._zero_options = {} if isinstance(zero, str | Path) else dict(zero)
        self._attached: nn.Module | None = None
        self._scaling: Any = None  # the accelerator whose losses are scaled here
        self._clips_inside = False
        super().__init__(*args, **kwargs)

    @property
    def zero_optimizer(self) -> ZeroRedundancyOptimizer:
        """The sharded optimizer, without the wrappers around it.

        Raises:
            TypeError: if there is none.
        """
        optimizer = unwrap(self.optimizer)
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"Expected a ZeroRedundancyOptimizer, got {type(optimizer).__name__}. Pass its class and options as "
                "optimizer_cls_and_kwargs=, which are sharded here, build ZeroRedundancyOptimizer(groups, "
                f"{type(optimizer).__name__}, ...) in a create_optimizer() of your own, or use the plain Trainer. "
                "[ZERO-911]"
            )
        return optimizer

    # Building

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args["kwargs_handlers"] = [
            replace(handler, gradient_as_bucket_view=True)
            if isinstance(handler, DistributedDataParallelKwargs)
            else handler
            for handler in args["kwargs_handlers"]
        ]
        return args

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the Trainer's optimizer, sharded; RuntimeError in a job that is not distributed."""
        if self.args.parallel_mode != ParallelMode.DISTRIBUTED:
            raise RuntimeError(
                f"Expected a job of several processes, got {self.args.parallel_mode}. Start it with torchrun, on CPUs "
                "with use_cpu=True in the training arguments, or use the plain Trainer. [ZERO-911]"
            )
        existing: Any = getattr(self, "optimizer")  # noqa: B009  # mypy cannot tell its type
        if existing is None and self._zero_config is not None:
            self._zero_options = self._zero_config.options()
            configured: Any = self._zero_config.optimizer(self.model if model is None else model)
            self.optimizer = configured
        if self.optimizer is None:
            chosen: Any = getattr(self, "optimizer_cls_and_kwargs")  # noqa: B009  # mypy cannot tell its type
            try:
                self.optimizer_cls_and_kwargs = self._sharded_class(chosen, self.model if model is None else model)
                super().create_optimizer(model)
            finally:
                self.optimizer_cls_and_kwargs = chosen
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _sharded_class(self, chosen: tuple[Any, dict[str, Any]] | None, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        """Class and options with which the Trainer builds the sharded optimizer."""
        kind, options = chosen or self.get_optimizer_cls_and_kwargs(self.args, model)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise NotImplementedError(
                f"Expected an optimizer class, got {kind!r}, which is built from a whole model. Pass another "
                "optim=, or use the plain Trainer. [ZERO-911]"
            )
        if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
            raise NotImplementedError(
                "ZeroTrainer does not support 8-bit optimizers of bitsandbytes, for which the Trainer registers "
                "embeddings to stay in 32 bits. Build the sharded optimizer yourself, and pass it as optimizers=(opt, "
                "None). [ZERO-911]"
            )
        clip = self.args.max_grad_norm
        own = {"overlap_with_ddp": True, "parameters_as_bucket_view": True, "max_grad_norm": clip if clip > 0 else None}
        return ZeroRedundancyOptimizer, {"optimizer_class": kind, **options, **own, **self._zero_options}

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Build the schedule of the DeepSpeed configuration, if it has one, or the Trainer's."""
        existing: Any = getattr(self, "lr_scheduler")  # noqa: B009  # mypy cannot tell its type
        if existing is None and self._zero_config is not None:
            self.lr_scheduler = self._zero_config.scheduler(self.zero_optimizer)
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        if self._zero_config is not None:
            config = self._zero_config.complete(self.args, self.model, max_steps)
            if config.fp16.enabled:
                self._scale_here()
        prepared = super()._prepare_for_training(max_steps, *args, **kwargs)
        self._attach()
        return prepared

    def _scale_here(self) -> None:
        """Let the sharded optimizer scale the loss instead of accelerate, whose scaler accepts no fp16 gradients."""
        accelerator: Any = self.accelerator
        if accelerator is self._scaling:
            return
        plain = accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            plain(self.zero_optimizer.scale(loss), **kwargs)

        accelerator.scaler, accelerator.backward = None, backward
        self._scaling = accelerator

    def _attach(self) -> None:
        """Register the hook on the DDP model, once for each model."""
        decision = engine_of(self.zero_optimizer).decision
        self._clips_inside = decision.options.max_grad_norm is not None
        decision.clips_as_torch = True
        if self._attached is not self.model_wrapped:
            self.zero_optimizer.attach(self.model_wrapped)
            self._attached = self.model_wrapped
        wrapper: Any = self.optimizer
        if isinstance(wrapper, AcceleratedOptimizer):
            wrapper.__class__ = ShardedOptimizer  # tells the Trainer of skipped steps, for which schedules wait

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the Trainer's; averaged passes that are not stepped yet (``sync_each_batch``) accumulate."""
        syncs = self.accelerator.gradient_state.sync_gradients
        with nullcontext() if syncs else self.zero_optimizer.accumulate():
            loss: Tensor = super().training_step(*args, **kwargs)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return None if self._clips_inside else self.zero_optimizer.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        return grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if grad_norm is None and self.control.should_log:
            step = self.zero_optimizer.last_step
            grad_norm = None if step is None else step.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(
            Path(output_dir) / FOLDER,
            self.model_wrapped,
            self.zero_optimizer,
            extra={"scheduler": self.lr_scheduler.state_dict()},
            step=self.state.global_step,
            keep=1,
            exclude_frozen=_is_peft_model(self.model) if self._exclude_frozen is None else self._exclude_frozen,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._attach()
        folder = Path(checkpoint)
        with Agreement(
            shard_of(self.zero_optimizer).comm, f"finding the optimizer's state in {checkpoint}"
        ) as agreement:
            kind = _kind_of_state(folder)
            agreement.declare("kind of state", kind)
        if kind == FOLDER:
            self._load_sharded(folder / FOLDER)
        elif kind == _OF_DEEPSPEED:
            self._load_of_deepspeed(folder)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            self._follow_weights()

    def _load_of_deepspeed(self, folder: Path) -> None:
        """Load weights, masters, state and schedule of a folder that the Trainer has written with DeepSpeed."""
        loaded = checkpoint.load(folder, self.model_wrapped, self.zero_optimizer)
        state = loaded.extra.get("lr_scheduler")
        name = "scheduler.pt"
        if state is None and (folder / name).is_file():
            state = read_plain(folder, name, hashlib.sha256(), {})
        own = self.lr_scheduler.state_dict()
        if state is None or state.keys() != own.keys():
            found = "no state" if state is None else f"a state of {sorted(state)}"
            raise ValueError(
                f"Expected a schedule's state of {sorted(own)} in {folder}, got {found}. Use the configuration, with "
                "its scheduler block or without, and the arguments of the run that has written it. [ZERO-718]"
            )
        self.lr_scheduler.load_state_dict(state)

    def _load_sharded(self, folder: Path) -> None:
        loaded = checkpoint.load(folder, self.model_wrapped, self.zero_optimizer)
        self.lr_scheduler.load_state_dict(loaded.extra["scheduler"])

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """After the Trainer has written to the model's parameters."""
        if self.zero_optimizer.master_weights:
            self.zero_optimizer.refresh_master_weights()


def _kind_of_state(folder: Path) -> str:
    """Whose state of an optimizer a folder of the Trainer holds.

    Raises ValueError if it holds none, or if DeepSpeed's cannot be found.
    """
    if (folder / FOLDER).is_dir():
        return FOLDER
    if any(folder.glob("global_step*")):
        if find(folder) is None:
            raise ValueError(
                f"Expected a file latest in {folder} that names one of its global_step folders, got no such name. "
                "Write the folder's name into it. [ZERO-718]"
            )
        return _OF_DEEPSPEED
    if (folder / "optimizer.pt").is_file():
        return "optimizer.pt"
    raise ValueError(
        f"Expected an optimizer's state in {folder}: {FOLDER}/, optimizer.pt, or DeepSpeed's global_step folder, got "
        "no such state. To train on from weights alone, load them with from_pretrained(), and leave out "
        "resume_from_checkpoint. [ZERO-718]"
    )


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with a sharded optimizer: see `ZeroTrainerMixin`."""


_OF_THE_TRAINER = (  # keys whose effect its own arguments control
    *(f"zero_optimization.{name}" for name in ("reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients")),
    *("zero_optimization.ignore_unused_parameters", "data_types.grad_accum_dtype", "torch_autocast", "tensorboard"),
    *("csv_monitor", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last"),
    *("checkpoint.tag_validation", "zero_optimization.load_from_fp32_weights", "fp16.auto_cast"),
)


class _TrainerConfig:
    """A DeepSpeed configuration that is completed once the Trainer knows its model and the number of steps."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        assert self._config is not None, "the Trainer completes it before it builds anything"
        return self._config

    def complete(self, args: Any, model: nn.Module, training_steps: int) -> Config:
        """Fill in ``"auto"`` values, check the configuration, and cast the model, not wrapped, for bf16 or fp16.

        Raises ConfigError for a configuration that cannot be used, or contradicts the arguments.
        """
        auto = Auto(self._source)
        ranks = get_world_size()
        document = auto.document
        if "gradient_clipping" not in document and self._config is None and get_rank() == 0:
            default = TABLE["gradient_clipping"].default
            if args.max_grad_norm != default:
                logger.warning(
                    "gradient_clipping is not in the configuration: DeepSpeed's default %s applies instead of "
                    'max_grad_norm = %s. Write "auto" there for the latter. [ZERO-707]',
                    default,
                    args.max_grad_norm,
                )
        if "train_batch_size" not in document:
            document.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
            document.setdefault("gradient_accumulation_steps", args.gradient_accumulation_steps)
        auto.fill_from_trainer(args, ranks)
        auto.fill_from_model(getattr(model, "config", None))
        auto.fill_steps(training_steps, args.get_warmup_steps(training_steps))
        config = Config.parse(auto.finish(), ranks)
        chosen = getattr(args.optim, "value", args.optim)
        # names that begin so are the Trainer's defaults
        if config.optimizer is not None and isinstance(chosen, str) and not chosen.startswith("adamw"):
            raise ConfigError(
                f"Expected one optimizer, got {config.optimizer.type} in the configuration and optim={chosen!r} in the "
                "training arguments. Remove either. [ZERO-707]"
            )
        if self._config is None:
            warn_once(config.findings, get_rank())
            given = [path for path in _OF_THE_TRAINER if value_at(document, path) is not None]
            if given and get_rank() == 0:
                logger.warning(
                    "%s: no effect in the Trainer, which does this by its own arguments. [ZERO-715]", ", ".join(given)
                )
        self._config = config
        if config.has_low_precision:
            cast(model, config)
        return config

    def options(self) -> dict[str, Any]:
        """Options of `ZeroRedundancyOptimizer`; ConfigError for ``communication_data_type`` in stage 1."""
        options = sharding_options(self.config)
        if options.pop("hook", None) is not None:
            raise ConfigError(
                "The Trainer does not support communication_data_type in stage 1. Use stage 2. [ZERO-911]"
            )
        options.pop("accumulate_in_fp32", None)
        return {"overlap_with_ddp": options.pop("overlap"), "parameters_as_bucket_view": True, **options}

    def optimizer(self, model: nn.Module) -> ZeroRedundancyOptimizer | None:
        """The configured optimizer, sharded, over all of the model; None if none is configured. A collective."""
        section = self.config.optimizer
        if section is None:
            return None
        names = {param: name for name, param in model.named_parameters()}
        groups = as_groups(None, model)
        check_no_experts(model, groups)
        choice = choose(section.type, section.params, groups, names)
        options: Mapping[str, Any] = {**self.options(), **choice.options}
        return ZeroRedundancyOptimizer(choice.groups, choice.optimizer_class, **options)

    def scheduler(self, optimizer: ZeroRedundancyOptimizer) -> Any:
        section = self.config.scheduler
        return None if section is None else build_schedule(section.type, section.params, optimizer)
