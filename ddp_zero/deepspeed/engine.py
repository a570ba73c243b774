"""`Engine`: DeepSpeed's training calls over a stock DDP model and a sharded optimizer.

A step is ``gradient_accumulation_steps`` rounds of ``loss = engine(batch)``, ``engine.backward(loss)`` and
``engine.step()``. The last round is the *boundary*: only there gradients are reduced to what is stepped, the norm is
clipped, the optimizer and the schedule step, and gradients are dropped. In the other rounds stages 0 and 1 add up this
rank's own gradients, as under ``ddp.no_sync()``; stage 2 averages each round and keeps what this rank owns.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.deepspeed import saving
from ddp_zero.deepspeed.build import build_loader, max_grad_norm
from ddp_zero.deepspeed.config.answers import SETTINGS, way_here
from ddp_zero.deepspeed.config.config import Batch, Config
from ddp_zero.deepspeed.monitor import Monitor, Progress
from ddp_zero.deepspeed.precision import autocast, cast_inputs
from ddp_zero.optimizer import ZeroRedundancyOptimizer


class Engine(nn.Module):
    """See the module. `ddp_zero.deepspeed.initialize` builds it.

    Args:
        ddp: the wrapped model.
        optimizer: sharded, or in stage 0 the plain one.
        lr_scheduler: stepped after every step that was taken; None: no schedule.
        config: the configuration.
        collate_fn: of data loaders that it builds.

    Attributes:
        module: the model without DDP.
        ddp: the model in `DistributedDataParallel`.
        optimizer: as given.
        lr_scheduler: as given.
        training_dataloader: over the training data of `initialize`; None without.
        device: of the model.
        global_steps: boundaries so far, skipped steps included.
        skipped_steps: of these, how many were not taken because a gradient was not finite.
        global_samples: samples so far, on all ranks.
        micro_steps: calls of `step` so far.
        comm: the ranks.
        parsed: the configuration.
        world_size, dp_world_size: how many ranks there are.
        global_rank, local_rank: of this process, in the job and on its host.
    """

    module: nn.Module
    ddp: DistributedDataParallel

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        lr_scheduler: Any,
        config: Config,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = ddp.module
        self.__dict__["ddp"] = ddp  # not a submodule: its parameters are those of `module`
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: DataLoader[Any] | None = None
        self.device = next(ddp.parameters()).device
        self.global_steps = self.skipped_steps = self.global_samples = self.micro_steps = 0
        self.parsed = config
        self._batch = config.batch
        self.comm = Communicator(ddp.process_group)
        self.world_size = self.dp_world_size = self.comm.world_size
        self.global_rank = int(self.comm.global_rank(self.comm.group_rank))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
        self._monitor = Monitor(config, self.comm.group_rank, self.device)
        self._collate_fn = collate_fn
        self._round = 0  # since the last boundary
        self._boundary: bool | None = None  # set by the user
        self._step_applied = False
        self._has_scaled = False  # since the last boundary
        self._is_in_no_sync = False
        self._grad_norm: float | None = None

    @property
    def zero(self) -> ZeroRedundancyOptimizer | None:
        """The sharded optimizer; None in stage 0 with fp32 parameters."""
        return self.optimizer if isinstance(self.optimizer, ZeroRedundancyOptimizer) else None

    # A round

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output; gradients of this pass are reduced if it is the boundary's."""
        if self.parsed.fp16.auto_cast and self.parsed.fp16.enabled:
            inputs, kwargs = cast_inputs(inputs, torch.float16), cast_inputs(kwargs, torch.float16)
        with self._monitor.timed("forward"), self._rounds(), autocast(self.parsed, self.device):
            return self.ddp(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """The backward pass of a loss.

        Args:
            loss: a scalar.
            retain_graph: as for `torch.Tensor.backward`.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps``.

        Returns:
            The loss that was divided; the loss scale is not in it.

        Raises:
            ValueError: for a loss that is not a scalar with a graph.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"Expected a scalar loss with a graph, got one of shape {list(loss.shape)}, {loss.requires_grad=}."
            )
        rounds = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        divided = loss / rounds if rounds > 1 else loss
        with self._monitor.timed("backward"), self._rounds():
            self.scale(divided).backward(retain_graph=retain_graph)
        return divided

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a backward pass without the engine."""
        self._has_scaled = True
        return loss if self.zero is None or self.zero.loss_scale is None else self.zero.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a round; at the boundary, take the step. A collective there.

        Raises:
            RuntimeError: under `no_sync`; at the boundary, if there was no `backward` and gradients had to be divided
                or scaled; or as `ZeroRedundancyOptimizer.step` does.
        """
        if self._is_in_no_sync:
            raise RuntimeError("Expected engine.step() outside of engine.no_sync(), got it inside.")
        self._step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._round = 0 if is_boundary else self._round + 1
        if is_boundary:
            self._take_step(lr_kwargs or {})

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        scale = self.loss_scale()
        if not self._has_scaled and (self.gradient_accumulation_steps() > 1 or self.fp16_enabled()):
            raise RuntimeError(
                "Expected engine.backward(loss) before engine.step(), got none since the last step: the loss was not "
                "divided by gradient_accumulation_steps or not multiplied by the loss scale."
            )
        self._has_scaled = False
        with self._monitor.timed("step"):
            self._step_applied = self._step_sharded() if self.zero is not None else self._step_plain()
            self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self._batch.train
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        shown = scale if self.fp16_enabled() else None
        self._monitor.after_step(
            Progress(self.global_steps, self.skipped_steps, self.global_samples, self.get_lr(), self.get_mom(), shown)
        )

    def _step_sharded(self) -> bool:
        assert self.zero is not None, "asked before"
        self.zero.step()
        record = self.zero.last_step
        assert record is not None, "a step was just taken or skipped"
        self._grad_norm = record.grad_norm if record.stepped else float("inf")
        return record.stepped

    def _step_plain(self) -> bool:
        limit = max_grad_norm(self.parsed)
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._grad_norm = None if limit is None else float(clip_grad_norm_(params, limit))
        self.optimizer.step()
        return True

    # The boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this round is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._round + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next rounds are the last of a step, instead of counting; set it before each forward pass."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside add up this rank's own gradients, whatever round it is; `step` is refused."""
        before, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = before

    def _rounds(self) -> AbstractContextManager[Any]:
        if self._is_in_no_sync:
            return self.ddp.no_sync()
        if self.is_gradient_accumulation_boundary():
            return nullcontext()
        averages = self.parsed.zero.stage == 2 or self._sums_in_fp32
        return self.zero.accumulate() if averages and self.zero is not None else self.ddp.no_sync()

    @property
    def _sums_in_fp32(self) -> bool:
        wanted = self.parsed.data_types.grad_accum_dtype in ("fp32", "float32", "float")
        return wanted and self.parsed.dtype != "float32"

    # The model

    def train(self, mode: bool = True) -> "Engine":
        """Set training or evaluation mode."""
        super().train(mode)
        self.ddp.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place, by `torch.nn.Module.compile`."""
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Anything else is an attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("_"):
                raise
        if name in SETTINGS:
            return partial(SETTINGS[name], self.parsed)
        module = super().__getattr__("module")
        if hasattr(module, name):
            return getattr(module, name)
        remedy = way_here(name)
        if remedy is not None:
            raise AttributeError(f"Expected what this engine has of DeepSpeed's, got {name!r}. {remedy}")
        raise AttributeError(f"Expected an attribute of the engine or of {type(module).__name__}, got {name!r}.")

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict, without DDP; see `torch.nn.Module.state_dict`."""
        found: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        frozen = {f"{prefix}{name}" for name, param in self.module.named_parameters() if not param.requires_grad}
        for name in frozen if exclude_frozen_parameters else ():
            found.pop(name, None)
        return found

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: saving.CustomLoad | None = None
    ) -> None:
        """Load weights into the model, and into masters. Every rank passes the same.

        Args:
            checkpoint: has the model's state dict under ``"module"``.
            strict: whether the names must be those of the model.
            custom_load_fn: called with ``src=`` that state dict and ``dst=`` the model, to load it instead.
        """
        saving.load_module(self, checkpoint["module"], strict, custom_load_fn)

    def destroy(self) -> None:
        """Drop gradients, and an iteration that is not finished; the engine is not to be used after it."""
        if self.zero is not None:
            self.zero.reset()
        self.optimizer.zero_grad()

    # Numbers

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, before clipping; infinite if it was skipped.

        None before the first step, and with ``gradient_clipping: 0`` and ``compute_grad_norm: false``.
        """
        return self._grad_norm

    def loss_scale(self) -> float:
        """The factor on the loss now; 1.0 without fp16."""
        scale = None if self.zero is None else self.zero.loss_scale
        return 1.0 if scale is None else scale

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or the betas."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # The configuration

    def train_batch_size(self) -> int:
        """Samples of a step, on all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a round, on a rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Rounds of a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """``train_batch_size``, ``train_micro_batch_size_per_gpu`` and ``gradient_accumulation_steps``."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of rounds of a step; between two steps.

        Raises:
            ValueError: if the size is not a multiple of the samples of a round on all ranks.
            RuntimeError: in the middle of a step.
        """
        self._check_between_steps("set_train_batch_size")
        self._batch = Batch.solve(train_batch_size, self._batch.micro, None, self.comm.world_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a round, and with them those of a step; between two steps."""
        self._check_between_steps("set_train_micro_batch_size")
        self._batch = Batch.solve(None, micro_batch_size, self._batch.accumulation, self.comm.world_size)

    def _check_between_steps(self, what: str) -> None:
        if self._round:
            raise RuntimeError(
                f"Expected engine.{what}() between two steps, got it after {self._round} of "
                f"{self._batch.accumulation} rounds of one: gradients so far were divided by another number."
            )

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return self.parsed.zero.stage

    def gradient_clipping(self) -> float:
        """The largest norm; 0: nothing is clipped."""
        return self.parsed.rest.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.parsed.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.parsed.bf16.enabled

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return dict(self.parsed.document)

    # Data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """A data loader of this rank's share of a dataset; see `ddp_zero.deepspeed.build.build_loader`."""
        return build_loader(
            dataset,
            batch_size or self._batch.micro,
            self.parsed,
            self.device,
            data_sampler=data_sampler,
            collate_fn=collate_fn or self._collate_fn,
            workers=num_local_io_workers,
        )

    # Checkpoints

    def counters(self) -> dict[str, int]:
        """What counts steps, as it was after the last one."""
        return {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps - self._round,
        }

    def save_checkpoint(
        self,
        save_dir: saving.PathLike,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything as ``save_dir/tag``; see `ddp_zero.deepspeed.saving.save`. A collective.

        In the middle of accumulation, what is saved is that of the last step.
        """
        return saving.save(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: saving.PathLike,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: saving.CustomLoad | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved; see `ddp_zero.deepspeed.saving.load`. A collective.

        With ``custom_load_fn``, that function is called with ``src=`` the saved state dict of the model and ``dst=``
        the model, after what fits by name was loaded, the optimizer's state too.
        """
        only = load_module_only
        wanted = saving.Wanted(
            load_module_strict,
            load_optimizer_states and not only,
            load_lr_scheduler_states and not only,
            custom_load_fn,
        )
        loaded = saving.load(self, load_dir, tag, wanted)
        self._round, self._has_scaled = 0, False  # what was accumulated has been dropped
        if loaded.counters is not None and not only:
            self.global_steps, self.skipped_steps = loaded.counters["global_steps"], loaded.counters["skipped_steps"]
            self.global_samples, self.micro_steps = loaded.counters["global_samples"], loaded.counters["micro_steps"]
        return loaded.folder, loaded.client_state

    def save_16bit_model(
        self,
        save_dir: saving.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights as they are in the model, by `torch.save` on rank 0. A collective."""
        return saving.save_weights(self, save_dir, save_filename, exclude_frozen_parameters, in_fp32=False)

    save_fp16_model = save_16bit_model

    def save_fp32_model(
        self,
        save_dir: saving.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights in fp32, those with masters from these, by `torch.save` on rank 0. A collective."""
        return saving.save_weights(self, save_dir, save_filename, exclude_frozen_parameters, in_fp32=True)
