"""Norms from all owners: the same bits as one by one, in a number of operations that does not grow with parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_zero.core.plan.ownership import whole
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.step.clipping import NormGatherer

_VIEWS = {"select", "slice", "unbind", "detach", "alias", "view", "_unsafe_view"}


class _Operations(TorchDispatchMode):
    """Counts operations that an accelerator would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


def sharded_over_one_rank(params: list[Tensor]) -> Any:
    for param in params:
        param.grad = torch.zeros_like(param)
    table = SimpleNamespace(params=params, norm_order=list(reversed(range(len(params)))))
    comm = SimpleNamespace(world_size=1, group_rank=GroupRank(0), all_gather_tensor=lambda mine: [mine.clone()])
    binding = SimpleNamespace(pieces=[whole(GroupRank(0), param.numel()) for param in params])
    return SimpleNamespace(table=table, comm=comm, binding=binding)


def gathered(dtypes: list[torch.dtype], norms: dict[int, Tensor]) -> tuple[dict[int, Tensor], Tensor, int]:
    sharded = sharded_over_one_rank([torch.zeros(3, dtype=dtype) for dtype in dtypes])
    with _Operations() as operations:
        found, flag = NormGatherer(sharded).gather(norms, 2.0, torch.tensor(3.0), rounds=False)
    return found, flag, operations.count


def test_operations_do_not_grow_with_parameters() -> None:
    few, many = (
        gathered([torch.bfloat16] * size, {index: torch.tensor(float(index)) for index in range(size)})[2]
        for size in (10, 400)
    )
    assert few == many


@pytest.mark.parametrize("value", [0.0, 1 / 3, float("inf"), float("nan"), 1e-45])
def test_norms_keep_their_bits_order_and_dtypes(value: float) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32]
    wide = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32]
    norms = {index: torch.tensor(value, dtype=wide[index]) for index in range(4)}
    norms[4] = torch.tensor(2.5)
    found, flag, _ = gathered(dtypes, norms)
    assert list(found) == [4, 3, 2, 1, 0]
    assert flag == 3.0
    for index, norm in norms.items():
        assert found[index].dtype == norm.dtype
        torch.testing.assert_close(found[index], norm, rtol=0.0, atol=0.0, equal_nan=True)
