"""What ties an optimizer to the DDP models over its parameters: the hook, the reducer, the passes that are watched."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.hook import OverlapHook, in_join_of
from ddp_zero.core.backward.overlap_machine import INTERLEAVED_LAG
from ddp_zero.core.backward.partitioned import gradients_of_stage
from ddp_zero.core.backward.planned_reducer import PlannedReducer, stand_in_of
from ddp_zero.core.backward.scratch_bucket import ReduceOptions
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.tracing import warn
from ddp_zero.core.ddp.forward_passes import BeforeForward, ForwardPasses
from ddp_zero.core.ddp.preconditions import check_has_no_hook, check_is_free, check_keeps_parameters, check_model
from ddp_zero.core.ddp.reducer import add_hook, gradients_are_views, watch_shadows_under_join
from ddp_zero.core.ddp.registered_hook import (
    CommHook,
    Holder,
    HookOptions,
    RegisteredHook,
    check_averages,
    free_place,
    has_hook,
    held_hooks,
    register,
    watching,
)
from ddp_zero.core.local.inner import is_elementwise
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.before_forward import wait_before_forward
from ddp_zero.core.step.decision import Decision
from ddp_zero.core.step.runner import StepRunner

CHANGED = "the loop changes gradients, options or parameters between backward and opt.step()"
_DROPPED = "the loop drops gradients after backward instead of calling opt.step()"


class Attachment:
    """Attaches an optimizer to models, and lets it leave them; knows whether their passes step, or why not.

    Args:
        optimizer: the user's optimizer, on which `Join` sets whether it is active.
        overlaps: whether the user asked for steps inside backward.
        reduction: how gradients travel in stage 2; None in stage 1.
        before_forward: called before each forward pass of the models with gradients.

    Attributes:
        hook: the communication hook; None until it is built.
        passes: the forward passes of the DDP models over the parameters.
        stage: 1: optimizer state is sharded; 2: gradients too, each on its owners alone.
        takes_hook: whether the options need a hook: for steps inside backward, or since gradients are reduced, or
            added up, otherwise than by DDP.
        waits_because: the reason, found while training, why all steps wait for ``opt.step()``, or None.
    """

    def __init__(
        self,
        optimizer: Joinable,
        runner: StepRunner,
        decision: Decision,
        overlaps: bool,
        reduction: ReduceOptions | None,
        before_forward: BeforeForward,
    ) -> None:
        self.shard, self._runner, self._decision = runner.shard, runner, decision
        self._optimizer = weakref.ref(optimizer)
        self.overlaps, self.reduction = overlaps, reduction
        self.stage = 1 if reduction is None else 2
        self._reduces_by_hook = self.stage == 2 or decision.options.accumulate_in_fp32
        self.takes_hook = overlaps or self._reduces_by_hook
        self.waits_because: str | None = None
        self._is_first_step = True
        self.hook: OverlapHook | None = None
        self._registered: RegisteredHook | None = None  # on the model that was attached
        self._hook_options = HookOptions()  # of the last hook
        self.passes = ForwardPasses(before_forward)
        self.passes.checks.append(decision.owned_edits.forget_dropped)

    # To a model, and off it

    def hook_by_hand(
        self, ddp: DistributedDataParallel, wrapped: CommHook | None, split: bool, interleaved: bool
    ) -> RegisteredHook:
        """A hook for the user to register; ValueError if DDP would refuse it for an earlier optimizer's hook."""
        if isinstance(ddp, DistributedDataParallel) and free_place(ddp) is not None:  # `check_model` names others
            raise ValueError(
                "This DDP model has the communication hook of an optimizer that has left, and DDP registers one only. "
                "Call opt.attach(ddp, hook=...) instead, which takes the place of that hook; or wrap the module again. "
                "[ZERO-206]"
            )
        registered = self._build_hook(ddp, wrapped, split, interleaved, by_hand=True)
        self._hook_options = HookOptions(wrapped, None, interleaved, split)
        return self._keep_registered(ddp, registered)

    def attach(
        self, ddp: DistributedDataParallel, hook: CommHook | None, state: Any, lags: bool | None, split: bool | None
    ) -> None:
        options = HookOptions(hook, state, lags, split).after(self._hook_options)
        hook, state = options.hook, options.state
        takes_any = self.takes_hook or hook is not None or self._decision.watch.is_on  # otherwise DDP reduces by itself
        self._take_over(ddp, takes_any)
        is_further = self._shares_model(ddp)
        if hook is not None:
            check_averages(hook)
            hook = RegisteredHook(hook, ddp.process_group if state is None else state)
        self.shard.table.learn_names(ddp.named_parameters())
        if self.takes_hook:
            lag = self.stage == 2 if options.interleaved is None else options.interleaved
            registered = self._build_hook(ddp, hook, options.shard_buckets is not False, interleaved=lag)
        else:
            check_keeps_parameters(ddp, self._decision.why_wait())
            self.adopt_model(ddp)
            self.passes.watch([ddp])  # not an earlier DDP model of the module, which may still be alive
            self._check_hooks()
            watched = watching(self._decision.watch, ddp.process_group, hook)
            holder = Holder(self.joinable, bool, bool)
            registered = RegisteredHook(watched, holder=holder, averages=takes_any and hook is None)
        if is_further:
            add_hook(ddp, registered)
        elif takes_any:
            registered = register(ddp, registered)
        self._keep_registered(ddp, registered)
        self._hook_options = options
        self.install_reducer()

    def _take_over(self, ddp: DistributedDataParallel, takes_hook: bool) -> None:
        """Have dropped optimizers leave the model; check that no other is in the way. A collective if there are any.

        Args:
            ddp: the model.
            takes_hook: whether this optimizer registers a hook.

        Raises:
            ValueError: on every rank, naming the optimizer in the way.
        """
        held = [(hook, hook.holder) for hook in held_hooks(ddp)]
        if held:
            gc.collect()  # or ranks would differ in which optimizers are garbage
        with Agreement(self.shard.everyone, "attaching an optimizer") if held else nullcontext():
            for hook, holder in held:
                if holder is not None and holder.is_gone:
                    holder.leave()
                    hook.free(ddp.process_group)
            shares = not takes_hook or self._shares_model(ddp)
            check_is_free(ddp, set(self.shard.table.params) if shares else None)

    def _shares_model(self, ddp: DistributedDataParallel) -> bool:
        """True if other optimizers reduce this model already, and this optimizer can do so beside them."""
        return self.stage == 2 and stand_in_of(ddp) is not None

    def _build_hook(
        self,
        ddp: DistributedDataParallel,
        wrapped: CommHook | None,
        split: bool,
        interleaved: bool,
        by_hand: bool = False,
    ) -> RegisteredHook:
        earlier, shard, decision = self.hook, self.shard, self._decision
        check_has_no_hook(self.takes_hook, earlier is not None, earlier is not None and earlier.may_be_replaced)
        check_model(ddp, shard)
        if wrapped is not None:
            check_averages(wrapped)
        if earlier is not None:
            earlier.detach()
        if self._registered is not None:  # on a model that was wrapped before
            self._registered.free(ddp.process_group)
        side = SideStream()
        sums_in_fp32 = decision.options.accumulate_in_fp32
        in_join = in_join_of(self.joinable)
        gradients = gradients_of_stage(
            self.reduction, shard, ddp, split, wrapped, side, self.passes, in_join, sums_in_fp32
        )
        self.passes.watch([ddp])
        lends_from_buckets = gradients.shares_memory or not gradients_are_views(ddp)
        self._runner.aligns_gradients = lends_from_buckets and not is_elementwise(shard.inner)
        decision.watch.is_on = decision.options.nonfinite != "step"
        self.hook = OverlapHook(
            self._runner,
            ddp,
            gradients,
            side,
            lag=INTERLEAVED_LAG if interleaved else None,
            joinable=self.joinable,
            overlaps=self.overlaps,
            why_wait=weakly(self.why_wait),
            watch=decision.watch,
            passes=self.passes,
        )
        self.hook.machine.user_calls_step = earlier is not None and earlier.machine.user_calls_step
        self.hook.late_changes.is_hooked_by_hand = by_hand and not self._reduces_by_hook
        self.adopt_model(ddp)
        holder = Holder(self.joinable, self.hook.leave, self.hook.leave_dropped, self.hook.interrupted)
        return RegisteredHook(self.hook.on_bucket, holder=holder, averages=wrapped is None)

    def _keep_registered(self, ddp: DistributedDataParallel, registered: RegisteredHook) -> RegisteredHook:
        self._registered = registered
        registered.watch(ddp)
        self.passes.leave_if_dropped = weakly(registered.leave_if_dropped)
        return registered

    def detach(self) -> None:
        """Leave the model, which trains as plain DDP from then on; no step may be due."""
        if self.hook is not None:
            self.hook.machine.check_confirmed("opt.detach()")
            self.hook.leave()
        if self._registered is not None:
            self._registered.free(self.shard.everyone.process_group)
        self.passes.stop()
        self.hook = self._registered = None
        self._hook_options = HookOptions()  # the next model starts afresh; the user's state may hold a process group

    def install_reducer(self) -> None:
        """Once the hook is registered: replace DDP's reducer, if the optimizer reduces by itself."""
        source = None if self.hook is None else self.hook.gradients.source
        if isinstance(source, PlannedReducer):
            source.install()

    def adopt_model(self, ddp: DistributedDataParallel) -> None:
        """Add up norms in the order of this model's parameters; register hooks that wait before forward passes."""
        self.shard.table.order_norms_as(ddp)
        if self._decision.options.sync == "forward":
            wait_before_forward(ddp, self.shard)

    def find_models(self) -> bool:
        """Watch the DDP models over these parameters. Returns True if an unknown model was found."""
        shard = self.shard
        if shard.everyone.world_size == 1 or not self.passes.find_models(shard.table.params):
            return False
        self._check_hooks()
        return True

    def find_models_of_step(self) -> None:
        """As `find_models`; in the first step learn how many there are, and check their own hooks again."""
        found = self.find_models()
        if self._is_first_step:  # the same on every rank, unlike when a model is found again
            self._is_first_step = False
            self.passes.models.learn_count(self.shard.table.params)
            self._check_hooks()
            if found:  # their last passes were not seen, and are assumed to be local
                self.passes.last_is_local = self.passes.has_seen = True

    def _check_hooks(self) -> None:
        """Check that the models' own hooks, if this optimizer has none there, average gradients."""
        if not self.takes_hook:
            for hook in self.passes.models.hooks:
                check_averages(hook)

    def watch_shadows(self) -> Callable[[], object]:
        """Under Join: finish a backward pass right after DDP has shadowed it. Returns a function that ends this."""
        undo = ExitStack()
        if self.hook is not None:
            for ddp in self.passes.models.alive:
                undo.callback(watch_shadows_under_join(ddp))
        undo.callback(self.passes.models.note_join_ended)
        return undo.close

    # Around a step

    def check_pass(self, ddp: DistributedDataParallel) -> None:
        """Before a forward pass: RuntimeError if its gradients will not be reduced, or the hook cannot run."""
        if self.passes.models.in_join(ddp) and not self.in_join:
            where = self.shard.comm.name(self.shard.comm.group_rank)
            raise RuntimeError(
                f"Expected Join to list the optimizer, too, got its DDP model without it ({where}): ranks that still "
                "train would wait for one that has run out of inputs. Use Join([ddp, opt]), also in place of "
                "ddp.join(). [ZERO-312]"
            )
        hook = self.required_hook()
        if hook is None:
            return
        if not has_hook(ddp):
            raise RuntimeError(
                "The DDP model does not have the optimizer's communication hook. Call ddp.register_comm_hook(None, "
                "hook) with the hook that hook_with_zero_step(...) has returned; if the module was wrapped again, "
                "opt.reset() and opt.attach(ddp). [ZERO-203]"
            )
        hook.check_can_run(ddp)
        # raised in backward, it would leave DDP in the middle of a pass, which it cannot run again
        self.shard.table.check_sizes(self.shard.param_groups)

    def others_may_step(self) -> bool:
        """True if there are gradients with which other ranks may step without this rank."""
        waits = self.hook is None or self.hook.machine.is_waiting
        return waits and self.shard.table.has_gradients() and not self.in_join

    def check_before_step(self, what: str) -> None:
        """RuntimeError if backward has taken a step that ``opt.step()`` must join before the user's call."""
        if self.hook is not None:
            self.hook.machine.check_before_step(what)

    def check_may_save(self, what: str) -> None:
        """RuntimeError if, in a loop that calls it, ``opt.step()`` has not joined a step inside backward yet."""
        if self.hook is not None:
            self.hook.machine.check_may_save(what)

    def learn_from_first_step(self, hook: OverlapHook, by_scaler: bool) -> None:
        """At the first ``step()``: make all steps wait for it if any rank's loop changes anything after backward."""
        changed = hook.late_changes.first_change()
        dropped = hook.has_dropped
        statement = [int(by_scaler or changed is not None), int(dropped)]
        changes, drops = (any(column) for column in zip(*self.shard.everyone.all_gather_ints(statement), strict=True))
        if self.why_wait() is None and (changes or drops):
            self.waits_because = CHANGED if changes else _DROPPED
            if not by_scaler:
                seen = f": {changed}" if changed is not None else ""
                warn(
                    f"Every step waits for opt.step() from now on, because {self.waits_because}{seen}. State it, and "
                    "this warning goes: clip with opt.clip_grad_norm_() or max_grad_norm=, or build the optimizer with "
                    "overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-324]"
                )

    # Questions

    @property
    def joinable(self) -> Joinable:
        """The optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer holds its engine"
        return optimizer

    @property
    def in_join(self) -> bool:
        """True if ranks may have run out of inputs."""
        return bool(self.joinable._join_config.enable)

    @property
    def needs_hook(self) -> bool:
        return self.takes_hook and (self.hook is None or self.hook.may_be_replaced)

    def required_hook(self) -> OverlapHook | None:
        """The hook, None if the options need none; RuntimeError if it was not built."""
        if self.takes_hook and self.hook is None:
            raise RuntimeError(
                "This optimizer has no communication hook, which overlap_with_ddp=True, stage=2 and "
                "accumulate_in_fp32=True need. Call opt.attach(ddp), or build a hook with hook_with_zero_step(None, "
                "ddp, opt) and register it with ddp.register_comm_hook(None, hook). [ZERO-203]"
            )
        return self.hook

    def why_wait(self) -> str | None:
        """Why backward passes only reduce and ``opt.step()`` takes the step, or None."""
        if not self.overlaps:
            return "overlap_with_ddp=False"
        return self.waits_because or self._decision.why_wait()
