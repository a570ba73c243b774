"""Loads a whole state dict that every rank has, or that one rank has and the others take from it.

Ranks exchange who gives a state dict, so a load is a collective, and either all ranks load or none. In the second form
the giver checks it all, sends its structure to every rank, which checks what it will receive, and then each rank gets
the states of what it owns, one parameter at a time. Its old state is dropped before, so that two are never in memory.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.local.inner import rehearse_load
from ddp_zero.core.local.parameters import MASTER_KEY
from ddp_zero.core.local.tree import flatten, specs_in, unflatten
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.state.shard_of_whole import own_part
from ddp_zero.core.state.whole_dict import WholeDict
from ddp_zero.core.step.sharded_step import ShardedStep

_DOING = "load_state_dict"
_JOIN = "; under Join every rank gives one"


def load_together(
    sharded: ShardedStep,
    whole: WholeDict,
    optimizer: Optimizer,
    state_dict: dict[str, Any] | None,
    check: Callable[[], None],
    *,
    may_talk: bool,
) -> None:
    """See `ZeroRedundancyOptimizer.load_state_dict`. A collective.

    Args:
        sharded: the step.
        whole: loads a whole state dict on this rank.
        optimizer: the exposed one, for its hooks.
        state_dict: as documented there.
        check: raises if this is no time to load.
        may_talk: False under Join.
    """
    comm = sharded.everyone
    if comm.world_size == 1 or not may_talk:
        check()
        if state_dict is None:
            raise ValueError(f"Expected a state dict, got None, which is for ranks next to one that gives it{_JOIN}.")
        whole.load(optimizer, state_dict)
        return
    with Agreement(comm, _DOING):
        check()
        if state_dict is not None and not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected a state dict or None, got {type(state_dict).__name__}.")
    given = [bool(flag) for (flag,) in comm.all_gather_ints([int(state_dict is not None)])]
    if sum(given) not in (1, comm.world_size):
        raise ValueError(
            "Expected a state dict on every rank, or on one rank and None on all others, in load_state_dict, got "
            f"one on ranks {[rank for rank, flag in enumerate(given) if flag]} of {comm.world_size}."
        )
    if all(given):
        assert state_dict is not None, "given"
        with Agreement(comm, _DOING):
            prepared = whole.prepare(optimizer, state_dict)
        whole.take(optimizer, prepared)
    elif state_dict is not None:
        _give(sharded, whole, optimizer, state_dict)
    else:
        _receive(sharded, whole, optimizer, GroupRank(given.index(True)))


def _give(sharded: ShardedStep, whole: WholeDict, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    comm = sharded.everyone
    with Agreement(comm, _DOING):
        prepared = whole.prepare(optimizer, state_dict)
        whole.check_scale(prepared.state_dict)
        text, _ = flatten(dict(prepared.state_dict))
    comm.all_gather_text(text)
    with Agreement(comm, _DOING):
        pass
    kept, states = _kept_by_each(sharded), prepared.state_dict["state"]
    index_of = _indices(prepared.state_dict)
    rest = {key: value for key, value in states.items() if key not in index_of}
    for peer in comm.peers():
        comm.send_tree({**prepared.state_dict, "state": rest}, peer)
        for saved_id in states:
            index = index_of.get(saved_id, -1)
            if index in kept[peer]:
                part = kept[peer][index]
                comm.send_tree(
                    states[saved_id] if part is None else own_part(states[saved_id], sharded.table, index, part), peer
                )
    whole.take(optimizer, prepared)
    _check_masters(sharded)


def _receive(sharded: ShardedStep, whole: WholeDict, optimizer: Optimizer, giver: GroupRank) -> None:
    comm, device = sharded.everyone, sharded.table.accelerator()
    with Agreement(comm, _DOING):
        pass
    text = comm.all_gather_text("")[giver]
    with Agreement(comm, _DOING):
        specs = specs_in(text)
        meta = [torch.empty_strided(one.shape, one.stride or (), dtype=one.dtype, device="meta") for one in specs]
        structure = unflatten(text, meta)
        local, indices, _ = whole.restrict(structure)
        rehearse_load(sharded.inner, local)
    kept, index_of = _kept_by_each(sharded)[comm.group_rank], _indices(structure)
    with sharded.change():
        sharded.inner_state.clear()
        received = comm.receive_tree(giver, device)
        for saved_id in structure["state"]:
            if index_of.get(saved_id, -1) in kept:
                state = comm.receive_tree(giver, device)
                _keep_master(sharded, index_of[saved_id], state)
                sharded.stepped.residence.keep([state])
                received["state"][saved_id] = state
        local, _, masters = whole.restrict(received)
        whole.take_over(optimizer, received, local, indices, masters)
    _check_masters(sharded)


def _check_masters(sharded: ShardedStep) -> None:
    """Check that masters round to the model of each rank, which the giver could check only for its own. A collective.

    Raises:
        ValueError: naming the first parameter whose master does not; RuntimeError on other ranks. All have loaded then.
    """
    comm = sharded.everyone
    with Agreement(comm, _DOING):
        if diverged := sharded.stepped.diverged():
            raise ValueError(
                f"Expected {sharded.table.label(diverged[0])} to be its master weight rounded, got a different value "
                f"on {comm.name(comm.group_rank)}. Load the model on every rank before the "
                "optimizer, or call opt.refresh_master_weights() to continue from the models as they are."
            )


def _keep_master(sharded: ShardedStep, index: int, state: dict[str, Any]) -> None:
    """Copy a master that was received into the live one, which then replaces it."""
    master = sharded.stepped.master(index)
    if master is not None and MASTER_KEY in state:
        with torch.no_grad():
            state[MASTER_KEY] = master.detach().copy_(state[MASTER_KEY])


def _kept_by_each(sharded: ShardedStep) -> list[dict[int, slice | None]]:
    """The parameters of which each rank keeps the state, by index; of one that is cut, which part. A collective."""
    parts = sharded.binding.owned_parts()
    mine = [
        [index, [parts[index].start, parts[index].stop] if index in parts else None]
        for index in sharded.binding.owned()
    ]
    every = [json.loads(text) for text in sharded.everyone.all_gather_text(json.dumps(mine))]
    return [{index: None if part is None else slice(*part) for index, part in one} for one in every]


def _indices(state_dict: Mapping[str, Any]) -> dict[Any, int]:
    """The index of each parameter, by its id in a state dict."""
    ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    return {saved_id: index for index, saved_id in enumerate(ids)}
