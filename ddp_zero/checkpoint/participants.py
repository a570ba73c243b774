"""The ranks that save and load together, and their views of the model and the optimizer."""

import hashlib

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ddp_zero.checkpoint.optimizers import OptimizerState, ParallelState, process_group_of, state_of, unwrapped
from ddp_zero.checkpoint.saving import sample_of_ignored
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.groups import Peers, check_not_alone
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.local.inner import class_name
from ddp_zero.core.local.live_model import LiveModel, group_of
from ddp_zero.core.plan.global_layout import Layout, Statement
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.parallel.optimizer import ParallelOptimizer


def process_groups(model: nn.Module, optimizer: Optimizer | None, is_save: bool = False) -> list[ProcessGroup]:
    """The groups whose ranks save and load together; with a `ParallelOptimizer`, all ranks of the model."""
    inner = unwrapped(optimizer)
    if isinstance(inner, ParallelOptimizer):
        return inner.process_groups
    group = _group(model, optimizer)
    if is_save:
        check_not_alone(group)
    return [] if group is None else [group]


def _group(model: nn.Module, optimizer: Optimizer | None) -> ProcessGroup | None:
    """The process group that saves and loads together: DDP's, or a sharded optimizer's."""
    group = group_of(model)
    sharded = process_group_of(unwrapped(optimizer))
    if group is not None and sharded is not None and not Communicator(group).has_same_ranks(sharded):
        raise ValueError(
            "The optimizer and the DDP model are on different ranks. Build the optimizer with "
            "process_group=ddp.process_group. [ZERO-207]"
        )
    return sharded if group is None else group


def views_of(
    model: nn.Module, optimizer: Optimizer | None
) -> tuple[LiveModel, OptimizerState | None, Statement | None]:
    """Views of model and optimizer; with a `ParallelOptimizer`, of this rank's part, and a statement of it."""
    state = None if optimizer is None else state_of(optimizer)
    if isinstance(state, ParallelState):
        part = state.part_of(model)
        return part, state, state.statement(part)
    return LiveModel(model), state, None


def declared(
    agreement: Agreement, model: nn.Module, optimizer: Optimizer | None, is_save: bool = False
) -> tuple[LiveModel, OptimizerState | None, Statement | None]:
    """`views_of`, declared to be the same on every rank; names, shapes, dtypes and classes.

    With a `ParallelOptimizer` names differ between ranks: the third value states this rank's.
    """
    live, state, statement = views_of(model, optimizer)
    kind = "none" if state is None else f"{type(state).__name__} of {class_name(state.inner)}"
    agreement.declare("optimizer", kind)
    if statement is not None:
        return live, state, statement
    values = repr(sorted(live.values().items()))
    agreement.declare("names, shapes and dtypes in the model", hashlib.sha256(values.encode()).hexdigest())
    if is_save:
        agreement.declare("parameters that DDP ignores, or their ParallelOptimizer,", sample_of_ignored(model, live))
    return live, state, None


def layout_of(peers: Peers, statement: Statement | None) -> Layout | None:
    """The layout of the model over all ranks, if they hold different parts. A collective.

    Raises:
        ValueError: on every rank, if the parts do not fit together, naming the parameter and two ranks.
    """
    if statement is None:
        return None
    every = [Statement.of_text(text) for text in peers.all_gather_text(statement.as_text())]
    return Layout(every, lambda rank: peers.name(GroupRank(rank)))
