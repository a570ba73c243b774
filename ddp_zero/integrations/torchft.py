"""`prepare`: a sharded optimizer in torchft's replica groups, in stage 1 or 2, whose shards heal a group that returns.

    manager = build_manager(pg=ProcessGroupGloo(), min_replica_size=1, init_sync=False)
    opt = prepare(manager, ddp, AdamW, stage=2, lr=3e-4)

    opt.zero_grad()  # begins torchft's quorum
    ddp(inputs).backward()
    opt.step()  # averages over the groups; steps if the manager commits

A *replica group* is a job of its own, started by torchrun, with a DDP model over its ranks; a *lighthouse* knows all
groups. State is sharded over the ranks of one group, and each group holds a copy of all shards. A step:

1. backward reduces gradients within the group: in stage 2 to their owners, which is where they are needed;
2. each owner averages its gradients with the same rank of the other groups, through the manager, so a rank sends one
   Nth of the gradients between groups;
3. the manager decides. Each rank of a group that has just returned takes over the model and the shard of the same rank
   of a healthy group;
4. all ranks step, with the decisions of the library (clipping, ``nonfinite=``, a loss scale), which are alike in all
   groups because their averages are; or the gradients are dropped, and nothing else has changed.

The same rank of every group owns the same parameters: owners follow from the model alone.

Not chosen: averaging whole buckets on every rank, as torchft's own DDP does (N times the bytes between groups, and the
quorum would have to be known in the first bucket); a map of owners sent with the state (with an asynchronous quorum a
group averages before it takes over state).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchft import Manager
from torchft.optim import OptimizerWrapper

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.comm import Communicator
from ddp_zero.optimizer import engine_of, shard_of
from ddp_zero.values import the_ddp_model_in

_WAITS = "torchft's manager decides in opt.step() whether the step is taken"
_REFUSED = "torchft's manager has not committed the step"
_KEY = "ddp_zero"
_LARGE_BYTES, _BUFFER_BYTES = 1 << 20, 25 << 20


class ManagedOptimizer(OptimizerWrapper):
    """torchft's wrapper of a sharded optimizer: averages over replica groups, and steps if the manager commits.

    Attributes of the sharded optimizer, which is ``optim``, are available here as well. ``last_step`` tells whether the
    manager has committed.

    Args:
        manager: of this rank's replica group.
        model: the group's DDP model, or a module that holds it.
        optimizer: sharded over the ranks of the group, with ``partition="parameters"``.
            Its steps wait for `step` from now on.

    Raises:
        TypeError: for an optimizer that is not a `ddp_zero.ZeroRedundancyOptimizer`.
        ValueError: for one that cuts parameters.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves the decision to `step`, which refuses

    def __init__(self, manager: Manager, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
        _check(optimizer)
        super().__init__(manager, optimizer)
        self._engine, self._shard, self._model = engine_of(optimizer), shard_of(optimizer), model
        self._engine.attachment.waits_because = _WAITS
        self._averaging = self._shard.trace.label("average_groups")
        self._has_quorum = self._is_averaged = self._has_loaded = False
        manager.register_state_dict_fn(_KEY, self._load, self._state)

    @property
    def optimizer(self) -> ZeroRedundancyOptimizer:
        """The sharded optimizer, for `ddp_zero.checkpoint`."""
        optimizer: ZeroRedundancyOptimizer = self.optim
        return optimizer

    # A step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients and begin the quorum of the next step; call it before each step's first forward pass.

        Args:
            set_to_none: see `ddp_zero.ZeroRedundancyOptimizer.zero_grad`.
        """
        self.optim.finish_sync()  # the manager's thread may read all parameters
        self.optim.zero_grad(set_to_none)
        self._is_averaged = False
        may_move = self._memory_may_move()
        self.manager.start_quorum()
        self._has_quorum = True
        if may_move:
            # the manager's thread reads parameters for a group that returns: not while backward moves them
            self.manager.wait_quorum()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the groups, let the manager decide, and step or drop them. A collective.

        Args:
            closure: evaluated once, with gradients enabled, before all else; it may call `zero_grad` itself.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: without a `zero_grad` before; from a `torch.amp.GradScaler`; if only some ranks of the group
                could take over the state of a healthy group, or as `ddp_zero.ZeroRedundancyOptimizer.step`.
        """
        self._check_has_no_scaler()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.average_gradients()
        self._has_quorum = self._is_averaged = False
        # loads the state of a healthy group first, if this group returns: after the gradients, which are averages by
        # now, and before the step
        commits = self.manager.should_commit()
        self._count_one_load()
        if commits:
            self.optim.step()
        else:
            self._engine.refuse_step(_REFUSED)
            self._check_group_is_alike()
        return result

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average this rank's owned gradients with those of the same rank of the other groups, once in a step.

        A collective, also of the other groups. `step` and the methods that read or change gradients do it. A parameter
        that some groups have not used counts as zeros there; one that none has used keeps no gradient. After an error
        the manager commits no step, and gradients are of no use.

        Raises:
            RuntimeError: without a `zero_grad` before; if gradients were not averaged within the group.
        """
        if not self._has_quorum:
            raise RuntimeError(
                "Expected opt.zero_grad() before the forward pass of each step, which begins torchft's quorum, got a "
                "step without one. [ZERO-915]"
            )
        if self._is_averaged:
            return
        with self._averaging:
            self._average()
        self._is_averaged = True

    def _average(self) -> None:
        optim, shard = self.optim, self._shard
        owned = shard.binding.owned()
        params = shard.table.params
        grads = optim.owned_gradients()
        if not owned:
            return
        # first of all, and of a size that never differs between groups: all average the same gradients, whatever they
        # have used
        used = torch.tensor([float(params[index] in grads) for index in owned], device=params[owned[0]].device)
        self.manager.allreduce(used).wait()
        if self.manager.errored():
            return
        found = [index for index, flag in zip(owned, used.tolist(), strict=True) if flag]
        for index in found:
            if params[index] not in grads:
                params[index].grad = torch.zeros_like(params[index])
        grads = optim.owned_gradients()
        self._average_in_place([grads[params[index]] for index in found])

    def _average_in_place(self, grads: list[Tensor]) -> None:
        # messages follow from shapes and dtypes alone, which are those of all groups
        batches = [(batch, _flat(batch)) for batch in _batches(grads)]
        works = [self.manager.allreduce(flat) for _, flat in batches]
        for work in works:
            work.wait()
        if self.manager.errored():
            return
        for batch, flat in batches:
            parts = flat.split([grad.numel() for grad in batch])
            for grad, part in zip(batch, parts, strict=True):
                if grad.data_ptr() != part.data_ptr():
                    grad.copy_(part.view(grad.shape))

    # Gradients between backward and the step

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `ddp_zero.ZeroRedundancyOptimizer.clip_grad_norm_`, of the average over the groups."""
        self.average_gradients()
        norm: Tensor = self.optim.clip_grad_norm_(*args, **kwargs)
        return norm

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp_zero.ZeroRedundancyOptimizer.clip_grad_value_`, of the average over the groups."""
        self.average_gradients()
        self.optim.clip_grad_value_(*args, **kwargs)

    def owned_gradients(self) -> Mapping[Tensor, Tensor]:
        """As `ddp_zero.ZeroRedundancyOptimizer.owned_gradients`, averaged over the groups."""
        self.average_gradients()
        return self.optimizer.owned_gradients()

    def full_grad(self, param: Tensor) -> Tensor | None:
        """As `ddp_zero.ZeroRedundancyOptimizer.full_grad`, averaged over the groups."""
        self.average_gradients()
        return self.optimizer.full_grad(param)

    # The state of a group that returns

    def _state(self) -> dict[str, Any]:
        """The state that this rank gives the same rank of a group that returns; called on a thread of the manager's."""
        shard = self._shard
        shard.changes.wait_for_work()
        return {
            "owners": list(map(int, shard.binding.owners)),
            "model": self._module.state_dict(),
            "optimizer": self.optim.sharded_state_dict(self._model),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over what the same rank of a healthy group has given. Never communicates."""
        shard = self._shard
        mine = list(map(int, shard.binding.owners))
        if state["owners"] != mine:
            where = shard.comm.name(shard.comm.group_rank)
            raise ValueError(
                f"Expected the same owners of all parameters in every replica group, got {state['owners']} in a "
                f"healthy one and {mine} here ({where}). Run the same model, in the same number of ranks, in every "
                "group. [ZERO-915]"
            )
        self._module.load_state_dict(state["model"])
        self.optim.load_sharded_state_dict(state["optimizer"], self._model)
        self._has_loaded = True

    def _count_one_load(self) -> None:
        """Count a change of state on ranks that have loaded none, see `StateChanges`.

        With ``init_sync`` the first step takes each rank's state from a different group, and one rank keeps its own.
        """
        if not self._has_loaded:
            with self._shard.changing_state():
                pass
        self._has_loaded = False

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = the_ddp_model_in(self._model).module
        return module

    def _memory_may_move(self) -> bool:
        """True if the next backward pass may move parameters into flat storage: until the order of buckets is known."""
        hook, binding = self._engine.attachment.hook, self._shard.binding
        return not binding.is_current or (hook is not None and not hook.gradients.plan.knows_order)

    # Checks

    def _check_has_no_scaler(self) -> None:
        marks = [self.__dict__.pop(name, None) for name in ("found_inf", "grad_scale")]  # left by a GradScaler
        if marks[0] is not None:
            raise RuntimeError(
                "A torch.amp.GradScaler looks at the gradients of its own replica group, so groups would decide "
                "differently. Build the optimizer with loss_scale=, and call opt.scale(loss).backward(). [ZERO-915]"
            )

    def _check_group_is_alike(self) -> None:
        """After a step that was not committed: check that all ranks of the group, or none, took over a state."""
        everyone = self._shard.everyone
        steps = [step for (step,) in everyone.all_gather_ints([self.manager.current_step()])]
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise RuntimeError(
                f"Expected every rank of this replica group to be at one step, got step {steps[0]} on rank 0 and step "
                f"{steps[other]} on rank {other}: one of them could not receive the state of a healthy group. Restart "
                "this group. [ZERO-915]"
            )

    if not TYPE_CHECKING:  # so that a misspelt name is still an error

        def __getattr__(self, name: str) -> Any:
            """An attribute of the sharded optimizer that torchft's wrapper does not have."""
            if name == "optim":  # before there is one
                raise AttributeError(name)
            return getattr(self.optim, name)


def build_manager(**options: Any) -> Manager:
    """Torchft's manager of this rank's replica group, on all of whose ranks this must be called. A collective.

    Rank 0's manager is built first. All attempts of a job of torchrun share one store, in which other ranks of a group
    that was restarted would otherwise find the address of a manager that is gone.

    Args:
        **options: of `torchft.Manager`; ``load_state_dict`` and ``state_dict`` may be left out, as `prepare` registers
            both. Give ``init_sync=False`` if all groups begin with the same parameters: with torchft's default, ranks
            of one group take over the first parameters of different groups, and the first gradients mix these.

    Raises:
        RuntimeError: if the default process group is not initialised.
    """
    group = Communicator(None)
    if group.group_rank:
        group.all_gather_ints([0])
    manager = Manager(**{"load_state_dict": None, "state_dict": None, **options})
    if not group.group_rank:
        group.all_gather_ints([0])
    return manager


def prepare(
    manager: Manager, model: nn.Module, optimizer_class: Callable[..., Optimizer], params: Any = None, **options: Any
) -> ManagedOptimizer:
    """Shard an optimizer over the ranks of a replica group, and let torchft's manager decide its steps. A collective.

    The loop calls ``opt.zero_grad()`` before each step's first forward pass, and ``opt.step()`` after its last backward
    pass. The manager needs no functions for state: the model's and this optimizer's are registered here.

    Args:
        manager: of this rank's replica group.
        model: the group's DDP model, or a module that holds it.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`.
        params: see `ddp_zero.shard_optimizer`.
        **options: options of `ddp_zero.shard_optimizer`, and options for ``optimizer_class``. ``partition`` is
            ``"parameters"``; steps inside backward wait for ``opt.step()``.

    Returns:
        The optimizer, whose hook is registered on the model.

    Raises:
        TypeError: as `ddp_zero.shard_optimizer` does, or for parameters of several dimensions of a mesh.
        ValueError: for ``partition="elements"``, or as `ddp_zero.shard_optimizer` does.
    """
    optimizer: Any = shard_optimizer(model, optimizer_class, params, **{"partition": "parameters", **options})
    return ManagedOptimizer(manager, model, optimizer)


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(
            f"Expected a ddp_zero.ZeroRedundancyOptimizer, got {type(optimizer).__name__}. Shard the optimizer over "
            "the ranks of one replica group, by shard_optimizer(ddp, ...), or use torchft's own wrapper. [ZERO-915]"
        )
    if shard_of(optimizer).binding.partition.cuts:
        raise ValueError(
            "Expected partition='parameters', got 'elements': averages of parts have not been tried with torchft's "
            "manager. Build the optimizer with partition='parameters'. [ZERO-915]"
        )


def _batches(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that travel together: large ones alone, the others of one device and dtype up to a buffer's size."""
    open_batches: dict[Any, list[Tensor]] = {}
    for grad in grads:
        if grad.nbytes >= _LARGE_BYTES:
            yield [grad]
            continue
        batch = open_batches.setdefault((grad.device, grad.dtype), [])
        if sum(one.nbytes for one in batch) + grad.nbytes > _BUFFER_BYTES:
            yield list(batch)
            batch.clear()
        batch.append(grad)
    yield from (batch for batch in open_batches.values() if batch)


def _flat(batch: Sequence[Tensor]) -> Tensor:
    """The memory of one contiguous gradient, or a copy of all, 1-D."""
    return batch[0].reshape(-1) if len(batch) == 1 else torch.cat([grad.reshape(-1) for grad in batch])
