"""One rank's part of a checkpoint: its share of the model, the states it owns and, on rank 0, what all ranks share."""

import hashlib
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.checkpoint.contents import Part, Shared
from ddp_zero.checkpoint.optimizers import OptimizerState
from ddp_zero.core.backward.reducer import reduced_parameters
from ddp_zero.core.comm.peers import Peers
from ddp_zero.core.local.inner import class_name, group_options, other_state
from ddp_zero.core.local.live_model import LiveModel, PartModel, by_group, options_of_text
from ddp_zero.core.local.parameters import sample_values
from ddp_zero.core.local.tree import Tree
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.global_layout import Layout
from ddp_zero.core.plan.partition import GroupRank, partition_greedy


def capture(
    live: LiveModel,
    optimizer: OptimizerState | None,
    states: dict[int, dict[Any, Any]],
    peers: Peers,
    extra: Tree,
    rank_extra: Tree,
    layout: Layout | None = None,
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
        layout: what all ranks hold, where they do not hold the same; then it says what each writes.
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
    if layout is None:
        mine = {names[index] for index in owned} | set(_share_of_rest(live, names, rank, world_size))
    else:
        mine = layout.written_by(rank)
        owned = [index for index in owned if names[index] in mine]
    left_out = {name for name, value in live.entries.items() if exclude_frozen and _is_frozen(value)}
    mine = mine - left_out
    model = {name: value for name, value in live.entries.items() if name in mine}
    state, births = _states(optimizer, states, names, owned)
    shared = _shared(live, optimizer, names, extra, layout) if rank == 0 else None
    if shared is not None and exclude_frozen:
        aliases = {alias: name for alias, name in shared.aliases.items() if name not in left_out}
        shared = replace(shared, aliases=aliases, excludes_frozen=True)
    return Part(model, state, births, rank_extra, shared, _cuts(live, mine))


def _cuts(live: LiveModel, mine: set[str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of values that this rank writes a part of: the shape of the whole, and where the part begins."""
    if not isinstance(live, PartModel):
        return {}
    placed = {name: live.placed[name] for name in live.entries if name in mine and name in live.placed}
    return {name: (one.shape, one.box.offsets) for name, one in placed.items() if one.box != Box.whole(one.shape)}


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


def _shared(
    live: LiveModel, optimizer: OptimizerState | None, names: list[str], extra: Tree, layout: Layout | None
) -> Shared:
    trainable, aliases = live.trainable, live.aliases
    buffers = [name for name, value in live.entries.items() if not isinstance(value, nn.Parameter)]
    if layout is not None:
        trainable, aliases, buffers = layout.trainable, layout.aliases, layout.buffers
    if optimizer is None:
        return Shared(trainable=trainable, aliases=aliases, buffers=buffers, extra=extra)
    if layout is None:
        param_groups = optimizer.optimizer.param_groups
        groups = [
            {**group_options(group), "params": params}
            for group, params in zip(param_groups, by_group(names, param_groups), strict=True)
        ]
    else:
        groups = [{**options_of_text(options), "params": params} for options, params in layout.groups()]
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


def sample_of_ignored(model: nn.Module, live: LiveModel) -> str:
    """A digest of trainable parameters that DDP models leave alone: ranks may hold different ones under one name."""
    models = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced = {id(param) for ddp in models for _, param in reduced_parameters(ddp)}
    ignored = [one for one in live.tensors.values() if one.requires_grad and id(one) not in reduced]
    return hashlib.sha256("".join(sample_values(ignored) if models else []).encode()).hexdigest()


def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, unaffected by further training."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
