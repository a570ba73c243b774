"""`ZeroRedundancyOptimizer`: the façade that users hold. Its step is in `take_step.py`."""

import copy
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.backward.admission import check_can_sync, check_has_no_hook, check_model
from ddp_zero.backward.forward_passes import BeforeForward, ForwardPasses
from ddp_zero.backward.gradients import CommHook, watching
from ddp_zero.backward.hook import OverlapHook
from ddp_zero.backward.machine import OverlapStatus, Phase
from ddp_zero.backward.side_stream import SideStream
from ddp_zero.comm.agreement import Agreement
from ddp_zero.comm.communicator import Communicator, next_generation
from ddp_zero.forwarding import ForwardsMethods
from ddp_zero.local.arguments import check_flags, check_group, check_known, check_params, is_group
from ddp_zero.local.inner import build_inner, check_can_be_sharded, check_epsilon
from ddp_zero.local.local_step import ParamGroup, copy_options
from ddp_zero.local.masters import SteppedTensors, localise_group
from ddp_zero.local.parameters import ParameterTable
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.options import StepOptions
from ddp_zero.plan.partition import GlobalRank, GroupRank
from ddp_zero.stage2.bucket import options_of_stage
from ddp_zero.stage2.partitioned import gradients_of_stage
from ddp_zero.state.shard_dict import ShowsOwnState
from ddp_zero.step.before_forward import wait_before_forward
from ddp_zero.step.binding import Binding
from ddp_zero.step.decision import Decision, check_options
from ddp_zero.step.join import ZeroJoinHook
from ddp_zero.step.report import describe_shards, draw_buckets, state_bytes
from ddp_zero.step.sharded_step import ShardedStep


