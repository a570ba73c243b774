"""The place of a communication hook, and what it leaves on the model."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_zero import shard_optimizer

pytestmark = pytest.mark.usefixtures("job")


class Boxed:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(nn.Linear):
    """Its output shows no gradient."""

    def forward(self, x: Tensor) -> Boxed:  # type: ignore[override]
        return Boxed(super().forward(x))


@pytest.mark.parametrize("as_views", [False, True])
def test_hooks_on_parameters_go_with_the_optimizer_unless_ddp_must_divide_gradients(as_views: bool) -> None:
    ddp = DistributedDataParallel(Boxing(2, 2), gradient_as_bucket_view=as_views)
    opt = shard_optimizer(ddp, SGD, stage=1, lr=0.1)

    def hooks_after_a_pass() -> int:
        ddp(torch.ones(3, 2)).value.sum().backward()
        return sum(len(param._backward_hooks or ()) for param in ddp.parameters())

    assert hooks_after_a_pass() == 2
    opt.step()
    opt.zero_grad()
    opt.detach()
    assert not any(param._backward_hooks for param in ddp.parameters())
    assert hooks_after_a_pass() == (2 if as_views else 0)
