"""Uneven inputs: ranks that have run out of inputs keep stepping their shards while other ranks train.

Under `torch.distributed.algorithms.Join` a rank that has joined still owns parameters. DDP lets it take part in the
reductions with zeros but throws the result away, so it has no gradients for its shard. Here a rank that still trains
sends it the averaged gradients, and its group options with them (the joined rank's schedulers have stopped). Then it
steps and syncs like all other ranks. Without Join none of this runs.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.local.inner import ParamGroup, copy_options, options_of
from ddp_zero.core.local.parameters import GradientSource, ParameterTable
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.error_codes import coded


class ZeroJoinHook(JoinHook):
    """Takes part in the communication of ``opt.step()`` on a rank that has joined.

    Args:
        optimizer: the object on which Join sets whether it is active.
        step: steps this rank's shard with gradients from a rank that still trains, and syncs.
        stop: called when Join is no longer active, or when an exception has left Join.
    """

    def __init__(self, optimizer: Joinable, step: Callable[[], None], stop: Callable[[], object]) -> None:
        self._optimizer = optimizer
        self._step = step
        self._stop = weakref.finalize(self, stop)  # `Join` alone holds this hook
        self._stop.atexit = False

    def main_hook(self) -> None:
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank has joined: turn off Join's part of each step."""
        self._stop()
        self._optimizer._join_config = self._optimizer._join_config._replace(enable=False)


def refuse_join(ranks: Iterable[Ranks], has_hook: bool, arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for shard groups, or for a divisor that a communication hook does not support.

    With ``divide_by_initial_world_size=False`` DDP divides by the ranks that still train, but only without a hook.
    """
    # when Join is built, alike on every rank: ranks that have joined would wait for the messages of a step that raises
    for each in ranks:
        if each.replicas is not None:
            raise NotImplementedError(
                f"Join does not support shard_group, here {each.num_replicas} shard groups: a rank that has joined is "
                "served by a rank of its shard group, and all of those may have joined. Build the optimizer without "
                "shard_group, or give every rank as many batches. [ZERO-310]"
            )
    if has_hook and not arguments.get("divide_by_initial_world_size", True):
        raise NotImplementedError(
            "Join does not support divide_by_initial_world_size=False with a communication hook: it divides by all "
            "ranks. Leave the option out, or pass overlap=False and stage=1. [ZERO-310]"
        )


def share_options(shard: Shard, has_joined: bool) -> None:
    """Send group options to joined ranks, before a step that has its gradients already. A collective of the group."""
    comm = shard.comm
    for source, joined in _assign_sources(shard, has_joined):
        # pair by pair on every rank: blocking messages in any other order could wait for each other
        if source == comm.group_rank:
            _send(comm, [options_of(group) for group in shard.param_groups], joined)
        elif joined == comm.group_rank:
            _take_options(shard.param_groups, _receive(comm, source, shard.table))


def serve_joined(shard: Shard, gradients_are_there: bool) -> None:
    """On a rank that still trains, before its step: serve joined ranks. A collective of the group.

    ``gradients_are_there`` is True if joined ranks have the reduced gradients and only need to know which exist.
    """
    # joined ranks are in `borrow_gradients`, with the same gather and then the same pairs in the same order
    comm, table, binding = shard.comm, shard.table, shard.binding
    for source, joined in _assign_sources(shard, has_joined=False):
        if source == comm.group_rank:
            grads = {index: table.params[index].grad for index in binding.owned_parts(joined)}
            exist = {index: None if grad is None else True for index, grad in grads.items()}
            options = [options_of(group) for group in shard.param_groups]
            _send(comm, [options, exist if gradients_are_there else grads], joined)


class BorrowedGradients(GradientSource):
    """The gradients of one step on a joined rank, received from a rank that still trains."""

    def __init__(self, grads: Mapping[int, torch.Tensor | None]) -> None:
        self._grads = grads

    def gradient(self, index: int) -> torch.Tensor | None:
        return self._grads.get(index)


def borrow_gradients(shard: Shard, reduced: Callable[[int], torch.Tensor], *, are_whole: bool) -> GradientSource:
    """On a joined rank, before a step: take gradients and group options from a rank that trains. A collective.

    ``reduced`` gives a parameter's gradient, by index, that the reduction has left on this rank. ``are_whole`` is True
    if gradients have all elements of their parameters. At the end of Join the groups of all ranks have equal options.
    """
    comm = shard.comm
    grads: dict[int, torch.Tensor | None] = {}
    for source, joined in _assign_sources(shard, has_joined=True):
        # blocking, in the order of the pairs: a rank that trains sends before it steps
        if joined == comm.group_rank:
            options, sent = _receive(comm, source, shard.table)
            _take_options(shard.param_groups, options)
            # reduced here already, where DDP's shadow pass has taken part in the reduction
            grads = {index: reduced(index) if grad is True else grad for index, grad in sent.items()}
    borrowed = BorrowedGradients(grads)
    return shard.targets.narrowed_source(borrowed) if are_whole else borrowed


def _send(comm: Communicator, tree: list[Any], to: GroupRank) -> None:
    """Send a list, or the reason why it cannot be sent, so that the receiver does not wait in vain."""
    try:
        comm.send_tree(tree, to)
    except TypeError as error:
        # the joined rank waits for a message in any case
        comm.send_tree(f"{comm.name(comm.group_rank)}: {error}", to)
        message = f"Expected group options and gradients that can be sent to a rank under Join. {error}"
        raise TypeError(coded(message, "[ZERO-611]")) from error


def _receive(comm: Communicator, source: GroupRank, table: ParameterTable) -> Any:
    received = comm.receive_tree(source, table.accelerator())
    if isinstance(received, str):
        message = f"Expected group options and gradients from a rank that still trains, got {received}"
        raise RuntimeError(coded(message, "[ZERO-312]"))
    return received


def _take_options(param_groups: list[ParamGroup], options: list[ParamGroup]) -> None:
    for group, received in zip(param_groups, options, strict=True):
        copy_options(received, group)


def _assign_sources(shard: Shard, has_joined: bool) -> list[tuple[GroupRank, GroupRank]]:
    """Pairs (rank that still trains, joined rank that it serves), the same list on every rank."""
    comm = shard.comm
    # before this rank waits for peers: a peer that has asked for state may wait until this rank has come here
    shard.changes.announce()
    # every rank, joined or not, once per step and before any message of the step
    statements = comm.all_gather_ints([int(has_joined), comm.generation, shard.binding.digest])
    training = [GroupRank(rank) for rank, (joined, _, _) in enumerate(statements) if not joined]
    # every rank compares the same statements, so that all raise or none: a rank that raised alone would hang the rest
    if len({generation for _, generation, _ in statements}) > 1:
        raise RuntimeError(
            "Under Join every rank must step the same optimizer, got several at once: Join lists them in another order "
            "than the loop steps them. List each model before its optimizer, and optimizers in the order of their "
            "steps. [ZERO-312]"
        )
    for rank, (_, _, digest) in enumerate(statements):
        if digest != statements[training[0]][2]:
            raise RuntimeError(
                f"Under Join the same parameters must be trainable on every rank; {comm.name(training[0])} and "
                f"{comm.name(GroupRank(rank))} differ. Freeze or unfreeze outside Join. [ZERO-312]"
            )
    joined_ranks = [GroupRank(rank) for rank, (joined, _, _) in enumerate(statements) if joined]
    return [(training[position % len(training)], rank) for position, rank in enumerate(joined_ranks)]
