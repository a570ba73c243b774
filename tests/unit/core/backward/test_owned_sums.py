"""Sums of buckets on their owners, and the scratches and views of the reducer's buckets, without DDP.

The reducer is played by tests: a bucket's buffer, and the views of it that ``param.grad`` becomes.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.backward import owned_sums
from ddp_zero.core.backward.owned_sums import (
    BucketMemory,
    ReduceContext,
    ReducedRuns,
    ReducedSegment,
    ReduceOptions,
    ScratchLayout,
    options_of_stage,
)
from ddp_zero.core.backward.reducer import NewBucket, windows_in_bucket
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import Ownership, ParameterSpec, bucket_of
from ddp_zero.core.step.rank_shard import Shard

RANK_0, RANK_1 = GroupRank(0), GroupRank(1)

# Options


@pytest.mark.parametrize(
    ("stage", "error"),
    [("2", TypeError), (2.0, TypeError), (True, TypeError), (None, TypeError), (0, ValueError), (3, ValueError)],
)
def test_a_stage_that_is_not_1_or_2_is_refused(stage: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Expected stage .*got .*\[ZERO-103\]"):
        options_of_stage(stage, None, None)


def test_stage_2_alone_has_options_of_its_reduction() -> None:
    assert options_of_stage(1, None, None) is None
    assert options_of_stage(2, torch.bfloat16, 4) == ReduceOptions(torch.bfloat16, 4)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, None), (None, 2.0), (torch.float16, 2.0)])
def test_options_of_stage_2_are_refused_in_stage_1(dtype: torch.dtype | None, factor: float | None) -> None:
    with pytest.raises(ValueError, match=r"need stage=2, got .* with stage=1.*\[ZERO-105\]"):
        options_of_stage(1, dtype, factor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_in_which_gradients_cannot_travel_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"grad_comm_dtype .*\[ZERO-103\]"):
        ReduceOptions(dtype)


@pytest.mark.parametrize(
    ("factor", "error"),
    [("2", TypeError), (True, TypeError), (0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)],
)
def test_a_divisor_that_is_no_positive_number_is_refused(factor: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"gradient_predivide_factor .*\[ZERO-103\]"):
        ReduceOptions(None, factor)


# A rank without peers that has some pieces of its parameters


class Rank:
    """Parameters, the ranks that own them, and the context in which their buckets are reduced."""

    def __init__(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Pieces],
        options: ReduceOptions | None = None,
        num_summed: int = 1,
        world_size: int = 1,
        direct: bool = False,
    ) -> None:
        self.params, self.pieces, self.world_size = params, pieces, world_size
        comm = SimpleNamespace(
            group_rank=RANK_0,
            world_size=world_size,
            name=lambda rank: f"rank {rank}",
            has_rings=lambda device, nbytes: False,
            has_direct_messages=lambda device: direct,
            averages=lambda parts: False,
            sum_recv_numel=lambda device, sizes: 0,
        )
        sharded = SimpleNamespace(
            table=ParameterTable([{"params": list(params)}]),
            comm=comm,
            everyone=SimpleNamespace(world_size=num_summed),
            ranks=SimpleNamespace(shard=comm, replicas=None),
            binding=SimpleNamespace(digest=17, cuts=False),
            stepped=SimpleNamespace(own_part=lambda index, value: value),
            trace=SimpleNamespace(label=lambda *_: nullcontext()),
        )
        self.shard = cast(Shard, sharded)
        self.context = ReduceContext(self.shard, SideStream(), options or ReduceOptions())

    def layout(self, indices: Sequence[int], number: int = 0, stepped: Sequence[int] | None = None) -> ScratchLayout:
        """Of a bucket with these parameters, in DDP's order, of which all or some are stepped."""
        specs = [ParameterSpec(param.numel(), param.nbytes, "cpu/float32") for param in self.params]
        active = sorted(indices if stepped is None else stepped)
        bucket = bucket_of(Ownership(self.world_size, tuple(specs), tuple(self.pieces)), active, number)
        return ScratchLayout([self.params[index] for index in indices], bucket, self.shard, SideStream())

    def filled(self, layout: ScratchLayout, *values: float) -> Tensor:
        """A lent scratch in which every parameter's gradient has one value."""
        scratch = self.context.scratches.lend(layout.nbytes, layout.device)
        for param, value in zip(layout.params, values, strict=True):
            layout.windows[param].view(layout.flat(scratch)).fill_(value)
        return scratch