class ZeroRedundancyOptimizer(ShowsOwnState, ForwardsMethods):
    """Any `torch.optim.Optimizer`, its state sharded over the ranks of a process group (ZeRO stages 1 and 2).

    Each rank owns some of the parameters, keeps optimizer state for those only, steps them, and sends the result to the
    others; afterwards all ranks hold the same parameters. Gradients must have been averaged before, as
    `DistributedDataParallel` does; in stage 2 a rank keeps averaged gradients only of the parameters that it owns.
    Results match the unsharded optimizer with the same averages bit for bit; `accumulate` documents what is averaged.
    The method is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2019.

    A drop-in for `torch.distributed.optim.ZeroRedundancyOptimizer`. Every rank of the group must construct it, with the
    same parameters in the same order, and must call `step`, `add_param_group` and `consolidate_state_dict` together.
    The same holds for public methods of ``optimizer_class`` that torch's optimizers do not have, such as ``train()``
    and ``eval()`` of schedule-free ones: call them on this optimizer, not on ``optim``, so that their writes are sent.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`, or another callable that builds one.
        process_group: the ranks that share the work; the default group if None.
        parameters_as_bucket_view: move the parameters into flat storage, so that a sync copies nothing. ``param.data``
            is re-pointed; references taken to it before are stale. If False, the parameters stay where they are and a
            sync holds copies of up to two buckets (25 MiB each, or one parameter if that is larger).
        overlap_with_ddp: step inside backward, through a DDP communication hook from `hook_with_zero_step`. The
            training loop stays the same: ``step`` then only joins the iteration, and may be left out.
        stage: 1 shards optimizer state; 2 also shards gradients, through a hook from
            ``hook_with_zero_step(None, ...)``, and needs a model wrapped with ``gradient_as_bucket_view=True``.
        grad_comm_dtype: stage 2: dtype in which gradients travel, such as `torch.bfloat16`; they are summed in fp32.
            None: their own dtype.
        gradient_predivide_factor: stage 2: gradients are divided by this before they are summed, and by the rest of
            the number of ranks afterwards. None: by the number of ranks before, as DDP does.
        max_grad_norm: clip the norm of all gradients to this inside the step. A parameter group with a
            ``max_grad_norm`` of its own is clipped by its own norm instead, or not at all if that is None. Norms add up
            in the order of the model's parameters if the model is known (through a hook, or from `shard_optimizer`),
            else of the groups; the order affects the last bits.
        norm_type: order of the p-norm for ``max_grad_norm``; ``inf`` for the largest absolute value.
        nonfinite: what a step does if any gradient is inf or NaN: ``"skip"`` changes no state and is reported in
            ``last_step``, ``"raise"`` raises on every rank, ``"step"`` steps as DDP would. None: skip if the step
            waits for all gradients anyway, else step.
        loss_scale: the factor that `scale` multiplies the loss by, a number or a `DynamicLossScale`.
        master_weights: step fp16 and bf16 parameters in fp32: their owner keeps an fp32 copy and state in fp32.
        sync: ``"step"``: after the step every rank has all new parameters. ``"forward"``: they may still be in flight
            then, in the order in which the next forward pass needs them, and any access to one (layers,
            ``state_dict()``, code that reads it) waits for it. Needs ``parameters_as_bucket_view=True``, and takes
            effect once the model is known (through a hook, or from `shard_optimizer`). See `finish_sync`.
        accumulate_in_fp32: stage 1: averages of several backward passes add up as in stage 2 (see `accumulate`), those
            of fp16 and bf16 in fp32, and ``param.grad`` shows the rounded sum. From the second pass on, each rank keeps
            the sums of all gradients in addition to them. Needs a hook from `hook_with_zero_step`, also without
            overlap; `shard_optimizer` builds it. False: averages add up in ``param.grad``, as in DDP.
        **defaults: options for ``optimizer_class``.

    Attributes:
        optim: the local optimizer, over this rank's parameters: one group per exposed group, in order, empty ones too.
        param_groups: the exposed groups with all parameters. Options set here reach the local optimizer at the next
            step, and options that it adds appear here.
        parameters_as_bucket_view: whether the parameters live in flat storage.

    Raises:
        ValueError: for an empty or repeated parameter, shared memory, parameters that differ between ranks, or several
            dtypes in a group of `torch.optim.Adafactor` with its default ``eps``, the resolution of a single dtype.
        TypeError: for arguments of the wrong type, or options that ``optimizer_class`` does not accept.
        NotImplementedError: for LBFGS or SparseAdam, or parameters that are not dense.
        RuntimeError: if `torch.distributed` is not initialised, this process is not in the group, or construction
            failed on another rank.
    """

    optim: Optimizer

    # Construction

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        stage: int = 1,
        grad_comm_dtype: torch.dtype | None = None,
        gradient_predivide_factor: float | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        nonfinite: str | None = None,
        loss_scale: DynamicLossScale | float | None = None,
        master_weights: bool = False,
        sync: str = "step",
        accumulate_in_fp32: bool = False,
        **defaults: Any,
    ) -> None:
        group = process_group if is_group(process_group) else None  # else refused below, on all ranks
        self._comm = Communicator(group, next_generation(group))
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlaps = overlap_with_ddp
        self._hook: OverlapHook | None = None
        self._waits_because: str | None = None
        Joinable.__init__(self)
        with Agreement(self._comm, "building ZeroRedundancyOptimizer") as agreement:
            check_group(process_group)
            check_flags(parameters_as_bucket_view=parameters_as_bucket_view, overlap_with_ddp=overlap_with_ddp)
            self._reduction = options_of_stage(stage, grad_comm_dtype, gradient_predivide_factor)
            options = StepOptions(
                max_grad_norm, norm_type, nonfinite, loss_scale, master_weights, sync, accumulate_in_fp32
            )
            check_can_sync(sync, parameters_as_bucket_view)
            check_can_be_sharded(optimizer_class)
            check_params(params)
            check_known(defaults, optimizer_class, library_options())
            Optimizer.__init__(self, params, {})  # the local optimizer knows the class's own defaults
            table = ParameterTable(self.param_groups)
            agreement.declare("optimizer class", getattr(optimizer_class, "__qualname__", repr(optimizer_class)))
            agreement.declare("parameters_as_bucket_view", parameters_as_bucket_view)
            agreement.declare("overlap_with_ddp", overlap_with_ddp)
            agreement.declare("stage", repr(self._reduction))
            agreement.declare("step options", repr(options))
            agreement.declare_parameters(table)
            binding = Binding(self._comm, table, parameters_as_bucket_view, sync == "forward")
            stepped = SteppedTensors(table, master_weights)
            agreement.declare("max_grad_norm of groups", [group.get("max_grad_norm") for group in self.param_groups])
            self._build = partial(build_inner, optimizer_class, defaults=defaults)
            self.optim = self._build(self.param_groups, stepped.own(binding.owned()))
            check_options(options, self.optim)
            check_epsilon(self.optim, self.optim.param_groups, table, stepped)
        self.defaults = self.optim.defaults
        self._sharded = ShardedStep(self._comm, table, binding, self.optim, self, stepped)
        self._decision = Decision(self._sharded, options)
        self._sharded.local_step.mirror_to_exposed()
        self._sharded.extend(table, binding)
        self._passes = ForwardPasses(_weakly_before(self))
        self._watch_forward()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters, at any time; existing parameters keep their owners. A collective.

        Raises:
            ValueError: if the parameters are already in a group or differ between ranks; RuntimeError if it failed on
                another rank. The optimizer is then unchanged.
        """
        if not hasattr(self, "optim"):  # called by Optimizer.__init__
            super().add_param_group(param_group)
            return
        sharded = self._sharded
        groups_before = len(self.param_groups), len(self.optim.param_groups)
        moving = nullcontext() if self._hook is None else self._hook.late.while_memory_moves()
        try:
            with moving, Agreement(self._comm, "add_param_group") as agreement:
                super().add_param_group(param_group)
                if self._hook is not None and any(param.grad is not None for param in self.param_groups[-1]["params"]):
                    self._hook.check_before_step("add_param_group() of parameters with gradients")
                table = ParameterTable(self.param_groups)
                agreement.declare_parameters(table)
                binding = sharded.binding.extended(table)
                sharded.stepped.extend(table)
                stepped = sharded.stepped.own(binding.owned())
                self.optim.add_param_group(localise_group(self.param_groups[-1], stepped))
                check_epsilon(self.optim, self.optim.param_groups, table, sharded.stepped)
        except Exception:
            sharded.stepped.extend(sharded.table)
            sharded.stepped.own(sharded.binding.owned())
            del self.param_groups[groups_before[0] :], self.optim.param_groups[groups_before[1] :]
            raise
        copy_options(self.optim.param_groups[-1], self.param_groups[-1])
        sharded.order.is_as_built = False
        sharded.extend(table, binding)

    # Overlap

    def _build_hook(
        self, ddp: DistributedDataParallel, wrapped: CommHook | None, *, split: bool, lag: int | None
    ) -> CommHook:
        """See `ddp_zero.shard.hook_with_zero_step`."""
        hook = self._hook
        check_has_no_hook(self._takes_hook, hook is not None, hook is not None and hook.may_be_replaced)
        check_model(ddp, self._sharded)
        if hook is not None:
            hook.detach()
        side = SideStream()
        sums_in_fp32 = self._decision.options.accumulate_in_fp32
        gradients = gradients_of_stage(self._reduction, self._sharded, ddp, wrapped, side, self._passes, sums_in_fp32)
        self._passes.watch([ddp])
        self._decision.watch.is_on = self._decision.options.nonfinite != "step"
        self._hook = OverlapHook(
            self._sharded,
            ddp,
            gradients,
            side,
            split=split,
            lag=lag,
            joinable=self,
            overlaps=self._overlaps,
            why_wait=_weakly(self),
            watch=self._decision.watch,
            passes=self._passes,
        )
        self._hook.machine.user_calls_step = hook is not None and hook.machine.user_calls_step
        self._know_model(ddp)
        return self._hook.on_bucket

    def _know_model(self, ddp: DistributedDataParallel) -> None:
        """Add up norms in the order of this model; register hooks for forward passes that cannot wait by themselves."""
        self._sharded.follow_order_of(ddp)
        if self._decision.options.sync == "forward":
            wait_before_forward(ddp, self._sharded)

    def _build_watch(self, ddp: DistributedDataParallel, wrapped: CommHook | None) -> CommHook:
        """A hook that checks gradients before they are averaged, to name the rank of a non-finite one."""
        return watching(self._decision.watch, ddp.process_group, wrapped)

    @property
    def overlap_status(self) -> OverlapStatus:
        """The status of the plan of the overlapped step; UNINITIALIZED without overlap."""
        return OverlapStatus.UNINITIALIZED if self._hook is None else self._hook.machine.status

    @property
    def overlap_phase(self) -> Phase:
        """Where the current iteration of the overlapped step is; REST without overlap."""
        return Phase.REST if self._hook is None else self._hook.machine.phase

    # Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `torch.distributed.algorithms.Join` runs on ranks that have joined; see `ddp_zero.step.join`."""
        return ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._sharded.table.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks may run out of inputs at different times."""
        return self._comm.process_group

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "ZeroRedundancyOptimizer":
        """A copy over copied parameters, on the same process group; copy model and optimizer together to link them."""
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone._comm = self._comm
        clone.parameters_as_bucket_view = self.parameters_as_bucket_view
        clone._overlaps = self._overlaps
        clone._reduction = self._reduction
        clone._waits_because = self._waits_because
        clone._build = self._build
        clone._hook = None
        clone._passes = ForwardPasses(_weakly_before(clone))
        Joinable.__init__(clone)
        clone.optim = copy.deepcopy(self.optim, memo)
        groups = copy.deepcopy(self.param_groups, memo)
        Optimizer.__setstate__(clone, {"defaults": clone.optim.defaults, "param_groups": groups})
        table = ParameterTable(groups)
        binding = self._sharded.binding.extended(table)
        stepped = SteppedTensors(table, self._sharded.stepped.has_masters)
        for index, master in self._sharded.stepped.masters.items():
            stepped.put(index, copy.deepcopy(master, memo))
        if not self._sharded.stepped.are_fresh:
            stepped.note_versions()
        clone._sharded = ShardedStep(self._comm, table, binding, clone.optim, clone, stepped)
        clone._decision = Decision(clone._sharded, self._decision.options)
        clone._decision.loss_scale = copy.deepcopy(self._decision.loss_scale, memo)
        clone._sharded.order = copy.deepcopy(self._sharded.order, memo)
        clone._sharded.norm_order = self._sharded.norm_order
        clone._sharded.extend(table, binding)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Expected ZeroRedundancyOptimizer not to be pickled, since a rank holds only its shard. Save "
            "consolidate_state_dict() followed by state_dict() instead."
        )

    # Utilities

    def explain(self) -> str:
        """What each rank owns, how balanced it is and what a step sends, as text. Never communicates."""
        flat = "flat storage" if self.parameters_as_bucket_view else "storage of their own"
        mode = "overlapped with DDP" if self._overlaps else "standalone"
        lines = [
            f"ZeroRedundancyOptimizer({type(self.optim).__name__}), stage {self.stage}, {mode}: rank {self.rank} of "
            f"{self.world_size}, parameters in {flat}"
        ]
        if self._hook is not None:
            lines += self._hook.describe()
        plan = self._sharded.binding.plan
        if self._decision.options.sync == "forward":
            where = "in the next forward pass" if self._sharded.leaves_syncs else "at the end of the step: see sync="
            lines.append(f"parameters of others are waited for {where}")
        lines += [describe_shards(plan, self.rank, state_bytes(self.optim.state)), draw_buckets(plan)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        owned = len(self._sharded.binding.owned())
        return (
            f"ZeroRedundancyOptimizer of {type(self.optim).__name__}, rank {self.rank} of {self.world_size}, "
            f"{owned} of {len(self._sharded.table)} parameters owned\n{super().__repr__()}"
        )

    # Properties

    @property
    def stage(self) -> int:
        """1: optimizer state is sharded; 2: gradients too."""
        return 1 if self._reduction is None else 2

    @property
    def rank(self) -> GroupRank:
        """This process's rank in the group."""
        return self._comm.group_rank

    @property
    def global_rank(self) -> GlobalRank:
        """This process's rank in the whole job."""
        return self._comm.global_rank(self._comm.group_rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._comm.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group whose ranks share the optimizer."""
        return self._comm.process_group


def _weakly_before(optimizer: ZeroRedundancyOptimizer) -> BeforeForward:
    """A callback for forward passes that holds the optimizer weakly and does nothing once that is gone."""
    reference = weakref.ref(optimizer)

    def before(ddp: DistributedDataParallel) -> None:
        alive = reference()
        if alive is not None:
            alive._before_forward(ddp)

    return before


def library_options() -> list[str]:
    """The names of this library's own options."""
    names = inspect.signature(ZeroRedundancyOptimizer.__init__).parameters
    return [name for name in names if name not in ("self", "params", "optimizer_class", "defaults")]


def _weakly(optimizer: ZeroRedundancyOptimizer) -> Callable[[], str | None]:
    """`_why_wait` for the optimizer's own hook, without a cycle that only the garbage collector could free."""
    reference = weakref.ref(optimizer)

    def why_wait() -> str | None:
        alive = reference()
        return None if alive is None else alive._why_wait()

    return why_wait
