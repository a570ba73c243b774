"""How DDP fills its buckets, in plain ints and beside its own function."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.plan import buckets
from ddp_zero.core.plan.buckets import ddp_layout

dist: Any = torch.distributed


def test_a_bucket_is_closed_when_it_is_full_from_the_last_parameter_on() -> None:
    assert ddp_layout([5, 5, 5, 5, 5, 5], ["a"] * 6, [1, 10]) == [[5], [4, 3], [2, 1], [0]]
    assert ddp_layout([8, 1, 8], ["a", "b", "a"], [10]) == [[2, 0], [1]]
    assert ddp_layout([], [], [1]) == []


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64])), max_size=30),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
def test_buckets_equal_those_that_ddp_computes(params: list[tuple[int, torch.dtype]], caps: list[int]) -> None:
    tensors = [torch.empty(numel, dtype=dtype) for numel, dtype in params]
    order = list(reversed(range(len(tensors))))
    found = ddp_layout([one.nbytes for one in tensors], [str(one.dtype) for one in tensors], caps)
    if not tensors:
        assert found == []
        return
    expected, _ = dist._compute_bucket_assignment_by_size(
        [tensors[index] for index in order], caps, [False] * len(order), order
    )
    assert sorted(found) == sorted(expected)
    full = [bucket for bucket in found if bucket in expected]
    assert len(full) == len(expected)


def test_the_first_bucket_has_the_size_of_ddps_first() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == buckets.FIRST_CAP_BYTES