def alone(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, **options: Any) -> Rank:
    """A rank that owns all of its parameters."""
    params = [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in shapes]
    return Rank(params, [whole(RANK_0, param.numel()) for param in params], **options)


# Where gradients lie in a scratch


def test_slices_lie_in_rank_order_and_gradients_that_nobody_steps_after_them() -> None:
    params = [nn.Parameter(torch.zeros(numel)) for numel in (2, 3, 4, 5)]
    rank = Rank(params, [whole(owner, len(p)) for owner, p in zip([1, 0, 1, 0], params, strict=True)], world_size=2)  # type: ignore[arg-type]
    layout = rank.layout([3, 2, 1, 0], stepped=[0, 1, 3])
    assert [layout.windows[param].offset for param in params] == [8, 0, 10, 3]
    assert layout.ranges == [(0, 8), (8, 10)]
    assert (layout.numel, layout.nbytes) == (14, 56)
    assert list(layout.owned) == [1, 3]
    assert layout.indices == [3, 2, 1, 0], "DDP's order"
    assert 2 not in layout.pieces


def test_a_cut_parameter_lies_whole_across_the_slices_of_its_owners() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    cut = (Piece(RANK_0, 0, 4), Piece(RANK_1, 4, 6))
    rank = Rank(params, [whole(RANK_0, 2), cut, whole(RANK_1, 4)], world_size=2)
    layout = rank.layout([0, 1, 2])
    assert layout.ranges == [(0, 6), (6, 12)]
    assert layout.windows[params[1]].offset == 2
    assert layout.windows[params[1]].shape == (2, 3)
    assert (layout.own_windows[1].offset, layout.own_windows[1].shape) == (2, (4,)), "1-D of this rank's part"
    assert layout.pieces[1] == cut


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    layout = Rank([param], [whole(RANK_0, param.numel())]).layout([0])
    assert layout.own_windows[0].view(torch.zeros(96)).stride() == param.stride()


# A bucket in flight, and its sum


def test_a_sum_is_averaged_in_place_in_its_scratch() -> None:
    rank = alone([2, 2], [3], num_summed=4)
    layout = rank.layout([1, 0])
    scratch = rank.filled(layout, 4.0, 8.0)
    arrival = ReducedSegment(rank.context, layout, scratch)
    arrival.wait()
    assert arrival.is_summed
    assert torch.equal(arrival.gradient(0), torch.full((2, 2), 2.0))
    assert torch.equal(arrival.gradient(1), torch.full((3,), 1.0))
    assert arrival.gradient(0).untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
    assert arrival.in_accumulation_dtype(0) is None


def test_the_rest_of_a_divisor_is_applied_after_the_sum() -> None:
    rank = alone([2], options=ReduceOptions(predivide_factor=2.0), num_summed=8)
    assert (rank.context.factor, rank.context.late_factor) == (0.5, 0.25)
    layout = rank.layout([0])
    arrival = ReducedSegment(rank.context, layout, rank.filled(layout, 16.0))
    arrival.wait()
    arrival.wait()
    assert arrival.gradient(0).tolist() == [2, 2], "scaled once, however often it is waited for"


def test_sums_of_earlier_passes_are_added_once_to_buckets_that_have_them() -> None:
    rank = alone([2], [2], [2])
    rank.context.carried.update({0: torch.full((2,), 10.0), 2: torch.full((2,), 30.0)})
    layout = rank.layout([1, 0])
    arrival = ReducedSegment(rank.context, layout, rank.filled(layout, 1.0, 1.0))
    arrival.wait()
    assert [arrival.gradient(index).tolist() for index in (0, 1)] == [[11, 11], [1, 1]]
    assert set(rank.context.carried) == {2}, "of a bucket that is still to come"


def test_a_bf16_sum_is_in_fp32_and_several_add_up_there() -> None:
    rank = alone([2], dtype=torch.bfloat16)
    rank.context.carried[0] = torch.full((2,), 1.0 + 2.0**-12)
    layout = rank.layout([0])
    arrival = ReducedSegment(rank.context, layout, rank.filled(layout, 2.0))
    arrival.wait()
    exact = arrival.in_accumulation_dtype(0)
    assert exact is not None
    assert exact.tolist() == [3.0 + 2.0**-12] * 2
    assert arrival.gradient(0).dtype == torch.bfloat16
    assert arrival.nbytes == 8


