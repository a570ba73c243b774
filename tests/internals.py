"""The one door through which tests reach into private attributes of the library's objects.

Most tests use the public face: parameters, gradients, `opt.stats()`, `opt.explain()`, `state_dict()`, messages and what
travels. Those that need a part no user sees, to count in it or to break it, ask for that part here by its name.
`tests/unit/test_architecture.py` holds that no other file of the tests reaches into the library.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.backward.hook import OverlapHook
from ddp_zero.core.backward.scratch_buffers import Buffer
from ddp_zero.core.comm import parameter_sync
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.ranks import Ranks
from ddp_zero.core.comm.ring import RingTransfer
from ddp_zero.core.ddp.forward_passes import ForwardPasses
from ddp_zero.core.ddp.reducer import reducer_of
from ddp_zero.core.ddp.registered_hook import CommHook, watching
from ddp_zero.core.local.copy_pipeline import CopyPipeline, Schedule, Transfer
from ddp_zero.core.local.parameters import StepTargets
from ddp_zero.core.local.placement import HostOffload
from ddp_zero.core.plan.shard_plan import ShardPlan
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.parallel import ParallelOptimizer
from ddp_zero.parallel.joint_decision import NormLevel
from ddp_zero.parallel.whole import Cut
from ddp_zero.snapshots import Snapshots

# Programs


def recompile(opt: ZeroRedundancyOptimizer) -> None:
    """Have the next pass and step bind their calls anew, to functions that a test has replaced."""
    hook = opt._engine.attachment.hook
    if hook is not None:
        hook._steps._compiled_for = ()
    opt._engine.runner._bound = ()


@contextmanager
def replaced(opt: ZeroRedundancyOptimizer, owner: type, name: str, function: Callable[..., object]) -> Iterator[None]:
    """A method of the library is another function, also for the programs of an optimizer."""
    with mock.patch.object(owner, name, function):
        recompile(opt)
        yield
    recompile(opt)


# The plan: who owns which parameters


def plan_of(opt: ZeroRedundancyOptimizer) -> ShardPlan:
    """Buckets, segments and owners, as they are now."""
    return opt._engine.shard.plan


def num_owned_buckets(opt: ZeroRedundancyOptimizer, rank: int) -> int:
    """The number of buckets of which a rank steps anything."""
    return sum(1 for bucket in plan_of(opt).buckets if bucket.segments[rank].params)


def owners_of(opt: ZeroRedundancyOptimizer) -> list[int]:
    """The owner of each parameter, as a rank of the group."""
    return list(opt._engine.shard.binding.owners)


def owners_of_pieces(opt: ZeroRedundancyOptimizer, param: Tensor) -> set[int]:
    """The ranks that own a parameter or a piece of it."""
    return {piece.owner for piece in opt._engine.shard.binding.pieces[index_of(opt, param)]}


def owned_indices(opt: ZeroRedundancyOptimizer) -> list[int]:
    """The parameters of which this rank owns anything."""
    return opt._engine.shard.binding.owned()


def owned_parts(opt: ZeroRedundancyOptimizer) -> dict[int, slice]:
    """The part that this rank owns of each parameter that is cut."""
    return {index: part for index, part in opt._engine.shard.binding.owned_parts().items() if part is not None}


def cuts_parameters(opt: ZeroRedundancyOptimizer) -> bool:
    """True if several ranks may own parts of one parameter."""
    return opt._engine.shard.binding.partition.cuts


def index_of(opt: ZeroRedundancyOptimizer, param: Tensor) -> int:
    """The position of a parameter among all of the optimizer."""
    return opt._engine.shard.table.index_of[param]


def all_params_of(opt: ZeroRedundancyOptimizer) -> list[Tensor]:
    """All parameters, by the private name that torch's `ZeroRedundancyOptimizer` has for them."""
    return opt._all_params


def label_of(opt: ZeroRedundancyOptimizer, index: int) -> str:
    """The name of a parameter in messages."""
    return opt._engine.shard.table.label(index)


# The wire


def communicator_of(opt: ZeroRedundancyOptimizer) -> Communicator:
    """The optimizer's communicator on the group that shards its state."""
    return opt._engine.shard.comm


def ranks_of(opt: ZeroRedundancyOptimizer) -> Ranks:
    """The ranks that shard state, and those that replicate it."""
    return opt._engine.shard.ranks


def take_for_backend(comm: Communicator, name: str) -> None:
    """Make a communicator believe that its group has a different backend on the CPU."""
    comm._backends = {"cpu": name}


@contextmanager
def taken_for_backend(comm: Communicator, name: str) -> Iterator[None]:
    """As `take_for_backend`, within the context."""
    with mock.patch.object(comm, "_backends", {"cpu": name}):
        yield


def sums(transfer: RingTransfer) -> bool:
    """True if a transfer around a ring adds up its segments."""
    return transfer._recv_buffer is not None


def syncs_in_flight(opt: ZeroRedundancyOptimizer) -> list[int]:
    """The buckets whose parameters are on their way after a step."""
    return list(opt._engine.shard.pending_syncs._syncs)


@contextmanager
def keeping_others_from_waiting(opt: ZeroRedundancyOptimizer) -> Iterator[None]:
    """Hold the lock without which no thread waits for parameters on their way."""
    with opt._engine.shard.pending_syncs._wait_lock:
        yield


def complete_at_exit() -> None:
    """Wait as the end of a process does for parameters on their way."""
    parameter_sync._complete_all()


# Steps and decisions


def shard_of(opt: ZeroRedundancyOptimizer) -> Shard:
    """The shard, to put faults into it."""
    return opt._engine.shard


def joins(opt: ZeroRedundancyOptimizer) -> bool:
    """True if ranks may have run out of inputs, within `Join`."""
    return opt._attachment.in_join


