from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_zero.core.local import storage as storage_module
from ddp_zero.core.local.storage import Block, PackedStorage, ParameterStorage, ViewStorage, with_own_storage
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import ShardPlan
from tests.unit.core.local.plans import label, make_plan

MakeStorage = Callable[[ShardPlan, Sequence[Tensor]], ParameterStorage]


def as_views(plan: ShardPlan, params: Sequence[Tensor]) -> ParameterStorage:
    return ViewStorage(plan, params, label)


def packed(plan: ShardPlan, params: Sequence[Tensor]) -> ParameterStorage:
    return PackedStorage(params)


STORAGES = pytest.mark.parametrize("make_storage", [as_views, packed])


def make_params(seed: int = 0) -> list[nn.Parameter]:
    """Parameters of several layouts and dtypes; the same shapes and strides for every seed, other values."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [
        values(2, 3),
        values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        values(3, 4).t(),
        values(),
        values(0, 3),
        values(7).to(torch.bfloat16),
        values(4, 2).to(torch.complex64).t(),
        values(6, 4)[1:3],
        values(2, 1, 3, 3).contiguous(memory_format=torch.channels_last),
        values(11),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


def exchange(plan: ShardPlan, storages: Sequence[ParameterStorage]) -> None:
    """What `ParameterSync` does over the wire, for all ranks in one process."""
    for bucket in plan.buckets:
        of_rank = [storage.segments_to_sync(bucket, GroupRank(rank)) for rank, storage in enumerate(storages)]
        for owner in range(plan.world_size):
            for receiver in range(plan.world_size):
                if receiver != owner:
                    of_rank[receiver][owner].data.view(torch.uint8).copy_(of_rank[owner][owner].view(torch.uint8))
        for rank, storage in enumerate(storages):
            storage.write_back(bucket, of_rank[rank], GroupRank(rank))


def assert_segments_fit(plan: ShardPlan, storage: ParameterStorage) -> None:
    for bucket in plan.buckets:
        segments = storage.segments_to_sync(bucket, GroupRank(plan.world_size - 1))
        assert [segment.shape for segment in segments] == [(segment.numel,) for segment in bucket.segments]
        for segment, planned in zip(segments, bucket.segments, strict=True):
            nbytes = sum(plan.specs[param].nbytes for param in planned.params)
            assert segment.detach().view(torch.uint8).numel() == nbytes


# Both storages


@STORAGES
@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_after_an_exchange_every_rank_has_the_owners_values(make_storage: MakeStorage, world_size: int) -> None:
    of_rank = [make_params(seed=rank) for rank in range(world_size)]
    layouts = [(param.shape, param.stride(), param.dtype) for param in of_rank[0]]
    plan = make_plan(of_rank[0], world_size)
    assert len(plan.buckets) >= 3
    expected = [of_rank[owner][index].detach().clone() for index, owner in enumerate(plan.owners)]
    exchange(plan, [make_storage(plan, params) for params in of_rank])
    for params in of_rank:
        assert [(param.shape, param.stride(), param.dtype) for param in params] == layouts
        for param, value in zip(params, expected, strict=True):
            assert torch.equal(param, value)


@STORAGES
@pytest.mark.parametrize("tensor", [torch.ones(10)[5::10], torch.ones(0)[::2]], ids=["one element", "no elements"])
def test_the_stride_of_a_dimension_that_is_never_walked_does_not_matter(
    make_storage: MakeStorage, tensor: Tensor
) -> None:
    params = [nn.Parameter(tensor)]
    plan = make_plan(params, 1)
    assert_segments_fit(plan, make_storage(plan, params))


# Views


def make_large_params(seed: int = 0) -> list[nn.Parameter]:
    """Parameters of odd sizes whose gaps are few enough to travel."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(side, 111, generator=generator).t()) for side in (109, 111, 113, 115)]


def assert_aligned(params: Sequence[Tensor]) -> None:
    assert [param.data_ptr() % 64 for param in params] == [0] * len(params)