def test_a_kept_sum_outlives_its_scratch() -> None:
    rank = alone([2])
    layout = rank.layout([0])
    scratch = rank.filled(layout, 3.0)
    arrival = ReducedSegment(rank.context, layout, scratch)
    arrival.keep()
    assert rank.context.scratches.lend(layout.nbytes, layout.device) is not scratch, "in use until it is summed"
    arrival.wait()
    arrival.keep()
    assert rank.context.scratches.lend(layout.nbytes, layout.device) is scratch
    scratch.zero_()
    arrival.keep()
    arrival.release()
    assert rank.context.scratches.lend(layout.nbytes, layout.device) is not scratch, "given back once"


def test_a_kept_sum_has_its_values_after_the_next_bucket_has_filled_the_scratch() -> None:
    rank = alone([2])
    layout = rank.layout([0])
    scratch = rank.filled(layout, 3.0)
    arrival = ReducedSegment(rank.context, layout, scratch)
    arrival.wait()
    arrival.keep()
    scratch.fill_(255)
    assert arrival.gradient(0).tolist() == [3, 3]


def test_a_released_bucket_holds_nothing() -> None:
    rank = alone([2])
    layout = rank.layout([0])
    scratch = rank.filled(layout, 3.0)
    arrival = ReducedSegment(rank.context, layout, scratch)
    arrival.wait()
    assert (arrival.nbytes, arrival.is_released) == (8, False)
    arrival.release()
    assert (arrival.nbytes, arrival.is_released) == (0, True)
    assert rank.context.scratches.lend(layout.nbytes, layout.device) is scratch


def test_a_sum_that_was_handed_over_replaces_the_one_that_was_reduced_here() -> None:
    rank = alone([2], dtype=torch.bfloat16)
    layout = rank.layout([0])
    arrival = ReducedSegment(rank.context, layout, rank.filled(layout, 3.0))
    arrival.wait()
    total = torch.full((2,), 7.0)
    arrival.receive(0, total)
    assert arrival.total(0) is total
    assert arrival.in_accumulation_dtype(0) is total
    assert arrival.gradient(0).tolist() == [7, 7]
    assert arrival.gradient(0).dtype == torch.bfloat16


def test_runs_of_a_large_bucket_answer_as_one() -> None:
    rank = alone([2], [3])
    runs = []
    for index, value in ((1, 5.0), (0, 4.0)):
        layout = rank.layout([index])
        runs.append(ReducedSegment(rank.context, layout, rank.filled(layout, value)))
        runs[-1].wait()
        runs[-1].keep()
    both = ReducedRuns(runs)
    assert (both.indices, both.owned, both.nbytes, both.is_summed) == ([1, 0], [1, 0], 20, True)
    assert both.params == [rank.params[1], rank.params[0]]
    assert [both.gradient(index).tolist() for index in (0, 1)] == [[4, 4], [5, 5, 5]]
    both.receive(0, torch.full((2,), 9.0))
    assert both.total(0).tolist() == [9, 9]
    assert rank.context.scratches.statistics.most_lent == 1
    both.release()
    assert all(run.is_released for run in runs)


# Sums prepared once for memory that is lent again


class Prepared:
    """In place of `DirectSum`."""

    built: list["Prepared"]

    def __init__(
        self, comm: Any, parts: Sequence[Tensor], out: Tensor, recv_buffer: Tensor, limit: int, factor: float
    ) -> None:
        self.out, self.recv_buffer, self.factor = out, recv_buffer, factor
        self.subjects: list[tuple[int, ...]] = []
        self.built.append(self)

    def start(self, subject: tuple[int, ...]) -> None:
        self.subjects.append(subject)

    def wait(self) -> Tensor:
        return self.out.mul_(self.factor)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    Prepared.built = []
    monkeypatch.setattr(owned_sums, "DirectSum", Prepared)
    return Prepared.built


def with_peer(options: ReduceOptions | None = None, dtype: torch.dtype = torch.float32) -> Rank:
    """The first of two ranks, of which each owns a parameter."""
    params = [nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(2)]
    return Rank(params, [whole(RANK_0, 64), whole(RANK_1, 64)], options, num_summed=2, world_size=2, direct=True)


