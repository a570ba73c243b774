"""`Join` over a mesh: ranks at one place of the data dimension leave together, which is checked in every iteration.

Under `torch.distributed.algorithms.Join` each data-parallel group keeps its own count of ranks that still train. A rank
whose peers along another dimension have left would wait for them inside the model, until the time-out. So before the
forward pass every rank compares its state with its peers, and the data-parallel group hears of the outcome: all ranks
of the mesh raise, or none. Ranks that have joined take part before they shadow the iteration, and when all have joined.

With a DDP model they do so where DDP itself tells joined ranks about the backward pass. Without one, Join hears of an
iteration before the forward pass as well, or in ``opt.step()`` if the model is not called. With a pipeline it hears of
each run of the schedule before stages wait for each other, and of each ``opt.step()``; the optimizer alone is in the
list of Join, and shadows the reductions of the stages' DDP models.

Ranks with other experts exchange tokens in the forward pass, so those that do leave together, too (`ties_of`); others
that hold the same experts may go on.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_zero.core.comm import Communicator, all_gather_text_across
from ddp_zero.core.ddp import (
    has_hook,
    has_static_graph,
    latest_join,
    sends_buffers,
    shadow_run,
    stages_over,
    watch_iterations_under_join,
    watch_runs,
)
from ddp_zero.core.local import weakly
from ddp_zero.core.step import refuse_join
from ddp_zero.optimizer import engine_of, shard_of
from ddp_zero.parallel.members import Member


class Progress(IntEnum):
    """The progress of a rank."""

    TRAINING = 0  # in an iteration; with a pipeline, in a run of its schedule
    STEPPING = 1  # with a pipeline, in ``opt.step()``
    JOINED = 2
    DONE = 3  # its data-parallel group has joined as a whole


class PeersUnderJoin:
    """Compares the progress of ranks along the other dimensions of the mesh, and of those with other experts.

    Args:
        comms: the data-parallel ranks, and this rank's group along each other dimension of several ranks.
        ties: data-parallel ranks that leave together, from `ties_of`; the same on all ranks of the mesh.
        counts: whether the ranks that have joined must be known in any case.
    """

    def __init__(self, comms: Sequence[Communicator], ties: Sequence[Sequence[int]], counts: bool) -> None:
        self._comms, self._ties, self._counts = comms, ties, counts
        self.num_joined = 0

    @property
    def are_there(self) -> bool:
        """True if there is anything to compare."""
        return len(self._comms) > 1 or bool(self._ties) or self._counts

    def check(self, mine: Progress) -> Progress:
        """Compare progress with peers, once per iteration, and tell the data-parallel ranks. A collective of the mesh.

        Returns the progress of the ranks that are least far. RuntimeError on every rank of the mesh, if progress
        differs where ranks leave together.
        """
        if not self.are_there:
            return mine
        least = most = int(mine)
        for comm in self._comms[1:]:
            gathered = comm.all_gather_ints([least, most])
            least, most = min(low for low, _ in gathered), max(high for _, high in gathered)
        outcomes = self._comms[0].all_gather_ints([int(least != most), int(mine)])
        progress = [state for _, state in outcomes]
        self.num_joined = sum(state >= Progress.JOINED for state in progress)
        differ = any(flag for flag, _ in outcomes) or any(len({progress[at] for at in tie}) > 1 for tie in self._ties)
        if not differ and len({state for state in progress if state < Progress.JOINED}) < 2:
            return Progress(min(progress))
        data_comm = self._comms[0]
        rank = data_comm.global_rank(data_comm.group_rank)
        texts = all_gather_text_across(self._comms, f"{rank} {int(mine >= Progress.JOINED)}")
        texts.sort(key=lambda text: int(text.split()[0]))
        left = ", ".join(text.split()[0] for text in texts if text.endswith(" 1"))
        train = ", ".join(text.split()[0] for text in texts if text.endswith(" 0"))
        raise RuntimeError(
            f"Expected ranks at one place of the data-parallel dimension to leave Join together, got global ranks "
            f"{left or 'none'} that have joined and {train or 'none'} that still train. Give the ranks along the other "
            "dimensions of the mesh, and those that exchange tokens, the same number of batches, and call opt.step() "
            "after as many runs of a schedule. [ZERO-312]"
        )


def ties_of(members: Sequence[Member], ranks: Sequence[int]) -> list[list[int]]:
    """Data-parallel ranks that leave together: those at the same place among the holders of different experts.

    With eight ranks and experts held by 0 2 4 6 and 1 3 5 7, as a mesh of 4 x 2 gives them, 0 and 1 are first of
    theirs and exchange tokens, 2 and 3 are second, and so on. So whoever has left, every expert has a rank that trains.
    NotImplementedError if different experts are held by different numbers of ranks. ``ranks`` are global.
    """
    place = {rank: at for at, rank in enumerate(ranks)}
    ties: list[list[int]] = []
    for member in members:
        groups_of_ranks = [
            tuple(sorted(place[rank] for rank in holders if rank in place)) for holders in member.group_ranks
        ]
        groups = sorted(set(groups_of_ranks))
        if len({len(group) for group in groups}) > 1:
            raise NotImplementedError(
                f"Join needs as many ranks with one expert as with another, got {sorted(map(len, groups))} in "
                f"{member.shared.describe()}: ranks that have left together would leave an expert without any. Give "
                "every data-parallel rank the same number of batches. [ZERO-812]"
            )
        if len(groups) > 1:
            ties += map(list, zip(*groups, strict=True))
    return connected_sets(ties)


def connected_sets(ties: Sequence[Sequence[int]]) -> list[list[int]]:
    """The connected components of places, where each tie connects its places; sorted."""
    components: list[set[int]] = []
    for tie in ties:
        touched = [component for component in components if not component.isdisjoint(tie)]
        components = [component for component in components if component.isdisjoint(tie)] + [set(tie).union(*touched)]
    return sorted(map(sorted, components))


class ParallelJoin(JoinHook):
    """One use of Join: watches iterations where this rank trains, and shadows others' when it has joined.

    It ends with Join's hooks, or if an exception leaves Join, with the `Join` object, which alone holds this one.
    ``step`` takes a step without gradients of this rank.
    """

    def __init__(
        self,
        optimizer: Joinable,
        model: nn.Module | None,
        members: Sequence[Member],
        peers: PeersUnderJoin,
        step: Callable[[], None],
        is_piped: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._members, self.peers, self._step, self.is_piped = members, peers, step, is_piped
        self._has_begun = False  # an iteration, without a DDP model
        self._stages: list[Any] = []
        self._earlier = [(ddp, latest_join(ddp)) for member in members if (ddp := member.shared.ddp) is not None]
        undo = ExitStack()
        undo.callback(_disable, self._optimizer)
        #: Watch no more.
        self.stop = weakref.finalize(self, undo.close)
        self.stop.atexit = False
        for member in members:
            if member.averages is not None:
                engine_of(member.zero).averages_reach_joined = True
            undo.callback(engine_of(member.zero).attachment.watch_shadows())
        ddp = members[0].shared.ddp
        if is_piped:
            assert model is not None, "refused else"
            self._stages = stages_over(model)
            undo.callback(watch_runs(self._stages, weakly(self._begin_run)))
            for member in members:
                passes = engine_of(member.zero).attachment.passes
                if member.shared.ddp is not None and not passes.holds_back:
                    # a run that learns shapes would reduce twice, and joined ranks would not know
                    passes.follow_schedule(True)
                    undo.callback(passes.follow_schedule, False)
        elif ddp is not None:
            undo.callback(watch_iterations_under_join(ddp, weakly(self._in_iteration)))
        elif model is not None and peers.are_there:
            undo.callback(model.register_forward_pre_hook(weakly(self._before_forward), prepend=True).remove)

    def main_hook(self) -> None:
        """Shadow one iteration of ranks that still train."""
        if not self.is_piped and self._members[0].shared.ddp is not None:
            self._step()
        elif self.peers.check(Progress.JOINED) is Progress.TRAINING and self.is_piped:
            shadow_run(self._in_order())
        else:
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every data-parallel rank has joined: those at other places of the mesh must have as well."""
        self.stop()
        self.peers.check(Progress.DONE)

    def before_step(self) -> None:
        """In ``opt.step()`` of a rank that trains, without a DDP model: the iteration has begun now at the latest."""
        if self.is_piped:
            self._notify(Progress.STEPPING)
        elif self._members[0].shared.ddp is None:
            self.begin()
            self._has_begun = False

    def check_alone(self) -> None:
        """ValueError if Join lists DDP models of stages, whose reductions the optimizer shadows."""
        # an earlier Join may have listed them, too
        if self.is_piped and any(latest_join(ddp) is not earlier for ddp, earlier in self._earlier):
            raise ValueError(
                "Expected Join to list the ParallelOptimizer alone with pipeline stages, got a DDP model beside it, "
                "which would count every micro-batch as an iteration. Use Join([opt]). [ZERO-312]"
            )

    def begin(self) -> None:
        """Without a DDP model, on a rank that trains: begin an iteration before it needs its peers."""
        if not self._has_begun:
            self._has_begun = self._notify(Progress.TRAINING)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.begin()

    def _begin_run(self) -> None:
        self._notify(Progress.TRAINING)

    def _notify(self, progress: Progress) -> bool:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer._join_config.enable:
            return False
        Join.notify_join_context(optimizer)
        self.peers.check(progress)
        return True

    def _in_iteration(self, has_joined: bool) -> None:
        self.peers.check(Progress.JOINED if has_joined else Progress.TRAINING)

    def _in_order(self) -> list[Any]:
        """The DDP models of members, in the order of the pipeline."""
        stage_index = {id(stage.submod): at for at, stage in enumerate(self._stages)}
        return sorted(
            filter(None, (member.shared.ddp for member in self._members)), key=lambda ddp: stage_index[id(ddp)]
        )


