"""`ZeroRedundancyOptimizer`: the façade that users hold.

A step, on every rank alike:

1. evaluate the closure, if any; refuse sparse gradients;
2. bind again if parameters were moved, frozen or unfrozen since the last step;
3. under Join, send gradients to ranks that have run out of inputs;
4. for each bucket in plan order: step what this rank owns of it, start its sync;
5. finish all syncs; show the options that the step left.
"""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import ParamsT

from ddp_zero.agreement import Agreement
from ddp_zero.binding import Binding
from ddp_zero.checkpoint import StateOrder, gather_state, restrict_state_dict
from ddp_zero.collectives import Communicator
from ddp_zero.join import BorrowedGradients, ZeroJoinHook, serve_joined
from ddp_zero.local_step import LocalStep, ParamGroup, restrict_group
from ddp_zero.parameters import ParameterTable
from ddp_zero.partition import GroupRank
from ddp_zero.report import describe_shards, state_bytes
from ddp_zero.tracing import label

State = MutableMapping[Any, Any]


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any `torch.optim.Optimizer`, its state sharded over the ranks of a process group (ZeRO stage 1).

    Each rank owns some of the parameters, keeps optimizer state for those only, steps them, and sends the result to the
    others; afterwards all ranks hold the same parameters. Gradients must have been averaged before, as
    `DistributedDataParallel` does. The numbers are those of the unsharded optimizer, bit for bit. The idea is that of
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019.

    A drop-in for `torch.distributed.optim.ZeroRedundancyOptimizer`. Every rank of the group must construct it, with the
    same parameters in the same order, and must call `step`, `add_param_group` and `consolidate_state_dict` together.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        optimizer_class: the class to shard, such as `torch.optim.AdamW`, or another callable that builds one.
        process_group: the ranks that share the work; the default group if None.
        parameters_as_bucket_view: move the parameters into flat storage, so that a sync copies nothing. ``param.data``
            is re-pointed; references taken to it before are stale. If False, the parameters stay where they are and a
            sync holds copies of up to two buckets (25 MiB each, or one parameter if that is larger).
        overlap_with_ddp: not implemented yet.
        **defaults: options for ``optimizer_class``.

    Attributes:
        optim: the local optimizer, over this rank's parameters: one group per exposed group, in order, empty ones too.
        param_groups: the exposed groups with all parameters. Options set here reach the local optimizer at the next
            step, and what that adds shows up here.
        rank: this process's rank in the group.
        world_size: size of the group.
        process_group: the group.

    Raises:
        ValueError: for an empty or repeated parameter, shared memory, or parameters that differ between ranks.
        TypeError: for arguments of the wrong type, or options that ``optimizer_class`` does not know.
        NotImplementedError: for LBFGS, SparseAdam, or ``overlap_with_ddp=True``.
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
        **defaults: Any,
    ) -> None:
        self._comm = Communicator(process_group)
        self._as_views = parameters_as_bucket_view
        self._consolidated: State | None = None
        self._packing_consolidated = False
        Joinable.__init__(self)
        with Agreement(self._comm, "building ZeroRedundancyOptimizer") as agreement:
            _check_supported(optimizer_class, overlap_with_ddp)
            Optimizer.__init__(self, params, {})  # the local optimizer knows the class's own defaults
            self._table = ParameterTable(self.param_groups)
            agreement.declare("optimizer class", getattr(optimizer_class, "__qualname__", repr(optimizer_class)))
            agreement.declare("parameters_as_bucket_view", parameters_as_bucket_view)
            agreement.declare_parameters(self._table)
            self._binding = Binding(self._comm, self._table, parameters_as_bucket_view)
            self.optim = self._build_inner(optimizer_class, defaults)
        self.defaults = self.optim.defaults
        self._order = StateOrder()
        self._order.note_new(self.optim.state, self._table)
        self._local_step = LocalStep(self.optim, self.param_groups)
        self._local_step.mirror_to_exposed()
        self._local_step.bind(self._binding.owned_of_bucket())

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters, at any time; what is owned already stays with its owner. A collective.

        Raises:
            ValueError: if the parameters are already in a group or differ between ranks; RuntimeError if it failed on
                another rank. The optimizer is then as it was.
        """
        if not hasattr(self, "optim"):  # called by Optimizer.__init__
            super().add_param_group(param_group)
            return
        groups_before = len(self.param_groups), len(self.optim.param_groups)
        try:
            with Agreement(self._comm, "add_param_group") as agreement:
                super().add_param_group(param_group)
                table = ParameterTable(self.param_groups)
                agreement.declare_parameters(table)
                binding = Binding(self._comm, table, self._as_views, owners=self._binding.owners)
                owned = {table.params[index] for index in binding.owned()}
                self.optim.add_param_group(restrict_group(self.param_groups[-1], owned))
        except Exception:
            del self.param_groups[groups_before[0] :], self.optim.param_groups[groups_before[1] :]
            raise
        self._consolidated = None
        self._table, self._binding = table, binding
        self._order.note_new(self.optim.state, table)
        self._local_step.mirror_to_exposed()
        self._local_step.bind(binding.owned_of_bucket())

    def _build_inner(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        owned = {self._table.params[index] for index in self._binding.owned()}
        inner = optimizer_class([restrict_group(group, owned) for group in self.param_groups], **defaults)
        if not isinstance(inner, Optimizer):
            raise TypeError(f"Expected optimizer_class to build a torch.optim.Optimizer, got {type(inner).__name__}.")
        return inner

    # Runtime

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's parameters and get the others' from their owners. A collective.

        Args:
            closure: evaluated once, with gradients enabled, before anything is stepped.
            **kwargs: handed to the local optimizer's ``step``.

        Returns:
            The closure's result, or what the local optimizer returned for the last bucket it stepped.

        Raises:
            NotImplementedError: for a gradient that is not dense, naming the parameter.
            RuntimeError: if a peer failed or the group's time-out passed; parameters may then be half updated.
        """
        Join.notify_join_context(self)
        loss = self._local_step.begin(closure)
        self._table.check_gradients()
        self._refresh()
        if self._join_config.enable:
            serve_joined(self._comm, self._table, self._binding.owners, self.param_groups)
        result = self._step_and_sync(kwargs)
        return result if closure is None else loss

    def _step_joined(self) -> None:
        """The same as `step`, on a rank that has run out of inputs: without a closure, with gradients from a peer."""
        self._refresh()
        with BorrowedGradients(self._comm, self._table, self._binding.owners, self.param_groups):
            self._local_step.begin(None)
            self._step_and_sync({})

    def _step_and_sync(self, kwargs: dict[str, Any]) -> Any:
        self._consolidated = None
        sync, result = self._binding.sync, None
        try:
            for bucket in self._binding.plan.buckets:
                with label("local_step", bucket=bucket.index):
                    result = self._local_step.step(bucket.index, **kwargs)
                sync.start(bucket)
            sync.finish()
        except BaseException:
            sync.abandon()
            raise
        self._local_step.finish(**kwargs)
        self._order.after_step(self.optim.state, self._table)
        return result

    def _refresh(self) -> None:
        if self._binding.refresh():
            self._local_step.bind(self._binding.owned_of_bucket())

    # Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `torch.distributed.algorithms.Join` runs on ranks that have joined; see `ddp_zero.join`."""
        return ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._table.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks may run out of inputs at different times."""
        return self._comm.process_group

    # State dict

    @property  # type: ignore[override]
    def state(self) -> State:
        """Per-parameter state of what this rank owns, keyed by parameter: that of the local optimizer."""
        if self._packing_consolidated:
            return self._whole_state()
        return self.optim.state

    @state.setter
    def state(self, state: State) -> None:
        if hasattr(self, "optim"):  # Optimizer.__init__ sets an empty one before there is a local optimizer
            self.optim.state = state  # type: ignore[assignment]

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, whose `state_dict` then returns it until the next step. A collective.

        Args:
            to: rank in the group that receives. It holds the whole state afterwards, on the devices where the unsharded
                optimizer would; the other ranks send one parameter's state at a time.

        Raises:
            ValueError: if ``to`` is not a rank of the group or differs between ranks.
            TypeError: if a state cannot travel without pickle, naming the parameter; RuntimeError on other ranks.
        """
        if not 0 <= to < self._comm.world_size:
            raise ValueError(f"Expected `to` to be a rank below {self._comm.world_size}, got {to}.")
        self._local_step.mirror_to_inner()
        self._consolidated = gather_state(self._comm, self._table, self.optim.state, self._order, GroupRank(to))

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state dict, on a rank to which it was consolidated. Never communicates.

        With one rank nothing needs to be consolidated.

        Raises:
            RuntimeError: if the state as it is now was not consolidated to this rank.
        """
        if self._consolidated is None and self._comm.world_size > 1:
            raise RuntimeError(
                f"Expected the state after the last step to be consolidated on rank {self.rank}, got only its own "
                f"shard. Call consolidate_state_dict(to={self.rank}) on all ranks first; a step, load_state_dict or "
                "add_param_group makes it stale."
            )
        self._packing_consolidated = True
        try:
            return super().state_dict()
        finally:
            self._packing_consolidated = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the unsharded optimizer's state dict, of which this rank keeps what it owns. Never communicates.

        Args:
            state_dict: from the plain optimizer, from torch's ZeroRedundancyOptimizer or from this one, at any number
                of ranks. Every rank loads the same. It is not modified, and later steps do not change its tensors.

        Raises:
            ValueError: if it does not fit, naming the group or the parameter and why. Nothing is changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        local, indices = restrict_state_dict(state_dict, self.param_groups, self._table, self.optim)
        self.optim.load_state_dict(local)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if "param_names" in saved:
                group["param_names"] = list(saved["param_names"])
        self._consolidated = None
        self._local_step.mirror_to_exposed()
        self._local_step.bind(self._binding.owned_of_bucket())
        self._order.loaded(indices, self._table, self.optim.state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _whole_state(self) -> State:
        if self._consolidated is not None:
            return self._consolidated
        born = sorted((p for p in self.optim.state if isinstance(p, torch.Tensor)), key=self._order.of)
        others = [key for key in self.optim.state if not isinstance(key, torch.Tensor)]
        return {key: self.optim.state[key] for key in [*others, *born]}

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "ZeroRedundancyOptimizer":
        """A copy over copied parameters, on the same process group; copy model and optimizer together to link them."""
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone._comm = self._comm
        clone._as_views = self._as_views
        clone._consolidated = None
        clone._packing_consolidated = False
        Joinable.__init__(clone)
        clone.optim = copy.deepcopy(self.optim, memo)
        groups = copy.deepcopy(self.param_groups, memo)
        Optimizer.__setstate__(clone, {"defaults": clone.optim.defaults, "param_groups": groups})
        clone._table = ParameterTable(clone.param_groups)
        clone._binding = Binding(clone._comm, clone._table, clone._as_views, owners=list(self._binding.owners))
        clone._order = copy.deepcopy(self._order, memo)
        clone._local_step = LocalStep(clone.optim, clone.param_groups)
        clone._local_step.bind(clone._binding.owned_of_bucket())
        return clone

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Expected ZeroRedundancyOptimizer not to be pickled, since a rank holds only its shard. Save "
            "consolidate_state_dict() followed by state_dict() instead."
        )

    # Utilities

    def explain(self) -> str:
        """What each rank owns, how balanced it is and what a step sends, as text. Never communicates."""
        flat = "flat storage" if self._as_views else "storage of their own"
        header = (
            f"ZeroRedundancyOptimizer({type(self.optim).__name__}), stage 1, standalone: rank {self.rank} of "
            f"{self.world_size}, parameters in {flat}"
        )
        return f"{header}\n{describe_shards(self._binding.plan, self.rank, state_bytes(self.optim.state))}"

    def __repr__(self) -> str:
        owned = len(self._binding.owned())
        return (
            f"ZeroRedundancyOptimizer of {type(self.optim).__name__}, rank {self.rank} of {self.world_size}, "
            f"{owned} of {len(self._table)} parameters owned\n{super().__repr__()}"
        )

    # Properties

    @property
    def rank(self) -> GroupRank:
        """This process's rank in the group."""
        return self._comm.group_rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._comm.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group whose ranks share the optimizer."""
        return self._comm.process_group


def _check_supported(optimizer_class: Callable[..., Optimizer], overlap_with_ddp: bool) -> None:
    if overlap_with_ddp:
        raise NotImplementedError(
            "Expected overlap_with_ddp=False, got True. The step inside backward is not implemented yet; call step() "
            "after backward."
        )
    if not callable(optimizer_class):
        raise TypeError(f"Expected optimizer_class to be a torch.optim.Optimizer class, got {optimizer_class!r}.")
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
        raise NotImplementedError(
            "Expected an optimizer that treats parameters one by one, got LBFGS, which needs one flat view of all "
            "parameters and their history. Use LBFGS itself on every rank."
        )
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, SparseAdam):
        raise NotImplementedError(
            "Expected an optimizer for dense gradients, got SparseAdam. Use it unsharded for the sparse layers."
        )