def test_a_sum_is_prepared_once_for_the_same_scratch_and_recv_buffer(prepared: list[Prepared]) -> None:
    rank = with_peer()
    layout = rank.layout([0, 1])
    rank.context.furnish([layout])
    for _ in range(3):
        arrival = ReducedSegment(rank.context, layout, rank.filled(layout, 6.0, 8.0))
        arrival.wait()
        assert torch.equal(arrival.gradient(0), torch.full((64,), 3.0))
        arrival.release()
    assert len(prepared) == 1
    assert prepared[0].subjects == [(17, 0)] * 3, "the plan and the bucket, which peers must share"
    assert rank.context.recv_buffers.statistics.most_lent == 1


def test_a_sum_is_prepared_anew_in_other_memory_and_after_a_buffer_was_dropped(prepared: list[Prepared]) -> None:
    rank = with_peer()
    layout = rank.layout([0, 1])
    rank.context.furnish([layout])
    first, second = rank.filled(layout, 6.0, 8.0), rank.filled(layout, 2.0, 4.0)
    arrivals = [ReducedSegment(rank.context, layout, scratch) for scratch in (first, second)]
    for arrival in arrivals:
        arrival.wait()
    assert [arrival.gradient(0)[0].item() for arrival in arrivals] == [3, 1]
    assert len(prepared) == 2
    for arrival in arrivals:
        arrival.release()
    known = rank.context.prepare(layout, first, None)
    assert rank.context.prepare(layout, first, None) is known
    rank.context.scratches.trim()
    rank.context.scratches.trim()  # drops both, since nothing has used them: their addresses may be used again
    assert rank.context.prepare(layout, first, None) is not known


@pytest.mark.parametrize(
    ("options", "dtype", "prepares"),
    [
        (ReduceOptions(), torch.float32, True),
        (ReduceOptions(torch.float32), torch.float32, True),
        (ReduceOptions(torch.bfloat16), torch.float32, False),
        (ReduceOptions(), torch.bfloat16, False),
        (ReduceOptions(torch.float64), torch.float32, True),
    ],
)
def test_only_sums_in_place_are_prepared(options: ReduceOptions, dtype: torch.dtype, prepares: bool) -> None:
    rank = with_peer(options, dtype)
    layout = rank.layout([0, 1])
    assert rank.context.prepares(layout, torch.empty(layout.nbytes, dtype=torch.uint8)) == prepares


# The reducer's buckets and their scratches


class Reducer:
    """One of DDP's buckets: its own memory, and the views that ``param.grad`` becomes."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.buffer = torch.zeros(sum(param.numel() for param in params))
        self.views = {param: window.view(self.buffer) for param, window in windows_in_bucket(params).items()}

    def fill(self, *values: float | None) -> None:
        """Backward: a gradient lands where its view points; None: the parameter is unused."""
        for param, value in zip(self.params, values, strict=True):
            param.grad = None if value is None else self.views[param].fill_(value)

    def publish(self) -> None:
        """The end of backward: views become gradients."""
        for param in self.params:
            param.grad = self.views[param]


class Buckets:
    """Two buckets of two parameters each, owned by a rank without peers."""

    def __init__(self) -> None:
        self.rank = alone([8], [8], [8], [8])
        self.memory = BucketMemory(self.rank.context)
        self.reducers = [Reducer([self.rank.params[index] for index in pair]) for pair in ((3, 2), (1, 0))]
        self.layouts = [self.rank.layout([3, 2], 0), self.rank.layout([1, 0], 1)]

    @property
    def scratches(self) -> Any:
        return self.rank.context.scratches

    def lay_out(self) -> None:
        """As after the first iteration, of which all views were seen as DDP built its buckets."""
        self.rank.context.furnish(self.layouts)
        built = [NewBucket(list(one.params), one.buffer, one.views) for one in self.reducers]
        self.memory.lay_out(self.layouts, built)
        self.memory.end_iteration(0, is_in_flight=False)

    def take(self, number: int) -> Tensor:
        """A full bucket's gradients, from its scratch."""
        return self.layouts[number].flat(self.memory.take(self.layouts[number], self.reducers[number].buffer))


def values_of(buckets: Buckets, number: int, flat: Tensor) -> list[float]:
    layout = buckets.layouts[number]
    return [layout.windows[param].view(flat)[0].item() for param in layout.params]


