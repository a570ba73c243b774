"""`Engine`: DeepSpeed's training calls over a stock DDP model and a sharded optimizer, an `EngineOptimizer`.

A step is ``gradient_accumulation_steps`` rounds of ``loss = engine(batch)``, ``engine.backward(loss)`` and
``engine.step()``. The last round is the *boundary*: only there gradients are reduced for the step, the norm is clipped,
the optimizer and the schedule step, and gradients are dropped. In all other rounds stages 0 and 1 accumulate this
rank's own gradients, as under ``ddp.no_sync()``; stage 2 averages each round and keeps the owned part.

A checkpoint ``save_dir/tag/step-<number>/`` is in the format of `ddp_zero.checkpoint`: model, optimizer, schedule,
counters and client state. A file ``save_dir/latest`` names the newest tag. Nothing in them is unpickled.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_zero import checkpoint as checkpoints
from ddp_zero.checkpoint.export import model_state
from ddp_zero.core.comm import Agreement, Communicator, logger
from ddp_zero.core.ddp import prepare_reduction
from ddp_zero.deepspeed.config.answers import OF_THE_OPTIMIZER, SETTINGS, way_here
from ddp_zero.deepspeed.config.config import Batch, Config
from ddp_zero.deepspeed.params import full_fp32_param
from ddp_zero.deepspeed.progress import report_of
from ddp_zero.error_codes import uncoded
from ddp_zero.optimizer import ZeroRedundancyOptimizer, engine_of, shard_of

PathLike = str | os.PathLike[str]

CustomLoad = Callable[..., object]
"""Function that loads a state dict ``src`` into a model ``dst``, both passed by keyword."""

_LATEST = "latest"
_LONGEST_TAG = 255
"""The most characters of a tag, as of a name on Linux's file systems."""
_COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")


