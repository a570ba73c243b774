"""`ZeroDDPStrategy`: a `lightning.Trainer` with sharded optimizers, in stage 1 or 2, stepped inside backward.

    trainer = Trainer(strategy=ZeroDDPStrategy(stage=2), ...)

In stage 1 without overlap ``strategy="ddp"`` itself takes a `ddp_zero.ZeroRedundancyOptimizer`. `Fabric` needs no
strategy: `ddp_zero.shard_optimizer` takes the result of ``fabric.setup(model)``.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.checkpoint import load, save
from ddp_zero.deepspeed.initialization import choice_of

_SHARDED = {"ddp_zero": "the state is in the folder next to this file"}


class ZeroDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy that shards the optimizers of ``configure_optimizers``.

    The model is wrapped with ``gradient_as_bucket_view=True``. Optimizers that are not sharded yet are replaced: the
    class, the options and the groups remain, and schedulers follow. ``gradient_clip_val`` clips by the norm of all
    gradients. A checkpoint is Lightning's file, with the weights, and next to it a folder of the same name with
    ``.zero`` appended, with the state, which any number of ranks loads: move them together. The file of a plain
    strategy is loaded as well.

    Args:
        *args: arguments of Lightning's strategy.
        stage: 1 shards optimizer state; 2 also shards gradients, for a single optimizer over all parameters.
        zero: further options of `ZeroRedundancyOptimizer` for optimizers that are not sharded yet; ``overlap_with_ddp``
            and ``parameters_as_bucket_view`` are True by default.
        **kwargs: options of Lightning's strategy and of `DistributedDataParallel`.

    Raises:
        NotImplementedError: when training begins, for manual optimization, whose forward pass runs as if gradients were
            not to be reduced.
    """

    def __init__(self, *args: Any, stage: int = 1, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **dict(kwargs, gradient_as_bucket_view=True))
        self._zero = dict(overlap_with_ddp=True, parameters_as_bucket_view=True, stage=stage) | dict(zero or {})
        self._loaded_from: Path | None = None

    # Building

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create optimizers and schedulers, shard the former, and register the hook on the model.

        Raises:
            NotImplementedError: for a module with manual optimization.
        """
        super().setup_optimizers(trainer)
        if not self.lightning_module.automatic_optimization:
            raise NotImplementedError(
                'ZeroDDPStrategy does not support a module with automatic_optimization=False. Use strategy="ddp" and '
                "a ZeroRedundancyOptimizer of stage 1 without overlap. [ZERO-911]"
            )
        created: list[Optimizer] = list(self._optimizers)
        sharded = [self._require_sharded(one) for one in created]
        for config in self.lr_scheduler_configs:
            _follow(config.scheduler, created, sharded)
        self.optimizers = sharded
        for optimizer in sharded:
            optimizer.attach(self.model)

    def _require_sharded(self, optimizer: Optimizer) -> ZeroRedundancyOptimizer:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer
        choice = choice_of(optimizer)
        return ZeroRedundancyOptimizer(choice.groups, choice.optimizer_class, **{**choice.options, **self._zero})

    def setup_precision_plugin(self) -> None:
        """Attach the precision plugin, and let it clip by the norm of all gradients."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_gradients = partial(_clip, getattr(plugin, "scaler", None))

    # Checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Placeholder for the state in Lightning's file."""
        return dict(_SHARDED)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the sharded state, then Lightning's file. A collective."""
        step = {"global_step": checkpoint["global_step"]}
        for number, optimizer in enumerate(self.optimizers if "optimizer_states" in checkpoint else ()):
            save(_folder_of(Path(filepath)) / str(number), self.model, _inner(optimizer), keep=1, extra=step)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = Path(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the sharded state, or a plain strategy's. A collective. RuntimeError if they are of different steps."""
        if any(state != _SHARDED for state in checkpoint["optimizer_states"]):
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._loaded_from is not None, "a checkpoint is read before it is loaded"
        for number, optimizer in enumerate(self.optimizers):
            folder = _folder_of(self._loaded_from) / str(number)
            saved = load(folder, self.model, _inner(optimizer)).extra
            # two writes: a process that was killed between them has left the file of an earlier save
            if saved is not None and saved["global_step"] != checkpoint["global_step"]:
                raise RuntimeError(
                    f"Expected the state of global step {checkpoint['global_step']}, as in {self._loaded_from}, got "
                    f"that of {saved['global_step']} in {folder}: a save was interrupted, or they were not moved "
                    "together. Resume from another checkpoint. [ZERO-911]"
                )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's file and the sharded state."""
        folder = _folder_of(Path(filepath))
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)


def _folder_of(file: Path) -> Path:
    """The folder of a file's sharded state; links, such as Lightning's ``last.ckpt``, are followed."""
    return Path(f"{file.resolve()}.zero")


def _inner(optimizer: Optimizer) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner


def _clip(
    scaler: Any,
    optimizer: Optimizer,
    clip_val: float = 0.0,
    gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
) -> None:
    inner = _inner(optimizer)
    assert isinstance(inner, ZeroRedundancyOptimizer), "the strategy shards all optimizers"
    if clip_val <= 0:
        return
    if scaler is not None and inner._step_supports_amp_scaling:  # where Lightning does not unscale, and refuses
        scaler.unscale_(inner)
    if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
        inner.clip_grad_norm_(clip_val)
    else:
        inner.clip_grad_value_(clip_val)


def _follow(scheduler: Any, before: list[Optimizer], after: list[ZeroRedundancyOptimizer]) -> None:
    """Redirect a scheduler, and schedulers inside it, to the sharded optimizer."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _follow(inner, before, after)
    for plain, sharded in zip(before, after, strict=True):
        if scheduler.optimizer is plain:
            scheduler.optimizer = sharded