ITEMS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", ITEMS, ids=str)
def test_every_parameter_starts_at_a_multiple_of_64_bytes(dtype: torch.dtype) -> None:
    shapes = [(1,), (), (0, 3), (5, 7), (16,), (33,), (2, 3, 5, 7), (129,), (0,), (1, 1), (255,), (64, 3)]
    tensors = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) for shape in shapes * 3]
    tensors[6] = tensors[6].contiguous(memory_format=torch.channels_last)
    params = [nn.Parameter(tensor.clone()) for tensor in tensors]
    for world_size, cap in ((1, 10_000), (2, 300), (3, 1)):
        as_views(make_plan(params, world_size, cap), params)
        assert_aligned(params)
        for param, tensor in zip(params, tensors, strict=True):
            assert (param.shape, param.stride()) == (tensor.shape, tensor.stride())
            assert bytes(param.detach().clone().untyped_storage()) == bytes(tensor.clone().untyped_storage())


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1599, 3199, 3200, 3201, 100_001])
def test_synced_segments_are_at_most_half_a_percent_longer_than_their_parameters(numel: int) -> None:
    params = [nn.Parameter(torch.ones(numel + extra)) for extra in (0, 1, 2, 3)]
    plan = make_plan(params, 2, cap=1 << 30)
    storage = as_views(plan, params)
    for rank in (0, 1):
        for tensor, segment in zip(
            storage.segments_to_sync(plan.buckets[0], GroupRank(rank)), plan.buckets[0].segments, strict=True
        ):
            assert segment.numel <= tensor.numel() <= segment.numel * 1.005
            assert lies_in(params[segment.params[0]], tensor) or tensor.numel() == segment.numel


def lies_in(param: Tensor, memory: Tensor) -> bool:
    start = memory.data_ptr()
    return start <= param.data_ptr() and param.data_ptr() + param.nbytes <= start + memory.nbytes


def test_after_an_exchange_of_segments_with_gaps_all_ranks_have_the_owners_values() -> None:
    of_rank = [make_large_params(seed=rank) for rank in range(2)]
    plan = make_plan(of_rank[0], 2, cap=1 << 30)
    expected = [of_rank[owner][index].detach().clone() for index, owner in enumerate(plan.owners)]
    storages = [as_views(plan, params) for params in of_rank]
    lengths = {tensor.numel() for tensor in storages[0].segments_to_sync(plan.buckets[0], GroupRank(0))}
    assert lengths.isdisjoint(segment.numel for segment in plan.buckets[0].segments), "there are gaps"
    exchange(plan, storages)
    for params in of_rank:
        assert_aligned(params)
        assert all(torch.equal(param, value) for param, value in zip(params, expected, strict=True))


def test_views_of_a_packed_segment_are_sent_in_memory_order_end_to_end() -> None:
    params = [nn.Parameter(torch.arange(6.0).view(2, 3).t()), nn.Parameter(torch.tensor([7.0, 8.0]))]
    (segment,) = as_views(plan := make_plan(params, 1), params).segments_to_sync(plan.buckets[0], GroupRank(0))
    assert segment.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).expand(3, 2), torch.ones(6)[::2], torch.ones(4, 4)[:, :2]],
    ids=["expanded", "every other", "columns"],
)
def test_views_of_gaps_or_overlaps_are_refused_before_any_parameter_moves(tensor: Tensor) -> None:
    params = [*make_params(), nn.Parameter(tensor)]
    places = [param.data_ptr() for param in params]
    with pytest.raises(ValueError, match=rf"got parameter 10 with strides \[{tensor.stride()[0]}.*bucket_view=False"):
        as_views(make_plan(params, 2), params)
    assert [param.data_ptr() for param in params] == places


def test_views_leave_dormant_parameters_where_they_are() -> None:
    params = make_params()
    params[0].requires_grad_(False)
    places = [param.data_ptr() for param in params]
    as_views(make_plan(params, 2), params)
    moved = [param.data_ptr() != place for param, place in zip(params, places, strict=True)]
    assert moved == [index > 0 and param.numel() > 0 for index, param in enumerate(params)]


# Storages of windows