class Engine(nn.Module):
    """DeepSpeed's training calls over a DDP model. `ddp_zero.deepspeed.initialize` builds it.

    Args:
        ddp: the wrapped model.
        optimizer: the sharded optimizer, or in stage 0 the plain one.
        lr_scheduler: stepped after every step that was not skipped; None for no schedule.
        config: the configuration.
        collate_fn: collate function of data loaders that the engine builds.

    Attributes:
        module: the model without DDP.
        ddp: the model in `DistributedDataParallel`.
        optimizer: the optimizer, as given.
        zero: the optimizer if it is sharded; None in stage 0 with fp32 parameters.
        lr_scheduler: the schedule, as given.
        training_dataloader: data loader of the training data of `initialize`; None without.
        device: device of the model.
        global_steps: boundaries so far, skipped steps included.
        skipped_steps: steps so far that were skipped because a gradient was not finite.
        global_samples: samples so far, on all ranks.
        micro_steps: calls of `step` so far.
        comm: the ranks.
        parsed: the configuration.
        world_size, dp_world_size: number of ranks.
        global_rank: rank of this process in the job.
        local_rank: rank of this process on its host.
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
        self.__dict__["ddp"] = ddp  # not a submodule: its parameters are `module`'s
        self.optimizer = optimizer
        self.zero = optimizer if isinstance(optimizer, ZeroRedundancyOptimizer) else None
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
        self._report = report_of(config, self.comm.group_rank, self.device)
        self._collate_fn = collate_fn
        self._round = 0  # since the last boundary
        self._boundary: bool | None = None  # set by the user
        self._step_applied = False
        self._has_scaled = False  # since the last boundary
        self._is_in_no_sync = False
        self._is_boundary_late = False  # whether the user has ever set it between forward and backward
        self._is_prepared = self._awaits_backward = False  # DDP, and this engine, by the last forward pass
        self._grad_norm: float | None = None

    # A round

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; gradients of this pass are reduced in the boundary round only.

        Args:
            *inputs: inputs of the model.
            **kwargs: keyword inputs of the model.

        Returns:
            The model's output.
        """
        if self.parsed.fp16.auto_cast and self.parsed.fp16.enabled:
            inputs, kwargs = cast_inputs(inputs, torch.float16), cast_inputs(kwargs, torch.float16)
        sums = self.zero is not None and (self.parsed.zero.stage == 2 or self.parsed.sums_in_fp32)
        is_averaged = sums or self._is_boundary_late or self.is_gradient_accumulation_boundary()
        averages = is_averaged and not self._is_in_no_sync
        if torch.is_grad_enabled():
            self._is_prepared, self._awaits_backward = averages, True
        with self._measure("forward"), nullcontext() if averages else self.ddp.no_sync():
            if not self.parsed.autocast.enabled:
                return self.ddp(*inputs, **kwargs)
            with torch.autocast(self.device.type, torch.bfloat16):
                return self.ddp(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the backward pass of a loss.

        Args:
            loss: a scalar.
            retain_graph: as for `torch.Tensor.backward`.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps``.

        Returns:
            The divided loss, without the loss scale.

        Raises:
            ValueError: for a loss that is not a scalar with a graph.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"Expected a scalar loss with a graph, got a loss of shape {list(loss.shape)}, {loss.requires_grad=}. "
                "Pass loss.mean() of a forward pass outside torch.no_grad(). [ZERO-710]"
            )
        rounds = self._batch.accumulation if scale_wrt_gas else 1
        divided = loss / rounds if rounds > 1 else loss
        with self._measure("backward"), self._round_of_backward(divided):
            self.scale(divided).backward(retain_graph=retain_graph)
        return divided

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a backward pass without the engine.

        Args:
            loss: a scalar.
        """
        self._has_scaled = True
        return self.zero.scale(loss) if self.zero is not None and self.parsed.fp16.enabled else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a round; at the boundary, take the step. A collective there.

        Args:
            lr_kwargs: keyword arguments for the schedule's ``step``.

        Raises:
            RuntimeError: under `no_sync`; at the boundary, if there was no `backward` and gradients had to be divided
                or scaled; or as `ZeroRedundancyOptimizer.step` does.
        """
        if self._is_in_no_sync:
            raise RuntimeError("engine.step() was called inside engine.no_sync(). Call it outside. [ZERO-710]")
        self._step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._round = 0 if is_boundary else self._round + 1
        if is_boundary:
            self._take_step(lr_kwargs or {})

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        scale = self.loss_scale() if self.parsed.fp16.enabled else None
        if not self._has_scaled and (self._batch.accumulation > 1 or scale is not None):
            raise RuntimeError(
                "engine.step() needs an engine.backward(loss) since the last step: otherwise the loss is not divided "
                "by gradient_accumulation_steps or not multiplied by the loss scale. Call engine.backward(loss) "
                "instead of loss.backward(). [ZERO-710]"
            )
        self._has_scaled = False
        with self._measure("step"):
            if self.zero is not None:
                self.zero.step()
                record = self.zero.last_step
                assert record is not None, "a step was just taken or skipped"
                self._step_applied = record.stepped
                self._grad_norm = record.grad_norm if record.stepped else float("inf")
            else:
                limit = self.parsed.max_grad_norm
                params = [param for group in self.optimizer.param_groups for param in group["params"]]
                self._grad_norm = None if limit is None else float(clip_grad_norm_(params, limit))
                self.optimizer.step()
                self._step_applied = True
            self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self._batch.train
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        if self._report is not None:
            counts = self.global_steps, self.skipped_steps, self.global_samples
            self._report.after_step(*counts, self.get_lr(), self.get_mom(), scale)

    def _measure(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._report is None else self._report.measure(name)

    # The boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if this round is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._round + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set explicitly whether the next rounds are the last of a step, instead of counting.

        Args:
            is_boundary: True before the last backward pass of a step, False before the others. If it is set between
                forward and backward, stages 0 and 1 average gradients in every round from then on, as stage 2 does.
        """
        self._boundary = is_boundary
        self._is_boundary_late |= self._awaits_backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's own gradients in any round; `step` is refused inside."""
        before, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = before

    def _round_of_backward(self, loss: Tensor) -> AbstractContextManager[Any]:
        """The context of a backward pass, which DDP reduces only if it was prepared for that, usually in forward."""
        was_prepared, self._is_prepared, self._awaits_backward = self._is_prepared, False, False
        if self._is_in_no_sync:
            return self.ddp.no_sync()
        if not self.is_gradient_accumulation_boundary() and not was_prepared:
            return self.ddp.no_sync()
        if not was_prepared:
            if self.zero is None:
                prepare_reduction(self.ddp, loss)
            else:
                engine_of(self.zero).attachment.passes.prepare_reduction(self.ddp, loss)
        is_last = self.is_gradient_accumulation_boundary()
        return nullcontext() if is_last or self.zero is None else self.zero.accumulate()

    # The model

    def train(self, mode: bool = True) -> "Engine":
        """Set training or evaluation mode.

        Args:
            mode: True for training.
        """
        super().train(mode)
        self.ddp.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients.

        Args:
            set_to_none: True to drop them.
        """
        self.optimizer.zero_grad(set_to_none)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place with `torch.nn.Module.compile`.

        Args:
            *args: passed on.
            **kwargs: passed on.
        """
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the model's."""
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
        """The model's state dict, without DDP; see `torch.nn.Module.state_dict`.

        Args:
            destination: dictionary to fill.
            prefix: prefix of all names.
            keep_vars: keep tensors attached to their graph.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
        """
        found: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        frozen = {f"{prefix}{name}" for name, param in self.module.named_parameters() if not param.requires_grad}
        for name in frozen if exclude_frozen_parameters else ():
            found.pop(name, None)
        return found

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: CustomLoad | None = None
    ) -> None:
        """Load weights into the model, and into masters. Every rank passes the same weights.

        Args:
            checkpoint: has the model's state dict under ``"module"``.
            strict: require exactly the model's names.
            custom_load_fn: called with ``src=`` that state dict and ``dst=`` the model, to load it instead.
        """
        if custom_load_fn is None:
            self.module.load_state_dict(checkpoint["module"], strict=strict)
        else:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        if self.zero is not None and self.parsed.has_masters:
            self.zero.refresh_master_weights()

    def destroy(self) -> None:
        """Drop gradients and any unfinished iteration; the engine cannot be used afterwards."""
        if self.zero is not None:
            self.zero.reset()
        self.optimizer.zero_grad()

    # Numbers

    def was_step_applied(self) -> bool:
        """True if the last call of `step` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, before clipping; infinite if it was skipped.

        None before the first step, and with ``gradient_clipping: 0`` and ``compute_grad_norm: false``.
        """
        return self._grad_norm

    def loss_scale(self) -> float:
        """The current factor on the loss; 1.0 without fp16."""
        scale = None if self.zero is None else self.zero.loss_scale
        return 1.0 if scale is None else scale

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # The configuration

    def train_batch_size(self) -> int:
        """Samples of a step, on all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a round, on one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Rounds of a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """``train_batch_size``, ``train_micro_batch_size_per_gpu`` and ``gradient_accumulation_steps``."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of rounds of a step; between two steps.

        Args:
            train_batch_size: samples of a step, on all ranks.

        Raises:
            ValueError: if the size is not a multiple of the samples of a round on all ranks.
            RuntimeError: in the middle of a step.
        """
        self._check_between_steps("set_train_batch_size")
        self._batch = Batch.solve(train_batch_size, self._batch.micro, None, self.comm.world_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a round, and with them the samples of a step; between two steps.

        Args:
            micro_batch_size: samples of a round, on one rank.

        Raises:
            RuntimeError: in the middle of a step.
        """
        self._check_between_steps("set_train_micro_batch_size")
        self._batch = Batch.solve(None, micro_batch_size, self._batch.accumulation, self.comm.world_size)

    def _check_between_steps(self, what: str) -> None:
        if self._round:
            raise RuntimeError(
                f"engine.{what}() was called after {self._round} of {self._batch.accumulation} rounds of a step: the "
                "gradients so far were divided by a different number. Call it between two steps. [ZERO-710]"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as given."""
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
        """A data loader of this rank's share of a dataset.

        Args:
            dataset: a dataset with a length and items.
            batch_size: samples of a round; None for the configuration's.
            data_sampler: None for a `DistributedSampler` that shuffles; its ``set_epoch`` changes the order.
            collate_fn: as for `torch.utils.data.DataLoader`; None for the one given to `initialize`.
            num_local_io_workers: number of reader processes.
        """
        return DataLoader(
            dataset,
            batch_size=batch_size or self._batch.micro,
            sampler=data_sampler or DistributedSampler(dataset),
            collate_fn=collate_fn or self._collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=self.device.type == "cuda",
            drop_last=self.parsed.rest.dataloader_drop_last,
        )

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save model, optimizer, schedule, counters and client state as ``save_dir/tag``. A collective.

        In the middle of accumulation, the state of the last step is saved.

        Args:
            save_dir: a folder that all ranks share.
            tag: a name without a path, the same on every rank; None for ``global_step<number>``.
            client_state: numbers, strings, tensors, and lists, tuples and dicts of them, saved from rank 0.
            save_latest: write the tag to the file ``latest``.
            exclude_frozen_parameters: leave out parameters that do not require a gradient; loading leaves them
                unchanged.

        Returns:
            True.

        Raises:
            ValueError: for an empty ``save_dir``, a tag that is a path or empty, or, with ``checkpoint.tag_validation:
                Fail``, differs between ranks.
            TypeError: for a ``save_dir`` that is no path, or client state that cannot be saved without pickle.
        """
        _check_folder("save_dir", save_dir)
        name = self._agreed_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        counters = {counter: getattr(self, counter) for counter in _COUNTERS}
        extra = {
            "client_state": client_state or {},
            "engine": {**counters, "micro_steps": self.micro_steps - self._round},
            "scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
        }
        folder = Path(save_dir) / name
        left_out = exclude_frozen_parameters
        checkpoints.save(folder, self.ddp, self.optimizer, extra=extra, keep=1, exclude_frozen=left_out).wait()
        if save_latest:
            with Agreement(self.comm, "naming the latest checkpoint"):
                if self.comm.group_rank == 0:
                    unfinished = Path(save_dir) / f".{_LATEST}.unfinished"
                    unfinished.write_text(name)
                    unfinished.replace(Path(save_dir) / _LATEST)
        return True

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of `save_checkpoint` or DeepSpeed, at any number of ranks and in any stage. A collective.

        Args:
            load_dir: the folder given to `save_checkpoint`.
            tag: name of the checkpoint; None for the tag in the file ``latest``.
            load_module_strict: require that the model fits exactly.
            load_optimizer_states: load the optimizer's state.
            load_lr_scheduler_states: load the schedule's state.
            load_module_only: load neither, nor the counters.
            custom_load_fn: called with ``src=`` the saved state dict of the model and ``dst=`` the model, after all
                values that fit by name have been loaded, including the optimizer's state.

        Returns:
            The checkpoint's folder and the client state; None twice, with a warning, without a tag and ``latest``.

        Raises:
            FileNotFoundError: if there is no complete checkpoint of the tag.
            ValueError: if it is damaged or does not fit, or for a tag, also in ``latest``, that is not a folder's name.
            TypeError: for a ``load_dir`` that is no path.
        """
        _check_folder("load_dir", load_dir)
        if tag is not None:
            _check_tag(str(tag))
        name = self._latest_tag(Path(load_dir)) if tag is None else str(tag)
        wants_optimizer = load_optimizer_states and not load_module_only
        folder = client_state = None
        if name is not None:
            folder = Path(load_dir) / name
            optimizer = self.optimizer if wants_optimizer else None
            strict = load_module_strict and custom_load_fn is None
            loaded = checkpoints.load(folder, self.ddp, optimizer, strict=strict)
            if custom_load_fn is not None:
                self.load_module_state_dict({"module": model_state(loaded.folder)}, True, custom_load_fn)
            if self.zero is not None and self.parsed.has_masters:
                if not (wants_optimizer and self.parsed.zero.load_from_fp32_weights):
                    self.zero.refresh_master_weights()
            extra = loaded.extra if "engine" in loaded.extra else self._of_deepspeed(loaded.extra)
            client_state = extra["client_state"]
            if not load_module_only:
                if load_lr_scheduler_states and self.lr_scheduler is not None and extra["scheduler"] is not None:
                    self.lr_scheduler.load_state_dict(extra["scheduler"])
                counters = extra["engine"]
                self.global_steps = counters["global_steps"]
                self.skipped_steps = counters["skipped_steps"]
                self.global_samples = counters["global_samples"]
                self.micro_steps = counters["micro_steps"]
        self._round, self._has_scaled = 0, False  # what was accumulated has been dropped
        return None if folder is None else str(folder), client_state

    def save_16bit_model(
        self, save_dir: PathLike, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the model's weights in their dtypes, by `torch.save` on rank 0. A collective.

        Args:
            save_dir: a folder, created if missing.
            save_filename: name of the file, which ``torch.load(file, weights_only=True)`` reads.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Returns:
            True.

        Raises:
            ValueError: for a name that ends in ``.safetensors``.
            TypeError: for a ``save_dir`` that is no path.
            OSError: on rank 0 if writing fails; RuntimeError on all other ranks.
        """
        return self._save_weights(save_dir, save_filename, exclude_frozen_parameters, in_fp32=False)

    save_fp16_model = save_16bit_model

    def save_fp32_model(
        self, save_dir: PathLike, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights in fp32, masters in place of low-precision parameters. A collective.

        Args:
            save_dir: see `save_16bit_model`.
            save_filename: see `save_16bit_model`.
            exclude_frozen_parameters: see `save_16bit_model`.

        Returns:
            True.

        Raises:
            ValueError: as `save_16bit_model`.
            OSError: as `save_16bit_model`.
        """
        return self._save_weights(save_dir, save_filename, exclude_frozen_parameters, in_fp32=True)

    def _agreed_tag(self, tag: str) -> str:
        """Rank 0's tag, after comparing the ranks' tags as configured."""
        _check_tag(tag)
        tags = self.comm.all_gather_text(tag)
        if len(set(tags)) > 1 and self.parsed.tag_validation == "fail":
            raise ValueError(
                f"Expected the same tag on every rank, got {tags}. Leave tag= out, or compute it from the step. "
                "[ZERO-711]"
            )
        if len(set(tags)) > 1 and self.parsed.tag_validation == "warn":
            logger.warning(
                "Expected the same tag on every rank, got %s: saving as %r. Compute it from the step. [ZERO-711]",
                tags,
                tags[0],
            )
        return tags[0]

    def _latest_tag(self, folder: Path) -> str | None:
        """The tag in the file ``latest``, as rank 0 reads it. A collective, which raises on every rank alike."""
        file = folder / _LATEST
        tag = ""
        wrong = ""
        if self.comm.group_rank == 0:
            try:
                if file.is_file():
                    with file.open("rb") as opened:
                        tag = opened.read(4 * _LONGEST_TAG).decode("utf-8").strip()
                    _check_tag(tag)
            except (OSError, ValueError) as error:
                wrong = str(error)
        tag, wrong = json.loads(self.comm.all_gather_text(json.dumps([tag, wrong]))[0])
        if wrong:
            shown = uncoded(wrong).rstrip(".")
            raise ValueError(
                f"Expected the tag of a checkpoint in {file}, got: {shown}. Pass tag=, its folder's name. [ZERO-711]"
            )
        if not tag:
            logger.warning(
                "Expected a file %s, or a tag, got neither: nothing was loaded, and training begins anew. To resume, "
                "pass the folder of save_checkpoint(). [ZERO-613]",
                file,
            )
        return tag or None

    def _of_deepspeed(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        counters = {counter: int(extra.get(counter) or 0) for counter in _COUNTERS}
        counters["micro_steps"] = counters["global_steps"] * self._batch.accumulation
        return {"scheduler": extra.get("lr_scheduler"), "client_state": extra["client_state"], "engine": counters}

    def _save_weights(self, save_dir: PathLike, filename: str, exclude_frozen: bool, in_fp32: bool) -> bool:
        if filename.endswith(".safetensors"):
            raise ValueError(
                f"Expected a name for torch.save, such as pytorch_model.bin, got {filename!r}. For safetensors use "
                "engine.save_checkpoint() and python -m ddp_zero checkpoint export. [ZERO-711]"
            )
        _check_folder("save_dir", save_dir)
        weights = dict[str, Any]()
        for name, value in self.module.state_dict(keep_vars=True).items():
            if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
                continue
            found = self._in_fp32(value) if in_fp32 else value
            if self.comm.group_rank == 0:
                weights[name] = found.detach() if isinstance(found, Tensor) else found
        with Agreement(self.comm, "saving the model's weights"):
            if self.comm.group_rank == 0:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                torch.save(weights, Path(save_dir) / filename)
        return True

    def _in_fp32(self, value: Any) -> Any:
        """A floating-point value in fp32, any other unchanged. A collective for a parameter with a master."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if self.zero is not None and value in shard_of(self.zero).table.index_of:
            return full_fp32_param(self.zero, value)
        return value.float()


def _check_folder(name: str, folder: object) -> None:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"Expected {name} to be the path of a folder, got {folder!r:.80}. Pass a str or a pathlib.Path. [ZERO-711]"
        )
    if not str(folder):
        raise ValueError(f"Expected {name} to be a folder, got ''. For the working folder, pass '.'. [ZERO-711]")


def _check_tag(tag: str) -> None:
    """Check that a tag is the name of a folder, which leads nowhere else."""
    if Path(tag).name != tag or tag in ("", "..", _LATEST) or not tag.isprintable() or len(tag) > _LONGEST_TAG:
        raise ValueError(
            f"Expected a tag that names a folder, got {tag!r:.80}. Pass a name without '/', of at most {_LONGEST_TAG} "
            "characters. [ZERO-711]"
        )


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested lists, tuples and dicts, cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(cast_inputs(one, dtype) for one in value)
    if isinstance(value, dict):
        return {name: cast_inputs(one, dtype) for name, one in value.items()}
    return value


# The optimizer


class EngineOptimizer(ZeroRedundancyOptimizer):
    """A `ZeroRedundancyOptimizer` that answers what scripts ask DeepSpeed's optimizers of stages 1 and 2.

    For other names of theirs the error tells the way here.
    """

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        step = self.last_step
        return step is not None and not step.stepped

    @property
    def cur_scale(self) -> float:
        """The current factor on the loss; 1.0 without fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale

    @property
    def loss_scale(self) -> float | None:
        """The current factor on the loss; None without fp16. Set it on every rank, between two steps."""
        return super().loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scale = engine_of(self).decision.loss_scale
        if scale is None:
            raise RuntimeError(
                f"Expected fp16 in the configuration where a loss scale is set, got {value!r} without it. Enable fp16, "
                "or drop the line. [ZERO-121]"
            )
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                f"Expected no gradients when the loss scale is set, got gradients of the loss times {scale.value}. Set "
                "it after engine.step(), before the next engine.backward(). [ZERO-309]"
            )
        scale.load_state_dict({**scale.state_dict(), "value": value})

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale changes with overflows."""
        scale = engine_of(self).decision.loss_scale
        return scale is not None and scale.is_dynamic

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group; call it on every rank."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> Any:
        return self.param_groups[0]["lr"]

    def refresh_fp32_params(self) -> None:
        """Make masters from the model's parameters, after these were changed."""
        if self.master_weights:
            self.refresh_master_weights()

    if not TYPE_CHECKING:  # so that a misspelt name is still an error

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                way = way_here(name, OF_THE_OPTIMIZER)
                if way is None or name.startswith("__"):
                    raise
                raise AttributeError(f"Expected what this optimizer has of DeepSpeed's, got {name!r}. {way}") from error