def test_the_first_buckets_are_moved_out_of_the_reducers_own_memory() -> None:
    buckets = Buckets()
    own = buckets.reducers[0].buffer.data_ptr()
    buckets.reducers[0].fill(3.0, 2.0)
    assert buckets.memory.is_in_own_memory(0)
    flat = buckets.take(0)
    assert values_of(buckets, 0, flat) == [3, 2]
    assert not buckets.memory.is_in_own_memory(0)
    assert [param.grad for param in buckets.reducers[0].params] == [None, None], "the reducer sets it to its views"
    assert buckets.reducers[0].buffer.data_ptr() == flat.data_ptr() != own
    buckets.reducers[0].publish()
    buckets.memory.capture()
    assert buckets.memory.follows
    assert all(buckets.memory.is_view(param, cast(Tensor, param.grad)) for param in buckets.reducers[0].params)


def test_a_reducer_that_does_not_follow_its_views_keeps_its_own_memory(caplog: pytest.LogCaptureFixture) -> None:
    buckets = Buckets()
    buckets.reducers[0].fill(3.0, 2.0)
    buckets.take(0)
    for param in buckets.reducers[0].params:
        param.grad = torch.ones(8)  # elsewhere
    buckets.memory.capture()
    assert not buckets.memory.follows
    assert "does not write gradients where its views point" in caplog.text
    assert "beside DDP's buckets, which are freed after backward" in buckets.memory.describe()
    buckets.memory.point(0)
    assert not buckets.memory.lent


def test_gradients_land_in_the_scratch_that_was_lent_for_their_bucket() -> None:
    buckets = Buckets()
    buckets.lay_out()
    for number, values in enumerate([(3.0, 2.0), (1.0, 5.0)]):
        buckets.memory.point(number)
        lent = buckets.memory.lent[number]
        buckets.memory.point(number)
        assert buckets.memory.lent[number] is lent, "lent once"
        buckets.reducers[number].fill(*values)
        flat = buckets.take(number)
        assert flat.data_ptr() == lent.data_ptr(), "nothing is copied"
        assert values_of(buckets, number, flat) == list(values)
        assert number not in buckets.memory.lent, "the caller has it"


def test_idle_buckets_share_one_scratch() -> None:
    buckets = Buckets()
    buckets.rank.context.furnish(buckets.layouts)
    for number in (0, 1):
        buckets.reducers[number].fill(1.0, 2.0)
        buckets.scratches.give_back(buckets.memory.take(buckets.layouts[number], buckets.reducers[number].buffer))
        buckets.reducers[number].publish()
    buckets.memory.capture()
    buckets.memory.lay_out([buckets.rank.layout([3, 2], 0), buckets.rank.layout([1, 0], 1)], [])
    buckets.memory.end_iteration(2, is_in_flight=False)
    assert buckets.reducers[0].buffer.data_ptr() == buckets.reducers[1].buffer.data_ptr()
    assert buckets.scratches.statistics.held_bytes == buckets.layouts[0].nbytes


def test_places_of_unused_parameters_are_zero_in_a_scratch_that_was_used_before() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    buckets.memory.lent[0].fill_(255)  # by the bucket that had it before
    buckets.reducers[0].fill(None, 2.0)
    assert values_of(buckets, 0, buckets.take(0)) == [0, 2]
    assert buckets.memory.follows


def test_a_gradient_in_other_memory_is_copied_to_its_place() -> None:
    """As of an earlier pass that was not reduced."""
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    buckets.reducers[0].fill(3.0, 2.0)
    buckets.rank.params[2].grad = torch.full((8,), 9.0)
    assert values_of(buckets, 0, buckets.take(0)) == [3, 9]
    assert not buckets.memory.follows, "the view was known, and was not used"


def test_a_gradient_that_has_landed_in_a_scratch_that_was_given_back_is_refused() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    buckets.reducers[0].fill(3.0, 2.0)
    buckets.scratches.give_back(buckets.memory.lent.pop(0))
    with pytest.raises(RuntimeError, match=r"parameter 2 .*in memory that was not prepared \(rank 0\).*\[ZERO-407\]"):
        buckets.take(0)


def test_a_joined_rank_sends_zeros() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.reducers[0].fill(3.0, 2.0)  # of its last iteration
    flat = buckets.layouts[0].flat(buckets.memory.take(buckets.layouts[0], None))
    assert values_of(buckets, 0, flat) == [0, 0]