def _disable(reference: "weakref.ref[Joinable]") -> None:
    optimizer = reference()
    if optimizer is not None:
        optimizer._join_config = optimizer._join_config._replace(enable=False)


def refuse(members: Sequence[Member], model: nn.Module | None, is_piped: bool, arguments: Mapping[str, Any]) -> None:
    """NotImplementedError where ranks that have joined would be missing; ``arguments`` are for Join."""
    wrapped = [ddp for member in members if (ddp := member.shared.ddp) is not None]
    takes_hook = bool(wrapped) and (is_piped or has_hook(wrapped[0]))
    refuse_join([shard_of(member.zero).ranks for member in members], takes_hook, arguments)
    if not is_piped:
        further = next((member for member in members[1:] if member.shared.ddp is not None), None)
        if further is not None:
            raise NotImplementedError(
                f"Join does not support a second DDP model, here over {further.shared.describe()}: torch's Join takes "
                "models of one process group, and a rank that has joined cannot know in which order the backward pass "
                "reduces buckets of two. Have DDP ignore the experts, whose gradients opt.step() then averages. "
                "[ZERO-812]"
            )
        return
    if model is None or not stages_over(model):
        raise NotImplementedError(
            "Join over pipeline stages needs a schedule of torch, got no PipelineStage of torch.distributed.pipelining "
            "over the model: nothing else tells that an iteration begins before stages wait for each other. Build the "
            "PipelineStage before Join. [ZERO-812]"
        )
    of_stages = {id(stage.submod) for stage in stages_over(model)}
    for ddp in wrapped:
        why = None
        if has_static_graph(ddp):
            why = "a static graph"
        elif sends_buffers(ddp):
            why = "buffers that the first rank sends in forward passes (broadcast_buffers=True)"
        elif id(ddp) not in of_stages:
            why = "no PipelineStage of its own"
        if why is not None:
            raise NotImplementedError(
                f"Join over pipeline stages does not support a DDP model with {why}: a rank that has joined runs none "
                "of its passes. Wrap each stage by itself, with static_graph=False and broadcast_buffers=False. "
                "[ZERO-812]"
            )
