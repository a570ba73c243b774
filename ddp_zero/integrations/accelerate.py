"""`prepare`: a model and a sharded optimizer in an `accelerate.Accelerator`, in stage 1 or 2, stepped inside backward.

    model, opt, loader = prepare(accelerator, model, AdamW, loader, stage=2, lr=3e-4)

In stage 1 without overlap ``accelerator.prepare`` itself takes a `ddp_zero.ZeroRedundancyOptimizer`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.optimizer import shard_of

_PLACE = "ddp_zero: the state is in this folder"


class ShardedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of a sharded optimizer, whose state the hooks of `prepare` save.

    Attributes:
        placeholder: returned once by ``state_dict()`` in place of the state; None for the state.
    """

    placeholder: dict[str, str] | None = None

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped, so that schedulers skip it too.

        With a `GradScaler` as with the plain optimizer: if the scaler has not called the step. It calls that of a fused
        one in any case.
        """
        step = self.optimizer.last_step
        if self.scaler is not None or step is None:
            return bool(self._is_overflow)
        return not step.stepped

    def state_dict(self) -> dict[str, Any]:
        """The state; once within ``accelerator.save_state``, a placeholder with its folder."""
        shown, self.placeholder = self.placeholder, None
        whole: dict[str, Any] = super().state_dict() if shown is None else shown
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; ignore a placeholder, whose state is already loaded."""
        if _PLACE not in state_dict:
            super().load_state_dict(state_dict)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer_class: Callable[..., Optimizer],
    *others: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """As ``accelerator.prepare``, with an optimizer that is built here and sharded over the ranks. A collective.

    The model is wrapped with ``gradient_as_bucket_view=True``. In stage 2 ``accelerator.clip_grad_norm_`` clips by the
    norm of all gradients and ``accelerator.clip_grad_value_`` clamps each rank's owned gradients, both from the first
    step on; ``max_grad_norm=`` clips inside the step. ``accelerator.save_state`` and ``load_state`` write and read
    model and optimizer as a sharded checkpoint, which any number of ranks loads, as a subfolder ``zero_<number>``, next
    to the weight files that they always write. A folder saved with the plain optimizer is loaded as well.

    Args:
        accelerator: the accelerator of a job of several processes with DDP.
        model: not prepared yet.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        *others: further objects to prepare, such as data loaders; a function, such as ``functools.partial(StepLR,
            step_size=10)``, is called with the optimizer and its result, a scheduler, is prepared.
        **options: options of `ddp_zero.shard_optimizer`, and options for ``optimizer_class``.

    Returns:
        The model, the optimizer, and all further objects, prepared.

    Raises:
        RuntimeError: in a job without DDP.
        ValueError: as `shard_optimizer` does.
        TypeError: for a scheduler, which belongs to an optimizer that was built before, or as `shard_optimizer` does.
    """
    _check(accelerator, others)
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    accelerator.ddp_handler = replace(handler, gradient_as_bucket_view=True)
    prepared: nn.Module = accelerator.prepare_model(model)
    zero = shard_optimizer(prepared, optimizer_class, **options)
    opt = ShardedOptimizer(zero, device_placement=accelerator.device_placement, scaler=accelerator.scaler)
    opt._is_accelerate_prepared = True
    accelerator.prepare_optimizer(opt)  # registers it
    made = [one(zero) if _is_factory(one) else one for one in others]
    rest = accelerator.prepare(*made) if made else ()
    if zero.stage == 2:
        accelerator.clip_grad_norm_ = partial(_clip, accelerator, zero, accelerator.clip_grad_norm_)
        accelerator.clip_grad_value_ = partial(_clip_value, accelerator, zero, accelerator.clip_grad_value_)
    name = f"zero_{accelerator._optimizers.index(opt)}"
    accelerator.register_save_state_pre_hook(partial(_save, prepared, opt, name))
    accelerator.register_load_state_pre_hook(partial(_load, prepared, opt, name))
    return (prepared, opt, *(rest if len(made) > 1 else [rest] if made else []))


def _is_factory(one: Any) -> bool:
    is_function = callable(one) and type(one).__name__ in ("function", "method")
    return is_function or isinstance(one, partial) or (isinstance(one, type) and issubclass(one, LRScheduler))


def _check(accelerator: Accelerator, others: tuple[Any, ...]) -> None:
    if not str(accelerator.distributed_type).rpartition(".")[2].startswith("MULTI_"):
        raise RuntimeError(
            f"Expected an accelerator of several processes with DDP, got {accelerator.distributed_type}. Start the job "
            "with torchrun or accelerate launch, or use the plain optimizer. [ZERO-911]"
        )
    for one in others:
        if isinstance(one, LRScheduler | Optimizer):
            raise TypeError(
                f"Expected a function of the optimizer that builds a scheduler, got a {type(one).__name__}, which was "
                f"built without it. Pass functools.partial({type(one).__name__}, ...). [ZERO-911]"
            )


def _clip(
    accelerator: Accelerator,
    zero: ZeroRedundancyOptimizer,
    plain: Callable[..., Any],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
) -> Any:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    own, foreign = _own_of(zero, given)
    if not own:
        return plain(given, max_norm, norm_type)
    if foreign:
        raise ValueError(
            f"{len(foreign)} parameters with a gradient are not in this sharded optimizer. Clip those of each "
            "optimizer on their own. [ZERO-911]"
        )
    accelerator.unscale_gradients()
    return zero.clip_grad_norm_(max_norm, norm_type, parameters=own)


def _clip_value(
    accelerator: Accelerator,
    zero: ZeroRedundancyOptimizer,
    plain: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
) -> None:
    own, foreign = _own_of(zero, [parameters] if isinstance(parameters, Tensor) else list(parameters))
    if foreign:
        plain(foreign, clip_value)  # which unscales
    else:
        accelerator.unscale_gradients()
    zero.clip_grad_value_(clip_value, own)


def _own_of(zero: ZeroRedundancyOptimizer, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    known = shard_of(zero).table.index_of
    own = [param for param in params if param in known]
    return own, [param for param in params if param not in known and param.grad is not None]


def _save(model: nn.Module, opt: ShardedOptimizer, name: str, models: Any, weights: Any, folder: str) -> None:
    """Hook of ``save_state``. A collective."""
    checkpoint.save(Path(folder) / name, model, opt, keep=1)
    opt.placeholder = {_PLACE: name}


def _load(model: nn.Module, opt: ShardedOptimizer, name: str, models: Any, folder: str) -> None:
    """Hook of ``load_state``, for folders of `_save`; a plain optimizer's are ignored. A collective."""
    if (Path(folder) / name).is_dir():
        checkpoint.load(Path(folder) / name, model, opt)
