"""A model with its optimizer, as a rank saves and loads them, and the ranks that do so together."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_zero.checkpoint.folder import digest_of
from ddp_zero.checkpoint.optimizers import OptimizerState, ShardedState, state_of, unwrap
from ddp_zero.core.backward import reduced_parameters
from ddp_zero.core.comm import Agreement, Communicator, Peers
from ddp_zero.core.local import LiveModel, group_of, sample_values
from ddp_zero.core.plan import GroupRank
from ddp_zero.optimizer import ZeroRedundancyOptimizer, shard_of
from ddp_zero.parallel.optimizer import ParallelOptimizer
from ddp_zero.parallel.whole_model import Layout, Statement


@dataclass(frozen=True)
class View:
    """A model and its optimizer; with a `ParallelOptimizer`, this rank's part of the model."""

    model: nn.Module  # as the user gave it
    live: LiveModel
    state: OptimizerState | None  # None without an optimizer
    names: list[str]  # of the optimizer's parameters, by index
    statement: Statement | None  # of this rank's part; None if all ranks hold the same

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None) -> "View":
        """Raises ValueError if the optimizer has a parameter that the model does not have."""
        state = None if optimizer is None else state_of(optimizer)
        parallel = None if state is None else state.optimizer
        if not (isinstance(parallel, ParallelOptimizer) and isinstance(state, ShardedState)):
            live = LiveModel(model)
            return cls(model, live, state, [] if state is None else live.names_of(state.table), None)
        part = parallel._holdings.part_of(model)
        names, wholes, writers = part.names_of(state.table), state.table.wholes, state.writers()
        hosted = {names[index] for index in writers if index in wholes and wholes[index].is_here}
        statement = part.statement({names[index]: first for index, first in writers.items()}, hosted)
        return cls(model, part, state, names, statement)

    def declare(self, agreement: Agreement, is_save: bool = False) -> None:
        """Declare names, shapes, dtypes and classes, the same on every rank; for a save, also check the state."""
        kind = "none" if self.state is None else f"{type(self.state.optimizer).__name__} of {self.state.class_name}"
        agreement.declare("optimizer", kind)
        if self.statement is None:
            named = repr(sorted(self.live.values().items()))
            agreement.declare("names, shapes and dtypes in the model", digest_of(named))
            if is_save:
                ignored = digest_of("".join(_samples_of_ignored(self.model, self.live)))
                agreement.declare("parameters that DDP ignores, or their ParallelOptimizer,", ignored)
        if is_save and self.state is not None:
            self.state.check()

    def layout(self, peers: Peers) -> Layout | None:
        """The layout of the model over all ranks, if they hold different parts. A collective.

        Raises ValueError on every rank if the parts do not fit together, naming the parameter and two ranks.
        """
        if self.statement is None:
            return None
        every = [Statement.of_text(text) for text in peers.all_gather_text(self.statement.as_text())]
        return Layout(every, lambda rank: peers.name(GroupRank(rank)))


def _samples_of_ignored(model: nn.Module, live: LiveModel) -> list[str]:
    """Digests of trainable parameters that DDP ignores: ranks may hold different ones under one name."""
    models = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced: set[int] = set()
    for ddp in models:  # all that DDP reduces, and perhaps some that are frozen
        found = [one for _, one in reduced_parameters(ddp)] if ddp.parameters_to_ignore else ddp.module.parameters()
        reduced |= set(map(id, found))
    ignored = [one for one in live.tensors.values() if one.requires_grad and id(one) not in reduced]
    return sample_values(ignored) if models else []


def process_groups(model: nn.Module, optimizer: Optimizer | None, is_save: bool = False) -> list[ProcessGroup]:
    """The groups whose ranks save and load together; with a `ParallelOptimizer`, all ranks of the model."""
    inner, group = unwrap(optimizer), group_of(model)
    if isinstance(inner, ParallelOptimizer):
        return inner.process_groups
    is_sharded = isinstance(inner, ZeroRedundancyOptimizer)
    sharded = shard_of(inner).everyone.process_group if is_sharded else getattr(inner, "join_process_group", None)
    if group is not None and sharded is not None and not Communicator(group).has_same_ranks(sharded):
        raise ValueError(
            "The optimizer and the DDP model are on different ranks. Build the optimizer with "
            "process_group=ddp.process_group. [ZERO-207]"
        )
    group = sharded if group is None else group
    if is_save and group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"A job of {dist.get_world_size()} ranks cannot save or load together without a model in "
            "DistributedDataParallel or a sharded optimizer. Give the DDP model. [ZERO-201]"
        )
    return [] if group is None else [group]