def passes_of(opt: ZeroRedundancyOptimizer) -> ForwardPasses:
    """The forward passes that the optimizer has seen."""
    return opt._attachment.passes


@contextmanager
def as_on_cuda(opt: ZeroRedundancyOptimizer) -> Iterator[None]:
    """A step that asks whether a CUDA graph is being captured, as one of CUDA parameters does."""
    with mock.patch.object(opt._engine.runner, "_is_on_cuda", True):
        yield


def break_averaging_check(opt: ZeroRedundancyOptimizer, refuse: Callable[..., None]) -> None:
    """Call this where the engine checks, before the decision, that gradients were averaged."""
    vars(opt._gradients)["check_averaged"] = refuse


def order_norms_as(opt: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> None:
    """Add up norms in the order of a model's parameters, as `shard_optimizer` arranges, and register no hook."""
    opt._attachment.adopt_model(ddp)


def watching_hook(opt: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> CommHook:
    """DDP's averaging, watched for gradients that are not finite, as `shard_optimizer` registers it."""
    return watching(opt._engine.decision.watch, ddp.process_group, None)


@contextmanager
def miscounted_in_norms(opt: ZeroRedundancyOptimizer, indices: Collection[int]) -> Iterator[None]:
    """Some parameters of a member of a `ParallelOptimizer` add to norms where they should not, or the other way."""
    others: Any = opt._engine.decision.rest_of_model
    before = list(others.adds_up)
    others.adds_up[:] = [was != (index in indices) for index, was in enumerate(before)]
    try:
        yield
    finally:
        others.adds_up[:] = before


def num_counted_in_norms(opt: ZeroRedundancyOptimizer) -> int:
    """The number of parameters of a member that have an entry in the list that `miscounted_in_norms` changes."""
    others: Any = opt._engine.decision.rest_of_model
    return len(others.adds_up)


@contextmanager
def first_norm_level(opt: ParallelOptimizer, counted: Sequence[Sequence[bool]]) -> Iterator[None]:
    """The first level at which norms are joined, with different entries in ``counted``."""
    joint, levels = opt._joint, opt._joint._levels
    joint._levels = [NormLevel(levels[0].comm, counted), *levels[1:]]
    try:
        yield
    finally:
        joint._levels = levels


def norm_levels(opt: ParallelOptimizer) -> list[NormLevel]:
    """The levels at which norms are joined."""
    return list(opt._joint._levels)


def cuts_of(opt: ParallelOptimizer) -> list[Cut]:
    """The parameters whose parts meet for the step, in the order of their numbers."""
    return [cut for member in opt._members for _, cut in sorted(member.cuts.items())]


def given_for(opt: ParallelOptimizer) -> dict[Tensor, Tensor]:
    """The model's parameter for each that is stepped."""
    return {stepped: given for given, stepped in opt._stepped_for.items()}


# Stage 2's buffers


def hook_of(opt: ZeroRedundancyOptimizer) -> OverlapHook:
    """The communication hook, once it was built."""
    hook = opt._attachment.hook
    assert hook is not None
    return hook


def in_accumulation_dtype(opt: ZeroRedundancyOptimizer, count: int) -> list[Tensor | None]:
    """The sums in the accumulation dtype that the hook keeps beside ``param.grad``, of the first parameters."""
    hook = opt._attachment.hook
    if hook is None:
        return []
    sums = hook.gradients.whole_gradients or hook.gradients
    return [sums.in_accumulation_dtype(index) for index in range(count)]


def reduce_context_of(opt: ZeroRedundancyOptimizer) -> Any:
    """The buffers of stage 2 and the stream that they are used on."""
    gradients: Any = hook_of(opt).gradients
    return gradients.context


def buffers_of(opt: ZeroRedundancyOptimizer) -> list[Buffer]:
    """The scratches of stage 2, and the receive buffers."""
    context = reduce_context_of(opt)
    return [*context.scratches, *context.receives]


def own_reducer_is_gone(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's own reducer, and with it the memory of its buckets, is gone, as in stage 2."""
    return reducer_of(ddp).own() is None


# Offload


def targets_of(opt: ZeroRedundancyOptimizer) -> StepTargets:
    """The tensors that the inner optimizer steps, and where they live."""
    return opt._engine.shard.targets


def params_of(targets: StepTargets) -> list[Tensor]:
    """The parameters that targets stand for."""
    return list(targets._table.params)


def pipeline_of(opt: ZeroRedundancyOptimizer) -> tuple[CopyPipeline, Transfer]:
    """The copies of an optimizer with one accelerator, and the transfer that they are made by."""
    placement: Any = targets_of(opt).placement
    (pipeline,) = placement._all()
    return pipeline, pipeline._transfer


def add_pipeline(placement: HostOffload, device: torch.device, pipeline: CopyPipeline) -> None:
    """Let a placement copy by this pipeline where a bucket is on a device."""
    placement._pipelines[device] = pipeline


def restart(pipeline: CopyPipeline, schedule: Schedule) -> None:
    """Give a pipeline that is idle another schedule."""
    pipeline._schedule = schedule


def pinned_bytes(pipeline: CopyPipeline) -> list[int]:
    """The sizes of a pipeline's buffers."""
    return [0 if buffer.memory is None else buffer.memory.numel() for buffer in pipeline._buffers]


# Join


def is_under_join(joinable: Joinable) -> bool:
    """Whether a model or an optimizer takes itself to be in the list of an active Join."""
    return bool(joinable._join_config.enable)


# State on demand, snapshots and records


def set_patience(snapshots: Snapshots, seconds: float) -> None:
    """How long ranks of a host wait for others that allocate."""
    snapshots._budget.patience = seconds
