"""Optimizers as a checkpoint sees them: this library's, torch's ZeroRedundancyOptimizer, and any that is not sharded.

All three give what this rank has to save and take what it has to load; parameters are indices in the order of groups.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.local.inner import rehearse_load
from ddp_zero.local.parameters import ParameterTable
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.plan.partition import GroupRank, partition_greedy
from ddp_zero.state.restrict import check_state

Birth = tuple[int, int]
StateDict = dict[str, Any]


class OptimizerState(Protocol):
    """An optimizer, seen by a checkpoint.

    Attributes:
        optimizer: itself.
        inner: the one that holds this rank's state.
        table: its parameters.
    """

    optimizer: Optimizer
    inner: Optimizer
    table: ParameterTable

    def check(self) -> None:
        """See that a step is not under way.

        Raises:
            RuntimeError: if it is.
        """

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """Parameters whose state this rank saves; each has one such rank."""

    def kept(self) -> list[int]:
        """Parameters whose state this rank loads."""

    def state(self) -> dict[int, dict[Any, Any]]:
        """Of the parameters of this rank, in the unsharded order, masters included."""

    def births(self) -> Mapping[int, Birth]:
        """When each of them was created, comparable over ranks."""

    def scale(self) -> dict[str, float] | None:
        """Where a dynamic loss scale is."""

    def master(self, index: int) -> Tensor | None:
        """The live fp32 master of a parameter, if it has one here."""

    def wants_master(self, index: int) -> bool:
        """Whether a parameter has a master on its owner."""

    def check_fits(self, state_dict: StateDict) -> None:
        """See that a state dict with tensors without memory could be loaded.

        Raises:
            ValueError: naming the parameter or the group.
        """

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """Load a state dict with the states of `kept`, whose tensors become the optimizer's own.

        Args:
            state_dict: parameters are their indices.
            order: those that have a state on any rank, as the unsharded optimizer would have them.
        """


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The view of an optimizer that fits its class."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return ShardedState(optimizer)
    torchs = sys.modules.get("torch.distributed.optim")  # importing it warns; who has one of its optimizers has done so
    if torchs is not None and isinstance(optimizer, torchs.ZeroRedundancyOptimizer):
        return TorchZeroState(optimizer)
    return WholeState(optimizer)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in wrappers that hold it as ``.optimizer``, as Accelerate's, and keep no state of their own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        own = getattr(optimizer, "__dict__", {})
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer) and not isinstance(inner, ZeroRedundancyOptimizer)
        if is_sharded or ("state" in own and own["state"] is not inner.state):
            break
        optimizer = inner
    return optimizer


class WholeState:
    """An optimizer with all state on every rank: ranks share the saving, and each loads everything."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.inner = optimizer
        self.table = ParameterTable(optimizer.param_groups)

    def check(self) -> None:
        """Nothing happens outside ``step()``; but a state dict of its own making cannot be taken apart."""
        wraps = isinstance(getattr(self.inner, "optimizer", None), Optimizer)
        if wraps or type(self.inner).state_dict is not Optimizer.state_dict:
            remedy = "Give its .optimizer, and the rest of its state" if wraps else "Save its state_dict()"
            raise TypeError(
                f"Expected an optimizer with the state_dict() of torch.optim.Optimizer, got "
                f"{type(self.inner).__name__}, which has state of its own. {remedy} as `extra`."
            )

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """An even share."""
        owners = partition_greedy([param.nbytes for param in self.table.params], world_size)
        return [index for index, owner in enumerate(owners) if owner == rank]

    def kept(self) -> list[int]:
        """All."""
        return list(range(len(self.table)))

    def state(self) -> dict[int, dict[Any, Any]]:
        """As the optimizer has it."""
        return {self.table.index_of[key]: value for key, value in self.inner.state.items() if isinstance(key, Tensor)}

    def births(self) -> Mapping[int, Birth]:
        """By place in the optimizer's state."""
        return {index: (0, place) for place, index in enumerate(self.state())}

    def scale(self) -> dict[str, float] | None:
        """None: a GradScaler is the user's to save."""
        return None

    def master(self, index: int) -> Tensor | None:
        """None."""
        return None

    def wants_master(self, index: int) -> bool:
        """Never."""
        return False

    def check_fits(self, state_dict: StateDict) -> None:
        """Shapes of states against those of parameters, and a rehearsal, for torch's own optimizers."""
        for index, state in state_dict["state"].items():
            if not isinstance(index, str):  # that belongs to no parameter
                check_state(state, self.table, index, type(self.inner))
        if self.inner is self.optimizer:
            rehearse_load(self.inner, state_dict)

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """By the optimizer itself."""
        self.optimizer.load_state_dict(state_dict)


class TorchZeroState(WholeState):
    """`torch.distributed.optim.ZeroRedundancyOptimizer`: every rank has the state of its own parameters."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.inner = optimizer.optim

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """What the local optimizer steps."""
        return self.kept()

    def kept(self) -> list[int]:
        """What the local optimizer steps."""
        return sorted(self.table.index_of[param] for group in self.inner.param_groups for param in group["params"])

    def births(self) -> Mapping[int, Birth]:
        """By parameter."""
        return {index: (0, index) for index in self.state()}


class ShardedState:
    """This library's optimizer."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer: Optimizer = optimizer
        self.inner = optimizer.optim
        self.table = optimizer._sharded.table
        self._zero = optimizer

    def check(self) -> None:
        """See that no backward pass is under way and none waits for ``opt.step()``."""
        self._zero._check_between_steps()

    def owned(self, rank: GroupRank, world_size: int) -> list[int]:
        """What the plan says."""
        return self.kept()

    def kept(self) -> list[int]:
        """What the plan says."""
        return self._zero._sharded.binding.owned()

    def state(self) -> dict[int, dict[Any, Any]]:
        """With masters."""
        return self._zero._owned_state()

    def births(self) -> Mapping[int, Birth]:
        """By step and parameter."""
        sharded = self._zero._sharded
        return {index: sharded.order.of(sharded.stepped[index], index) for index in self.state()}

    def scale(self) -> dict[str, float] | None:
        """That of ``loss_scale=DynamicLossScale()``."""
        scale = self._zero._decision.loss_scale
        return scale.state_dict() if scale is not None and scale.is_dynamic else None

    def master(self, index: int) -> Tensor | None:
        """On the owner."""
        return self._zero._sharded.stepped.master(index)

    def wants_master(self, index: int) -> bool:
        """With ``master_weights=True``."""
        return self._zero._sharded.stepped.wants_master(index)

    def check_fits(self, state_dict: StateDict) -> None:
        """As ``load_state_dict``."""
        self._zero._check_fits(state_dict)

    def load(self, state_dict: StateDict, order: Sequence[int]) -> None:
        """Drop an iteration that is under way, and load."""
        self._zero.reset()
        self._zero._load_owned(state_dict, order)


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def class_name(inner: Optimizer) -> str:
    """The class that steps, so that sharding leaves no trace."""
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def other_state(inner: Optimizer) -> dict[str, Any]:
    """State that belongs to no parameter."""
    state: Mapping[Any, Any] = inner.state
    return {key: value for key, value in state.items() if isinstance(key, str)}