def test_scratches_without_a_gradient_come_back_after_a_pass_that_is_not_reduced() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    buckets.memory.point(1)
    kept = buckets.memory.lent[1]
    buckets.reducers[1].fill(1.0, None)
    buckets.memory.give_back_unfilled()
    assert list(buckets.memory.lent.items()) == [(1, kept)], "a view of it is still a gradient"
    buckets.rank.params[1].grad = None
    buckets.memory.give_back_unfilled()
    assert not buckets.memory.lent


def test_the_scratches_of_replaced_buckets_come_back_and_their_views_are_forgotten() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    lent = buckets.memory.lent[0]
    buckets.memory.note_buffer(0, buckets.reducers[0].buffer)
    assert not buckets.memory.is_in_own_memory(0)
    buckets.memory.note_buffer(0, None)  # a joined rank's
    assert not buckets.memory.is_in_own_memory(0)
    buckets.memory.note_buffer(0, torch.zeros(16))
    assert buckets.memory.is_in_own_memory(0)
    assert not buckets.memory.lent
    assert buckets.scratches.lend(64, torch.device("cpu"), like=lent) is lent


def test_an_iteration_ends_with_the_scratches_of_its_buckets_alone() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    buckets.memory.point(1)
    second = buckets.memory.lent[1]
    buckets.memory.end_iteration(1, is_in_flight=False)
    assert list(buckets.memory.lent.items()) == [(1, second)]


def test_buffers_that_peers_may_read_are_left_to_them_by_a_reset() -> None:
    buckets = Buckets()
    buckets.lay_out()
    buckets.memory.point(0)
    in_flight = buckets.memory.lent[0]
    buckets.memory.point(1)
    idle = buckets.memory.lent.pop(1)
    buckets.scratches.give_back(idle)
    buckets.memory.reset()
    assert not buckets.memory.lent
    assert buckets.scratches.statistics.held_bytes == 0, "of new pools: a peer may read the idle ones too"
    buckets.memory.point(0)
    assert buckets.memory.lent[0] is not in_flight
    assert buckets.memory.lent[0] is not idle
    assert buckets.reducers[0].buffer.data_ptr() == buckets.memory.lent[0].data_ptr()


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_pages_of_idle_buffers_go_unless_peers_may_still_read_them(
    is_in_flight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = alone(*[[8]] * 8)
    memory = BucketMemory(rank.context)
    memory.lay_out([rank.layout([index], index) for index in range(8)], [])
    rank.context.furnish(memory.layouts)
    rests: list[bool] = []
    for pool in (rank.context.scratches, rank.context.recv_buffers):
        monkeypatch.setattr(pool, "rest", lambda: rests.append(True))
    held = [rank.context.scratches.lend(32, torch.device("cpu")) for _ in range(2)]
    memory.end_iteration(0, is_in_flight)
    assert rests == ([] if is_in_flight else [True, True])
    rests.clear()
    held.append(rank.context.recv_buffers.lend(32, torch.device("cpu")))
    memory.end_iteration(0, is_in_flight=False)
    assert not rests, "large beside the model: to touch them again would cost time"


def test_memory_of_a_reducer_that_does_not_follow_is_freed_between_backward_passes() -> None:
    buckets = Buckets()
    buckets.memory.lay_out(buckets.layouts, [])
    buckets.memory.follows = False
    for reducer, number in zip(buckets.reducers, (0, 1), strict=True):
        reducer.fill(3.0, 2.0)
        buckets.take(number)
        reducer.publish()
    buckets.memory.capture()
    buckets.memory.end_iteration(2, is_in_flight=False)
    assert [reducer.buffer.untyped_storage().nbytes() for reducer in buckets.reducers] == [0, 0]
    buckets.memory.prepare()
    assert [reducer.buffer.untyped_storage().nbytes() for reducer in buckets.reducers] == [64, 64]


def test_what_buckets_have_needed_is_said_with_the_option_that_would_save_some() -> None:
    buckets = Buckets()
    buckets.lay_out()
    for number in (0, 1):
        buckets.memory.point(number)
    said = buckets.memory.describe()
    assert said.startswith("gradients: at most 2 scratch buffers shared by DDP's buckets, 0 to receive into, 128 bytes")
    assert "would save" not in said
    rank = alone(*[[1 << 18]] * 16)
    memory = BucketMemory(rank.context)
    memory.lay_out([rank.layout(range(16))], [])
    assert re.search(
        r"by formula 3 x 16,777,216; DistributedDataParallel\(bucket_cap_mb.*\) would save up to 47,185,920$",
        memory.describe(),
    )
