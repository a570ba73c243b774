"""`ZeroRedundancyOptimizer`: the façade that users hold. Its methods are one call each; `engine.py` takes the steps."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ddp_zero.core.backward import Phase
from ddp_zero.core.ddp import CommHook
from ddp_zero.core.engine import AddedGroup, Engine, attribute_of_inner, build_engine
from ddp_zero.core.local import Cost, ParamGroup
from ddp_zero.core.plan import MAX_BYTE_IMBALANCE, GlobalRank, GroupRank
from ddp_zero.core.state import StateDicts
from ddp_zero.core.step import Shard, StepRecord
from ddp_zero.insight.agreement import check_agreement
from ddp_zero.insight.explain import explain, owner_of
from ddp_zero.insight.stats import Stats
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.options import Nonfinite, Offload, PartitionName, Sync
from ddp_zero.values import the_ddp_model_in


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any `torch.optim.Optimizer`, its state sharded over the ranks of a process group (ZeRO stages 1 and 2).

    Each rank owns some of the parameters, keeps optimizer state for those only, steps them, and sends the result to the
    others; afterwards all ranks hold the same parameters. Gradients must have been averaged before, as
    `DistributedDataParallel` does; in stage 2 a rank keeps averaged gradients only of the parameters that it owns.
    Results match the unsharded optimizer with the same averages bit for bit; `accumulate` documents what is averaged.
    The method follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2019.

    A drop-in for `torch.distributed.optim.ZeroRedundancyOptimizer`. Every rank of the group must construct it, with the
    same parameters in the same order, and must call `step`, `add_param_group` and `consolidate_state_dict` together.
    The same holds for public methods of ``optimizer_class`` that torch's optimizers do not have, such as ``train()``
    and ``eval()`` of schedule-free ones: call them on this optimizer, not on ``optim``, so that their writes are sent.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer. A group may have a class
            of its own as ``optimizer_class``, such as `torch.optim.Muon` beside AdamW, whose options are in the group.
            Or an optimizer that was built already, without a class.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`, or another callable that builds one. Or an
            optimizer over ``params`` that was built already: its class, groups, options and state are taken over. It
            must have the same on every rank, and must not be stepped afterwards.
        process_group: the ranks that share the work; the default group if None.
        shard_group: a subgroup of it that contains this rank, such as the ranks of its node: state, and in stage 2
            gradients, are sharded over these ranks only, and each of the other subgroups holds the same shards. All are
            disjoint, of one size, and cover ``process_group``. In stage 2 a gradient is summed within the subgroup, and
            its owner's part then over the subgroups, so less travels between them; parameters travel within. None:
            shard over all of ``process_group``.
        parameters_as_bucket_view: move the parameters into flat storage, so that a sync copies nothing. ``param.data``
            is re-pointed; references taken to it before are stale. If False, the parameters stay where they are and a
            sync holds copies of up to two buckets (25 MiB each, or one parameter if that is larger).
        overlap_with_ddp: step inside backward, through a DDP communication hook from `hook_with_zero_step`. The
            training loop stays the same: ``step`` then only joins the iteration, and may be left out.
        stage: 1 shards optimizer state; 2 also shards gradients, through a hook from
            ``hook_with_zero_step(None, ...)``, in buckets of the size that DDP was given, else as `ddp_zero.wrap` does.
        grad_comm_dtype: stage 2: dtype in which gradients travel, such as `torch.bfloat16`; they are summed in fp32.
            None: their own dtype.
        gradient_predivide_factor: stage 2: gradients are divided by this before they are summed, and by the rest of
            the number of ranks afterwards. None: by the number of ranks before, as DDP does.
        max_grad_norm: clip the norm of all gradients to this inside the step. A parameter group with a
            ``max_grad_norm`` of its own is clipped by its own norm instead, or not at all if that is None. Norms add up
            in the order of the model's parameters if the model is known (through a hook, or from `shard_optimizer`),
            else of the groups; the order affects the last bits.
        norm_type: order of the p-norm for ``max_grad_norm``; ``inf`` for the largest absolute value.
        nonfinite: the action of a step if any gradient is inf or NaN: ``"skip"`` changes no state and is reported in
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
        partition: ``"parameters"``: each has one owner. ``"elements"``: every bucket is cut into equal parts, wherever
            parameters begin, so that a rank has one Nth of state and messages however large a parameter is; for
            optimizers that step each element by itself (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam,
            RAdam, ASGD, Rprop, and classes declared by `ddp_zero.elementwise`). ``"auto"``, the default of
            `shard_optimizer`: ``"elements"`` for such a class where that shortens steps on this backend and changes no
            bit, else ``"parameters"``; `explain` says which, and why.
        cost: the cost of a parameter's step, by which whole parameters are dealt to ranks. ``"auto"``: known for Muon,
            Shampoo and SOAP, of torch and pytorch_optimizer, see docs/guides/optimizers.md; for other classes only
            bytes count. ``"bytes"``: never more than those. Or a function of a parameter and the options of its group
            that returns a number of at least 0, the same on every rank.
        max_byte_imbalance: with a cost, bytes of the busiest rank over the mean, at most; 1.25 by default. The busiest
            rank of the plan by bytes alone may have more, and is then the limit. `explain` shows both loads per rank.
        offload: where optimizer state, masters and the step are: ``"cpu"``, on the host for parameters on an
            accelerator. None: with the parameters.
        **defaults: options for ``optimizer_class``.

    Attributes:
        optim: the local optimizer, over this rank's parameters: one group per exposed group, in order, empty ones too.
        param_groups: the exposed groups with all parameters. Options set here reach the local optimizer at the next
            step, and options that it adds appear here.
        parameters_as_bucket_view: whether the parameters live in flat storage.

    Raises:
        ValueError: for an empty, repeated or sparse parameter, shared memory, parameters that differ between ranks, or
            other parameters than those of an optimizer that was built already, or
            several dtypes in a group of `torch.optim.Adafactor` with its default ``eps``, the resolution of one dtype.
        TypeError: for arguments of the wrong type, or options that ``optimizer_class`` does not accept.
        NotImplementedError: for LBFGS or SparseAdam, or a class that `check_shardable` refuses.
        RuntimeError: if `torch.distributed` is not initialised, this process is not in the group, or construction
            failed on another rank.
    """

    optim: Optimizer

    def __init__(
        self,
        params: ParamsT | Optimizer,
        optimizer_class: Callable[..., Optimizer] | Optimizer | None = None,
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        stage: int = 1,
        grad_comm_dtype: torch.dtype | None = None,
        gradient_predivide_factor: float | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        nonfinite: Nonfinite | None = None,
        loss_scale: DynamicLossScale | float | None = None,
        master_weights: bool = False,
        sync: Sync = "step",
        accumulate_in_fp32: bool = False,
        partition: PartitionName = "parameters",
        shard_group: ProcessGroup | None = None,
        offload: Offload | Literal["cpu"] | None = None,
        cost: Cost = "auto",
        max_byte_imbalance: float = MAX_BYTE_IMBALANCE,
        **defaults: Any,
    ) -> None:
        engine, self._build, instance = build_engine(
            self,
            list(params) if isinstance(params, Iterator) else params,
            optimizer_class,
            defaults,
            process_group,
            shard_group,
            ZeroRedundancyOptimizer.__init__,
            stage=(stage, grad_comm_dtype, gradient_predivide_factor),
            step=(max_grad_norm, norm_type, nonfinite, loss_scale, master_weights, sync, accumulate_in_fp32, offload),
            overlap_with_ddp=overlap_with_ddp,
            parameters_as_bucket_view=parameters_as_bucket_view,
            partition=partition,
            cost=cost,
            max_byte_imbalance=max_byte_imbalance,
        )
        shard, self.optim = engine.shard, engine.shard.inner
        self.defaults, self.parameters_as_bucket_view = self.optim.defaults, parameters_as_bucket_view
        self._assemble(engine)
        shard.local_step.mirror_to_exposed()
        if instance is not None:
            self._states.adopt(instance)
        self._attachment.find_models()
        self._states.serve_other_ranks()
        if instance is not None and instance is not optimizer_class:  # else the caller does so
            instance.retire(self)

    def _assemble(self, engine: Engine) -> None:
        self._engine, self._attachment, self._gradients = engine, engine.attachment, engine.gradients
        self._states = StateDicts(engine.shard, engine.decision, self._build)
        self._stats = Stats(engine)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters, at any time; existing parameters keep their owners. A collective.

        Args:
            param_group: parameters and options, as for any torch optimizer.

        Raises:
            ValueError: if the parameters are already in a group or differ between ranks; RuntimeError if it failed on
                another rank. The optimizer is then unchanged.
        """
        AddedGroup(self._attachment, param_group).commit()

    # The ranks

    @property
    def rank(self) -> GroupRank:
        """This process's rank in the group."""
        return shard_of(self).everyone.group_rank

    @property
    def global_rank(self) -> GlobalRank:
        """This process's rank in the whole job."""
        comm = self._engine.shard.everyone
        return comm.global_rank(comm.group_rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return shard_of(self).everyone.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group whose ranks share the optimizer."""
        return shard_of(self).everyone.process_group

    @property
    def shard_group(self) -> ProcessGroup:
        """The group over whose ranks state is sharded: ``process_group`` by default."""
        return shard_of(self).comm.process_group

    def owner_of(self, param: Tensor) -> GroupRank:
        """The rank, in ``process_group``, that owns a parameter; with shard groups, in this rank's. Stays local.

        Args:
            param: the parameter.

        Raises:
            ValueError: for a parameter that is not in the optimizer, or that several ranks share.
        """
        return owner_of(self._engine.shard, param)

    # The model

    @property
    def needs_hook(self) -> bool:
        """True if these options need a DDP communication hook that was not built yet; `attach` builds it."""
        return self._attachment.needs_hook

    def attach(
        self,
        model: nn.Module,
        *,
        hook: CommHook | None = None,
        hook_state: Any = None,
        interleaved: bool | None = None,
        shard_buckets: bool | None = None,
    ) -> None:
        """Register on a DDP model what these options need: the hook that steps, reduces or watches, if any.

        `shard_optimizer` does this. Call it where the optimizer was built first, or by other code, such as a framework.
        Only one model can be attached. Errors name parameters as the model does. What is None is as it was for the last
        model, as where the module is wrapped again; for the first one, and after `detach`, the default of
        `shard_optimizer`.

        Args:
            model: the DDP model over the optimizer's parameters, without a communication hook, or a module that holds
                it, such as ``torch.compile(ddp)``.
            hook: see `shard_optimizer`.
            hook_state: see `shard_optimizer`.
            interleaved: see `shard_optimizer`.
            shard_buckets: see `shard_optimizer`.

        Raises:
            TypeError: for a model that neither is nor holds a DDP model.
            ValueError: for several DDP models, or one that has a hook or does not fit; if a hook was built already.
        """
        self._attachment.attach(the_ddp_model_in(model), hook, hook_state, interleaved, shard_buckets)

    def detach(self) -> None:
        """Leave the DDP model: it trains as plain DDP from then on, and another optimizer can be attached.

        Call it before a second optimizer is built over the same model, as for the next fold of a cross-validation,
        where this one still exists. One that was dropped leaves by itself then. It keeps its state, and can be attached
        again. On every rank.

        Raises:
            RuntimeError: before ``opt.step()`` has joined a step taken inside backward, in the middle of a backward
                pass, or in stage 2 if there are gradients, which are on their owners alone.
        """
        self._engine.take_due_step()
        self._attachment.detach()

    # A step

    @_disable_dynamo  # within torch.compile it runs as it is: process groups cannot be traced
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's parameters and receive the others from their owners. A collective.

        ``last_step`` records the outcome.

        Args:
            closure: evaluated once, with gradients enabled, before anything is stepped. An optimizer class that is not
                torch's may take something else here, which is handed to its ``step``.
            **kwargs: handed to the local optimizer's ``step``.

        Returns:
            The closure's result, or the local optimizer's for the last bucket that it stepped.

        Raises:
            NotImplementedError: for a gradient that is not dense, naming the parameter.
            RuntimeError: if gradients are not finite and ``nonfinite="raise"``, on every rank; or if a peer failed or
                the group's time-out passed: parameters may then be half updated.
        """
        with self._engine.label:
            return self._engine.step(closure, kwargs)

    @property
    @_disable_dynamo
    def _step_supports_amp_scaling(self) -> bool:
        """As the plain optimizer's. A `GradScaler` asks in its ``step()``, where all ranks then decide."""
        if not self._engine.steps_by_scaler:
            self._engine.agree_with_scaler()
            return False
        return True

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of all parameters, including those that wait to be added to the next sum.

        A collective once, in a loop without ``step()`` that has not stepped yet: it takes the first step beforehand.

        Args:
            set_to_none: drop gradients; if False, set them to zero.

        Raises:
            RuntimeError: between a backward pass that has stepped and ``opt.step()``, in a loop that calls it: a plain
                loop would drop that update.
        """
        with self._engine.zeroing(set_to_none):
            super().zero_grad(set_to_none)

    def reset(self) -> None:
        """Drop the iteration, after an exception in forward or backward of an overlapped step.

        DDP cannot go on after an exception in the middle of backward: wrap the model again on every rank, then call
        this, ``zero_grad()`` and ``attach(ddp)``. Without ``zero_grad()`` the next pass adds to the gradients that the
        interrupted one has left; where these are not as DDP would have left them, it is refused. An interleaved step,
        the default of stage 2 with overlap, has stepped some buckets by then, which warns here: load a checkpoint.
        """
        self._engine.reset()

    def finish_sync(self) -> None:
        """Wait for all parameters that other ranks have stepped and that ``sync="forward"`` has left in flight.

        Modules wait for their own parameters, and nearly every torch function for its arguments. Call this before other
        code reads or writes parameters: pointers or views kept from before, extensions, methods of a process group,
        functions of `torch.jit.script` and ``trace``, and of torch ``torch.Tensor(param)``, ``torch.tensor(param)``,
        ``torch.as_tensor`` and ``torch.asarray`` into a different dtype, ``tensor.new_tensor(param)``,
        ``tensor.new(param)``, ``torch.autograd.Variable(param)``, ``torch.nested.nested_tensor``,
        ``torch.sparse_coo_tensor``, ``torch.func.grad`` and ``vmap`` of functions of parameters.

        Raises:
            RuntimeError: if a peer failed or the group's time-out passed.
        """
        shard_of(self).pending_syncs.complete()

    # Gradients

    def accumulate(self) -> AbstractContextManager[None]:
        """Within this context backward passes only average gradients; the step is left to a later one.

        In stage 2 a rank keeps only the sums of the gradients that it owns; ``ddp.no_sync()`` keeps gradients of full
        size but sends nothing meanwhile. Without overlap no backward pass steps, in this context or outside.

        Stage 2 averages each pass on its own and adds up the averages, fp16 and bf16 ones in fp32. Stage 1 averages
        what ``param.grad`` holds, in its dtype, as DDP does without ``no_sync()``; with ``accumulate_in_fp32`` it adds
        up averages as stage 2 does. Last bits differ from ``ddp.no_sync()``, which adds up each rank's own gradients
        and averages once; that also works here, and matches DDP bit for bit.

        Raises:
            RuntimeError: under Join, since a rank that has joined would take a step.
        """
        return self._gradients.accumulating()

    @_disable_dynamo
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, between backward and step. A collective in stage 2.

        With overlap it must be called from the first step on; then all steps wait for ``opt.step()``. Norms of fp16
        and bf16 gradients are fp32; norms of scaled gradients are the norms of the unscaled ones.

        Args:
            max_norm: the largest norm.
            norm_type: order of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise if the norm is not finite; if False, clip by it, as torch does.
            parameters: some of the optimizer's parameters, the same on every rank, such as a group's, whose norms
                add up in this order; None: all, in the order documented for ``max_grad_norm``.

        Returns:
            The norm of all gradients before clipping, a scalar, the same on every rank.

        Raises:
            ValueError: for a parameter that is not in the optimizer.
            RuntimeError: if gradients were used by a step inside backward or not averaged; see ``error_if_nonfinite``.
        """
        clipping = self._gradients.clipping(max_norm, norm_type, error_if_nonfinite, parameters)
        return self._engine.run_alone(clipping)

    @_disable_dynamo
    def clip_grad_value_(self, clip_value: float, parameters: Tensor | Iterable[Tensor] | None = None) -> None:
        """As `torch.nn.utils.clip_grad_value_`, between backward and step: every element to at most ``clip_value``.

        As with `clip_grad_norm_`, it must be called from the first step on. With ``loss_scale=`` the limit is that of
        unscaled gradients, and elements that are not finite stay as they are.

        Args:
            clip_value: the largest absolute value.
            parameters: some of the optimizer's parameters; None: all.

        Raises:
            ValueError: for a parameter that is not in the optimizer.
            RuntimeError: if gradients were used by a step inside backward; in stage 2 under Join.
        """
        self._gradients.clip_grad_value(clip_value, parameters)

    @_disable_dynamo
    def owned_gradients(self) -> Mapping[Tensor, Tensor]:
        """The averaged gradients that this rank steps, by parameter, to read and to change in place before the step.

        Each is the tensor that the step uses: of the parameter's shape, or 1-D of this rank's part of one that is cut;
        fp32 where a master is stepped by a sum in fp32; times the loss scale, before ``max_grad_norm``. Call it on
        every rank, as `clip_grad_norm_` from the first step on, and again after each backward pass. Owners in different
        shard groups must make the same changes.

        Raises:
            RuntimeError: if gradients were used by a step inside backward or not averaged; under Join. In stage 1 a
                later step raises if other code, or a backward pass, has changed gradients in between.
        """
        return self._gradients.owned_gradients()

    @_disable_dynamo
    def full_grad(self, param: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter, on every rank. A collective in stage 2.

        Args:
            param: one of the optimizer's parameters, the same on every rank.

        Returns:
            A new tensor in the parameter's shape and dtype; None if the parameter has no gradient.

        Raises:
            ValueError: if the parameter is not in the optimizer.
            RuntimeError: if the step inside backward has used the gradient up, or if no reduction has averaged it.
        """
        return self._gradients.full_grad(param)

    # Loss scale and masters

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, to call ``backward()`` on; the step divides the scale out again.

        Args:
            loss: result of the forward pass.

        Raises:
            RuntimeError: without ``loss_scale=``.
        """
        if self.loss_scale is None:
            raise RuntimeError(
                "This optimizer has no loss scale. Call loss.backward() alone, or build it with "
                "loss_scale=DynamicLossScale(). [ZERO-121]"
            )
        return loss * self.loss_scale

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without ``loss_scale=``."""
        scale = self._engine.decision.loss_scale
        return None if scale is None else scale.value

    @property
    def master_weights(self) -> dict[Tensor, Tensor]:
        """The fp32 masters of parameters that this rank owns, by parameter; empty without ``master_weights=True``."""
        return self._engine.shard.master_weights()

    def refresh_master_weights(self) -> None:
        """Copy the model's parameters to the masters, after writing to the model, on every rank. Never communicates.

        Raises:
            RuntimeError: without ``master_weights=True``; between a backward pass that has stepped and ``opt.step()``.
        """
        self._attachment.check_before_step("opt.refresh_master_weights()")
        self._engine.shard.refresh_masters()

    # Where state is

    def offload_state(self, to: Offload | str = "cpu") -> None:
        """Move state and masters away until `reload_state`, between phases of a program. Never communicates.

        State dicts and checkpoints work meanwhile; steps raise.

        Args:
            to: ``"cpu"``, the host's memory.

        Raises:
            RuntimeError: if state is away already, or between a backward pass that has stepped and ``opt.step()``.
                Nothing is changed then.
        """
        self._attachment.check_before_step("opt.offload_state()")
        self._states.offload(to)

    def reload_state(self) -> None:
        """Move state and masters back to where they are stepped. Never communicates.

        Raises:
            RuntimeError: without `offload_state` before.
        """
        self._states.reload()

    # State dicts

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Any, Any]:
        """Per-parameter state of this rank's shard, keyed by parameter: the state of the local optimizer.

        Master weights are in ``master_weights``. Of a parameter that is cut, a state that is set in the parameter's
        shape becomes that of this rank's elements, which is 1-D.
        """
        return self._states.state()

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        self._states.replace_state(self.state, state)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, whose `state_dict` then returns it until the next step. A collective.

        `state_dict` works without. This keeps what it gathers, so that later calls of `state_dict` ask nobody.

        Args:
            to: rank in ``process_group`` that receives. It holds the whole state afterwards, on the devices where the
                unsharded optimizer would; the other ranks send one parameter's state at a time. After one call for each
                rank, all hold it, as `torch.distributed.checkpoint.state_dict` expects.

        Raises:
            ValueError: if ``to`` is not a rank of the group or differs between ranks.
            TypeError: if a state cannot travel without pickle, naming the parameter; RuntimeError on other ranks.
        """
        self._attachment.check_may_save("opt.consolidate_state_dict()")
        self._states.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state dict, on any ranks at any time between two steps; not a collective.

        The other ranks are asked for their shards and answer from a thread, also while they wait for this rank in their
        next backward pass. The result holds copies, needs as much memory, and is the same on every rank that asks.
        After `consolidate_state_dict` to this rank, and before the first step, nothing is sent.

        Raises:
            RuntimeError: within the group's time-out, naming the rank, if one was killed, ended with an exception, took
                a step without this rank, or does not end its step; in a step of this rank; on a copy.
            TypeError: if a state cannot travel without pickle, naming the parameter.
        """
        self._attachment.check_may_save("opt.state_dict()")
        return self._states.state_dict(super().state_dict, self._attachment.others_may_step)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Load the unsharded optimizer's state dict; this rank keeps the state of its shard. A collective.

        Args:
            state_dict: from the plain optimizer, from torch's ZeroRedundancyOptimizer or from this one, at any number
                of ranks. Either every rank gives the same, or one rank gives it and all others None: they receive what
                they own, one parameter at a time, without pickle. It is not modified, and later steps do not change
                its tensors. Under `Join` every rank that still trains gives it, and nothing is communicated.

        Raises:
            ValueError: if it does not fit, naming the group or the parameter and why, or if some ranks, but not all,
                give one; TypeError if it cannot travel. Nothing is changed then, on any rank.
            RuntimeError: between a backward pass that has stepped and ``opt.step()``; if it failed on another rank.
        """
        check = partial(self._attachment.check_before_step, "opt.load_state_dict()")
        self._states.load_state_dict(self, state_dict, check, may_communicate=not self._attachment.in_join)

    def sharded_state_dict(self, model: nn.Module | None = None, *, init_missing: bool = False) -> dict[str, Any]:
        """This rank's part of the state, by fully qualified name, for direct use of `torch.distributed.checkpoint`.

        Ranks have different keys, which `torch.distributed.checkpoint.save` joins. Never communicates.
        `ddp_zero.checkpoint` does all of it, and loads without unpickling.

        Args:
            model: whose names to use; may be left out if the optimizer was built from named parameters.
            init_missing: add zeros for states that do not exist yet, as before the first step, so that
                `torch.distributed.checkpoint.load` has tensors to read into.

        Returns:
            ``{"state": {name: state}, "param_groups": [...]}``; tensors are the optimizer's own, masters included.

        Raises:
            ValueError: if a parameter has no name.
        """
        self._attachment.check_may_save("opt.sharded_state_dict()")
        return self._states.sharded_state_dict(model, init_missing)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Load what `sharded_state_dict` returned, for this rank's parameters at least. Never communicates.

        Args:
            state_dict: as read by `torch.distributed.checkpoint.load`; it is copied.
            model: as for ``sharded_state_dict``; load its parameters before.

        Raises:
            ValueError: if it does not fit, naming the parameter; nothing is changed then.
        """
        self._attachment.check_before_step("opt.load_sharded_state_dict()")
        self._states.load_sharded_state_dict(self, state_dict, model)

    # Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that `torch.distributed.algorithms.Join` runs on ranks that have joined.

        Args:
            **kwargs: arguments that `Join` passes to all hooks.

        Raises:
            NotImplementedError: with a shard group, or for ``divide_by_initial_world_size=False`` where DDP has a
                communication hook.
        """
        return self._engine.join_hook(kwargs)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return shard_of(self).table.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks may run out of inputs at different times."""
        return self.process_group

    # Reports

    @property
    def stage(self) -> int:
        """1: optimizer state is sharded; 2: gradients too."""
        return self._attachment.stage

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, the same on every rank; None before the first."""
        return self._engine.runner.last_step

    @property
    def overlap_phase(self) -> Phase:
        """Phase of the current iteration of the overlapped step; REST without overlap."""
        hook = self._attachment.hook
        return Phase.REST if hook is None else hook.machine.phase

    def stats(self) -> dict[str, float]:
        """Times, bytes and memory of the last step and of all steps so far, as a flat dict of numbers.

        Recording is always on. Reading neither communicates nor waits for a device: on an accelerator, seconds are of
        the last step whose work the device has finished. docs/insight.md describes every number.

        Returns:
            Seconds by phase (names end in ``_s``), bytes (in ``_bytes``), and counts. ``total_`` is since construction,
            ``peak_`` the maximum so far, the rest of the last step or current. The same keys at every call; an unknown
            number is NaN.
        """
        return self._stats.read()

    def explain(self) -> str:
        """Ownership, balance and messages of a step, as text. Never communicates."""
        return explain(self._engine, self.parameters_as_bucket_view)

    def check_agreement(self) -> None:
        """Check that all ranks hold the same parameters, bit for bit. A collective: eight bytes per parameter and rank.

        Raises:
            RuntimeError: on every rank, naming the parameters and the ranks that differ from most ranks; under Join.
        """
        check_agreement(self._engine)

    @property
    def _all_params(self) -> list[Tensor]:
        """All parameters, under the name that torch's own class has for them."""
        return list(shard_of(self).table.params)

    def __repr__(self) -> str:
        shard = self._engine.shard
        owned = len(shard.binding.owned())
        rank = f"rank {self.rank} of {self.world_size}"
        return (
            f"{type(self).__name__} of {type(shard.inner).__name__}, {rank}, "
            f"{owned} of {len(shard.table)} parameters owned\n{super().__repr__()}"
        )

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "ZeroRedundancyOptimizer":
        """A copy over copied parameters, on the same process group; copy model and optimizer together to link them."""
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        shard = self._engine.shard
        clone.parameters_as_bucket_view = self.parameters_as_bucket_view
        clone._build = self._build
        Joinable.__init__(clone)
        clone.optim = copy.deepcopy(self.optim, memo)
        groups = copy.deepcopy(self.param_groups, memo)
        Optimizer.__setstate__(clone, {"defaults": clone.optim.defaults, "param_groups": groups})
        clone._assemble(self._engine.copy_for(clone, shard.copy_for(clone, clone.optim, memo), memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "A ZeroRedundancyOptimizer cannot be pickled: a rank holds only its shard. Save state_dict() instead. "
            "[ZERO-120]"
        )

    if not TYPE_CHECKING:  # so that a misspelt name is still an error

        def __getattr__(self, name: str) -> Any:
            """A public attribute of the inner optimizer that is not defined here; methods become collectives."""
            return attribute_of_inner(self, name)


def engine_of(optimizer: ZeroRedundancyOptimizer) -> Engine:
    """The engine of an optimizer: the door for packages that build on it."""
    return optimizer._engine


def shard_of(optimizer: ZeroRedundancyOptimizer) -> Shard:
    """The shard of an optimizer: the door for packages that read or move sharded state."""
    return optimizer._engine.shard


def states_of(optimizer: ZeroRedundancyOptimizer) -> StateDicts:
    """The state of an optimizer as dictionaries: the door for packages that save and load it by parts."""
    return optimizer._states
