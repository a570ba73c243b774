"""Stage 2 in a job of one process, with the real reducer; and sums that travel to new owners, with a scripted peer."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer
from ddp_zero.core.backward.forward_passes import ForwardPasses
from ddp_zero.core.backward.gradients import Gradients
from ddp_zero.core.backward.owned_sums import ReducedSegment, ReduceOptions
from ddp_zero.core.backward.partitioned import PartitionedGradients, gradients_of_stage, hand_over
from ddp_zero.core.backward.scratch_buffers import SideStream
from ddp_zero.core.backward.visible_gradients import SummedGradients, VisibleGradients
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.local.placeholders import AbsentGradient
from ddp_zero.core.plan.buckets import SCRATCHES
from ddp_zero.core.plan.ownership import Piece, Pieces, whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.optimizer import engine_of, shard_of

RANK_0, RANK_1, RANK_2 = GroupRank(0), GroupRank(1), GroupRank(2)


@pytest.fixture
def job() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


def partitioned(**options: Any) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """Stage 2 with a bucket for about each parameter."""
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    return ddp, cast(ZeroRedundancyOptimizer, shard_optimizer(ddp, SGD, stage=2, lr=0.1, **options))


def backward(ddp: nn.Module, number: int) -> None:
    ddp(batch(number)).square().sum().backward()


def grads(ddp: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in ddp.parameters()]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.usefixtures("job")
def test_gradients_of_owned_parameters_are_shown_where_a_step_follows() -> None:
    ddp, _ = partitioned(overlap=False)
    plain = model()
    for number in range(3):
        for one in (ddp, plain):
            one.zero_grad()
            backward(one, number)
        assert_equal(grads(ddp), grads(plain))


@pytest.mark.usefixtures("job")
def test_a_step_inside_backward_leaves_placeholders_that_refuse_a_further_pass() -> None:
    ddp, opt = partitioned(overlap=True)
    backward(ddp, 0)
    opt.step()
    opt.zero_grad()
    before = [param.detach().clone() for param in ddp.parameters()]
    backward(ddp, 1)
    assert all(isinstance(grad, AbsentGradient) and grad.consumed for grad in grads(ddp))
    assert not any(map(torch.equal, before, ddp.parameters()))
    opt.step()
    with pytest.raises(RuntimeError, match=r"\[ZERO-403\]"):
        backward(ddp, 2)


@pytest.mark.usefixtures("job")
def test_sums_are_carried_over_passes_in_any_number() -> None:
    ddp, opt = partitioned(overlap=False)
    for passes in (2, 1, 3):
        opt.zero_grad()
        total = [torch.zeros_like(param) for param in ddp.parameters()]
        for number in range(passes):
            if number < passes - 1:
                with opt.accumulate():
                    backward(ddp, number)
            else:
                backward(ddp, number)
            plain = model()
            backward(plain, number)
            # DDP's order: the sum so far comes second
            total = [cast(Tensor, grad) + earlier for earlier, grad in zip(total, grads(plain), strict=True)]
            assert_equal(grads(ddp), total)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("overlap", [True, False])
def test_two_scratches_serve_any_number_of_buckets_and_come_back(overlap: bool) -> None:
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)])
    ddp = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=1e-3)
    opt = shard_optimizer(ddp, SGD, stage=2, lr=0.1, overlap=overlap)
    hook = engine_of(opt).hook
    assert hook is not None
    ends: list[tuple[int, int]] = []
    for _ in range(4):
        ddp(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
        ends.append(hook.gradients.buffer_bytes())
    buckets = shard_of(opt).plan.buckets
    assert len(buckets) >= 4
    largest = 4 * max(bucket.segments[0].numel for bucket in buckets)
    assert all(held <= SCRATCHES * largest for held, _ in ends[1:])
    assert len(set(ends[1:])) == 1, "no buffer is lost from iteration to iteration"
    assert "at most 2 scratch buffers" in hook.gradients.describe()[0]


@pytest.mark.usefixtures("job")
def test_a_pass_that_is_not_reduced_is_refused_on_top_of_an_average_and_added_by_a_new_iteration() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    with ddp.no_sync(), pytest.raises(RuntimeError, match=r"\[ZERO-405\]"):
        backward(ddp, 1)
    opt.reset()
    opt.zero_grad()
    with ddp.no_sync():
        backward(ddp, 1)
    backward(ddp, 2)
    plain = model()
    backward(plain, 1)
    backward(plain, 2)
    assert_equal(grads(ddp), grads(plain))


@pytest.mark.usefixtures("job")
def test_a_penalty_outside_of_ddp_is_added_to_the_averages_and_refuses_a_further_pass() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    averages = [cast(Tensor, grad).clone() for grad in grads(ddp)]
    torch.stack([param.sum() for param in ddp.module.parameters()]).sum().backward()
    assert_equal(grads(ddp), [average + 1 for average in averages])
    with pytest.raises(RuntimeError, match=r"\[ZERO-404\]"):
        backward(ddp, 1)
    opt.reset()


@pytest.mark.usefixtures("job")
def test_a_new_hook_leaves_no_gradient_of_the_old_one() -> None:
    ddp, opt = partitioned(overlap=False)
    backward(ddp, 0)
    hook = engine_of(opt).hook
    assert hook is not None
    hook.gradients.detach()
    assert grads(ddp) == [None] * 6


# Which gradients a stage has


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("options", "sums_in_fp32", "kind"),
    [
        (None, False, Gradients),
        (None, True, SummedGradients),
        (ReduceOptions(), False, PartitionedGradients),
        (ReduceOptions(), True, PartitionedGradients),
    ],
)
def test_a_stage_has_gradients_of_its_own(options: ReduceOptions | None, sums_in_fp32: bool, kind: type) -> None:
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    sharded = shard_of(ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1))
    passes = ForwardPasses(lambda _: None)
    assert type(gradients_of_stage(options, sharded, ddp, None, SideStream(), passes, sums_in_fp32)) is kind


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("as_views", "hook", "leaves_out", "error"),
    [
        (False, None, 0, r"gradient_as_bucket_view=True with stage=2.*\[ZERO-210\]"),
        (True, print, 0, r"cannot wrap a communication hook.*\[ZERO-211\]"),
        (True, None, 2, r"needs every parameter that DDP reduces.*'4.weight' is not, 2 in all.*\[ZERO-212\]"),
    ],
)
def test_a_model_that_does_not_fit_stage_2_is_refused(as_views: bool, hook: Any, leaves_out: int, error: str) -> None:
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=as_views)
    params = list(ddp.parameters())
    sharded = shard_of(ZeroRedundancyOptimizer(params[: len(params) - leaves_out], SGD, lr=0.1))
    with pytest.raises(ValueError, match=error):
        gradients_of_stage(
            ReduceOptions(), sharded, ddp, hook, SideStream(), ForwardPasses(lambda _: None), sums_in_fp32=False
        )


# Sums that travel to new owners


class Peers:
    """A communicator of rank 0 of three: others state these numbers, and send sums of these values."""

    group_rank, world_size = RANK_0, 3

    def __init__(self, stated: Sequence[int], receives: Mapping[int, Tensor]) -> None:
        self.stated, self.receives = list(stated), receives
        self.told: list[list[int]] = []
        self.sent: list[tuple[int, list[float]]] = []

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def all_gather_ints(self, mine: list[int]) -> list[list[int]]:
        self.told.append(mine)
        return [mine, self.stated, self.stated]

    def send_tree(self, tensor: Tensor, target: int) -> None:
        assert tensor.is_contiguous()
        self.sent.append((target, tensor.reshape(-1).tolist()))

    def receive_tree(self, source: int, device: torch.device) -> Tensor:
        return self.receives[source]


class Arrived:
    """A reduced bucket with these sums on this rank."""

    def __init__(self, pieces: Mapping[int, Pieces], sums: Mapping[int, Tensor]) -> None:
        self.pieces, self.sums = pieces, dict(sums)
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def total(self, index: int) -> Tensor:
        return self.sums[index]

    gradient = total

    def in_accumulation_dtype(self, index: int) -> None:
        return None

    def receive(self, index: int, total: Tensor) -> None:
        self.sums[index] = total


class Shown:
    """In place of `VisibleGradients`."""

    def __init__(self, taken: Sequence[int]) -> None:
        self.taken, self.shown = set(taken), dict[int, list[float]]()

    def was_taken(self, index: int) -> bool:
        return index in self.taken

    def note_taken(self, index: int) -> None:
        self.taken.add(index)

    def show(self, index: int, grad: Tensor, exact: Tensor | None) -> None:
        self.shown[index] = grad.reshape(-1).tolist()


def cut_at(numel: int, *ends: tuple[GroupRank, int]) -> Pieces:
    starts = [0, *(stop for _, stop in ends)]
    assert starts[-1] == numel
    return tuple(Piece(owner, start, stop) for (owner, stop), start in zip(ends, starts, strict=False))


def handed_over(
    before: Pieces,
    after: Pieces,
    mine: Tensor | None,
    *,
    receives: Mapping[int, Tensor] | None = None,
    stated: int = 0,
    taken: bool = False,
    publishes: bool = True,
    has_grad: bool = True,
) -> tuple[Peers, Arrived, Shown]:
    """The sum of a parameter of six elements in two rows, whose owners change."""
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = torch.ones(2, 3) if has_grad else None
    peers = Peers([stated], receives or {})
    sharded = SimpleNamespace(
        comm=peers, table=ParameterTable([{"params": [param]}]), binding=SimpleNamespace(pieces=[after])
    )
    arrived, shown = Arrived({0: before}, {} if mine is None else {0: mine}), Shown([0] if taken else [])
    hand_over(
        cast(Shard, sharded),
        [cast(ReducedSegment, arrived)],
        cast(VisibleGradients, shown),
        publishes,
    )
    return peers, arrived, shown


SUM = torch.arange(6.0).view(2, 3)


def test_nothing_travels_while_owners_stay() -> None:
    peers, arrived, _ = handed_over(whole(RANK_0, 6), whole(RANK_0, 6), SUM)
    assert (peers.told, peers.sent, arrived.waits) == ([], [], 0), "no message at all"


def test_a_sum_is_sent_to_its_new_owner_and_received_there() -> None:
    peers, arrived, shown = handed_over(whole(RANK_0, 6), whole(RANK_1, 6), SUM)
    assert peers.sent == [(RANK_1, [0, 1, 2, 3, 4, 5])]
    assert arrived.waits == 1, "complete before it travels"
    assert shown.shown == {}
    peers, arrived, shown = handed_over(whole(RANK_2, 6), whole(RANK_0, 6), None, receives={RANK_2: SUM})
    assert arrived.sums[0] is SUM
    assert shown.shown == {0: [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("publishes", "has_grad", "stated", "is_shown"),
    [(True, True, 0, True), (True, False, 0, False), (True, False, 1, True), (False, True, 1, False)],
)
def test_a_received_sum_is_shown_if_this_rank_publishes_and_any_rank_has_a_gradient(
    publishes: bool, has_grad: bool, stated: int, is_shown: bool
) -> None:
    peers, _, shown = handed_over(
        *(whole(RANK_2, 6), whole(RANK_0, 6), None),
        receives={RANK_2: SUM},
        publishes=publishes,
        has_grad=has_grad,
        stated=stated,
    )
    assert peers.told == [[0]]
    assert bool(shown.shown) == is_shown
    assert shown.was_taken(0) == bool(stated), "what its old owner had carried over counts as carried here"


def test_ranks_say_what_they_have_carried_over() -> None:
    peers, _, _ = handed_over(whole(RANK_0, 6), whole(RANK_1, 6), SUM, taken=True)
    assert peers.told == [[1]]


def test_a_rank_that_keeps_a_part_sends_the_rest_and_receives_what_is_new() -> None:
    peers, arrived, _ = handed_over(
        cut_at(6, (RANK_1, 1), (RANK_0, 4), (RANK_2, 6)),
        cut_at(6, (RANK_1, 2), (RANK_0, 6)),
        torch.tensor([1.0, 2.0, 3.0]),
        receives={RANK_2: torch.tensor([40.0, 50.0])},
    )
    assert peers.sent == [(RANK_1, [1])]
    assert arrived.sums[0].tolist() == [2, 3, 40, 50]


def test_a_cut_sum_becomes_whole_again_in_the_shape_of_its_parameter() -> None:
    _, arrived, _ = handed_over(
        cut_at(6, (RANK_0, 2), (RANK_1, 6)),
        whole(RANK_0, 6),
        torch.tensor([0.0, 1.0]),
        receives={RANK_1: torch.arange(2.0, 6.0)},
    )
    assert torch.equal(arrived.sums[0], SUM)


def test_a_whole_sum_is_cut_for_its_owners() -> None:
    peers, arrived, _ = handed_over(whole(RANK_0, 6), cut_at(6, (RANK_2, 2), (RANK_0, 5), (RANK_1, 6)), SUM)
    assert peers.sent == [(RANK_2, [0, 1]), (RANK_1, [5])]
    assert arrived.sums[0].tolist() == [2, 3, 4]


def test_a_rank_that_owns_nothing_any_more_keeps_no_sum_of_it() -> None:
    peers, arrived, shown = handed_over(
        cut_at(6, (RANK_0, 3), (RANK_1, 6)), cut_at(6, (RANK_2, 3), (RANK_1, 6)), torch.tensor([7.0, 8.0, 9.0])
    )
    assert peers.sent == [(RANK_2, [7, 8, 9])]
    assert arrived.sums[0].tolist() == [7, 8, 9], "nothing is received"
    assert shown.shown == {}
