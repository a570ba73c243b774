"""One rank's part of a checkpoint: its share of the model, the states it owns and, on rank 0, what all ranks share."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ddp_zero.checkpoint.contents import Part, Shared
from ddp_zero.checkpoint.optimizers import OptimizerState, class_name, group_options, other_state
from ddp_zero.comm.peers import Peers
from ddp_zero.local.live_model import LiveModel, by_group
from ddp_zero.local.tree import Tree
from ddp_zero.plan.partition import GroupRank, partition_greedy


def capture(
    live: LiveModel,
    optimizer: OptimizerState | None,
    states: dict[int, dict[Any, Any]],
    peers: Peers,
    extra: Tree,
    rank_extra: Tree,
    exclude_frozen: bool = False,
) -> Part:
    """A rank's part, made of live tensors.

    Every parameter is written by the rank that writes its state; parameters in no optimizer are spread over the ranks;
    buffers, which may differ between ranks, are taken from rank 0, as DDP broadcasts them.

    Args:
        live: the model.
        optimizer: the optimizer, between two steps.
        states: those that it saves, by index.
        peers: the ranks.
        extra: the user's own state.
        rank_extra: that of this rank.
        exclude_frozen: leave out parameters that do not require a gradient.

    Raises:
        ValueError: if the optimizer has a parameter that the model does not have.
    """
    rank, world_size = peers.group_rank, peers.world_size
    names: list[str] = []
    owned: list[int] = []
    if optimizer is not None:
        names = live.names_of(optimizer.table)
        owned = optimizer.owned(rank, world_size)
    mine = {names[index] for index in owned} | set(_share_of_rest(live, names, rank, world_size))
    left_out = {name for name, value in live.entries.items() if exclude_frozen and _is_frozen(value)}
    model = {name: value for name, value in live.entries.items() if name in mine - left_out}
    state, births = _states(optimizer, states, names, owned)
    shared = _shared(live, optimizer, names, extra) if rank == 0 else None
    if shared is not None and exclude_frozen:
        aliases = {alias: name for alias, name in shared.aliases.items() if name not in left_out}
        shared = replace(shared, aliases=aliases, excludes_frozen=True)
    return Part(model, state, births, rank_extra, shared)


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _share_of_rest(live: LiveModel, names: list[str], rank: GroupRank, world_size: int) -> list[str]:
    """The names that this rank writes of the values in no optimizer."""
    taken = set(names)
    rest = {name: value for name, value in live.entries.items() if name not in taken}
    spread = {name: value for name, value in rest.items() if isinstance(value, nn.Parameter)}
    owners = partition_greedy([param.nbytes for param in spread.values()], world_size)
    mine = [name for name, owner in zip(spread, owners, strict=True) if owner == rank]
    return mine + ([name for name in rest if name not in spread] if rank == 0 else [])


def _states(
    optimizer: OptimizerState | None, found: dict[int, dict[Any, Any]], names: list[str], owned: list[int]
) -> tuple[dict[str, dict[Any, Any]], list[tuple[int, int, str]]]:
    if optimizer is None:
        return {}, []
    births, mine = optimizer.births(), set(owned)
    kept = [index for index in found if index in mine]
    return {names[index]: found[index] for index in kept}, [(*births[index], names[index]) for index in kept]


def _shared(live: LiveModel, optimizer: OptimizerState | None, names: list[str], extra: Tree) -> Shared:
    trainable, aliases = live.trainable, live.aliases
    buffers = [name for name, value in live.entries.items() if not isinstance(value, nn.Parameter)]
    if optimizer is None:
        return Shared(trainable=trainable, aliases=aliases, buffers=buffers, extra=extra)
    param_groups = optimizer.optimizer.param_groups
    groups = [
        {**group_options(group), "params": params}
        for group, params in zip(param_groups, by_group(names, param_groups), strict=True)
    ]
    return Shared(
        optimizer=class_name(optimizer.inner),
        param_groups=groups,
        other_state=other_state(optimizer.inner),
        loss_scale=optimizer.scale(),
        trainable=trainable,
        aliases=aliases,
        buffers=buffers,
        extra=extra,
    )


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, unaffected by further training."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