WINDOWED = [
    *ITEMS,
    *(torch.bool, torch.int8, torch.int64, torch.uint16, torch.complex32),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def make_windows(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Block]:
    """Parameters of a dtype in a block, of random bytes."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in ((3, 5), (), (0, 3), (7,), (2, 3, 4, 5)):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2, (nbytes,), dtype=torch.uint8, generator=generator)
        params.append(nn.Parameter(raw.view(dtype).view(shape), requires_grad=False))
    params[4].data = params[4].data.contiguous(memory_format=torch.channels_last)
    return params, Block(range(len(params)), params)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", WINDOWED, ids=str)
def test_the_storage_of_a_parameter_is_its_own_elements(dtype: torch.dtype) -> None:
    params, block = make_windows(dtype)
    for index, param in enumerate(params):
        assert param.untyped_storage().nbytes() == param.nbytes
        assert param.storage_offset() == 0
        if param.numel():
            assert param.data_ptr() == param.untyped_storage().data_ptr()
            assert param.data_ptr() == block.tensor.data_ptr() + block.starts[index] * dtype.itemsize
    pointers = [param.untyped_storage().data_ptr() for param in params if param.numel()]
    assert len(set(pointers)) == len(pointers)
    block.tensor.view(torch.uint8).fill_(1)
    assert all(bytes(param.untyped_storage()) == b"\1" * param.nbytes for param in params), "the same memory"


def test_a_view_keeps_the_memory_of_its_dropped_block() -> None:
    params, block = make_windows()
    kept, value = params[0].data, params[0].detach().clone()
    del params, block
    assert torch.equal(kept, value)
    kept.add_(1.0)
    assert torch.equal(kept, value + 1.0)


def test_a_window_cannot_be_resized_into_its_neighbours_but_can_be_moved() -> None:
    params, _ = make_windows()
    others = [param.detach().clone() for param in params[1:]]
    with pytest.raises(RuntimeError, match="not resizable"):
        params[0].untyped_storage().resize_(4096)
    with pytest.raises(RuntimeError, match="not resizable"):
        params[0].data.resize_(4096)
    params[0].share_memory_().fill_(3.0)
    assert params[0].is_shared()
    assert not any(param.is_shared() for param in params[1:] if param.numel())
    params[0].set_(torch.ones(15).untyped_storage(), 0, (3, 5), (5, 1))
    assert torch.equal(params[0], torch.ones(3, 5))
    assert all(torch.equal(param, other) for param, other in zip(params[1:], others, strict=True))


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, None])
def test_without_dlpack_windows_are_plain_views(error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_dlpack(capsule: object) -> Tensor:
        if error is None:
            return torch.zeros(60, dtype=torch.uint8)  # as if the device could share no memory
        raise error("no such device")

    monkeypatch.setattr(storage_module, "from_dlpack", from_dlpack)
    params, block = make_windows()
    assert params[0].untyped_storage().data_ptr() == block.tensor.untyped_storage().data_ptr()
    assert params[3].data_ptr() == block.tensor.data_ptr() + block.starts[3] * 4
    with FakeTensorMode():
        fake = torch.zeros(100)[10:20]
        assert with_own_storage(fake) is fake


# Packed


def test_packing_moves_no_parameter() -> None:
    params, peers = make_params(0), make_params(1)
    plan = make_plan(params, 2)
    places = [param.data_ptr() for param in params]
    exchange(plan, [packed(plan, params), packed(plan, peers)])
    assert [param.data_ptr() for param in params] == places


def test_packing_takes_parameters_with_gaps() -> None:
    gaps, peer_gaps = nn.Parameter(torch.zeros(4, 4)[:, :2]), nn.Parameter(torch.ones(4, 4)[:, :2])
    plan = make_plan([gaps], 2)
    (owner,) = plan.owners
    storages = [packed(plan, [gaps]), packed(plan, [peer_gaps])]
    exchange(plan, storages[:: 1 if owner == 1 else -1])
    assert torch.equal(gaps, torch.ones(4, 2))
    assert gaps.stride() == (4, 1)


def test_runs_of_a_block_hold_large_parameters_alone_and_small_ones_together() -> None:
    params = [torch.nn.Parameter(torch.randn(size)) for size in (3, 5, 100, 200, 7, 9)]
    block = Block([0, 1, 2, 3, 4, 5], params)
    runs = block.runs(nbytes=400)
    assert [members for members, _ in runs] == [(0, 1), (2,), (3,), (4, 5)]
    assert torch.equal(torch.cat([memory for _, memory in runs]), block.tensor)
    assert Block([], params).runs(nbytes=400) == []
