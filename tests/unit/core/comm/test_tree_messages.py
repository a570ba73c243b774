"""Trees from one rank to another through the real `Communicator`, with `torch.distributed` replaced by a list."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.plan.partition import GroupRank


class _Group:
    """A process group, as far as a dict with weak keys needs one."""


class Post:
    """What `Communicator` needs of `torch.distributed` to send to itself: messages are kept until they are received."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Tensor]] = []

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return 1

    def get_backend_config(self, group: Any) -> str:
        return "cpu:gloo,cuda:gloo"

    def P2POp(self, op: Callable[..., mock.Mock], tensor: Tensor, **options: Any) -> Callable[[], mock.Mock]:
        return partial(op, tensor, **options)

    def batch_isend_irecv(self, messages: list[Callable[[], mock.Mock]]) -> list[mock.Mock]:
        return [message() for message in messages]

    def isend(self, tensor: Tensor, group_peer: int, group: Any, tag: int) -> mock.Mock:
        assert tensor.is_contiguous()
        assert tensor.dtype is torch.uint8
        self.messages.append((tag, tensor.clone()))
        return mock.Mock()

    def irecv(self, tensor: Tensor, group_peer: int, group: Any, tag: int) -> mock.Mock:
        sent_tag, sent = self.messages.pop(0)
        assert (sent_tag, sent.shape) == (tag, tensor.shape)
        tensor.copy_(sent)
        return mock.Mock()


ME = GroupRank(0)
CPU = torch.device("cpu")


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    post = Post()
    monkeypatch.setattr("ddp_zero.core.comm.communicator.dist", post)
    monkeypatch.setattr("torch.distributed.distributed_c10d.get_backend_config", post.get_backend_config)
    return post


@pytest.fixture
def comm(post: Post) -> Communicator:
    group: Any = _Group()
    return Communicator(group)


TENSORS: dict[str, Tensor] = {
    "contiguous": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "with gaps": torch.arange(10.0)[::3],
    "one of many": torch.arange(10.0)[5::10],
    "columns": torch.arange(12.0).view(3, 4)[:, 1:3],
    "expanded": torch.arange(3.0).expand(2, 3),
    "one element, expanded": torch.tensor(2.0).expand(4),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "scalar": torch.tensor(7, dtype=torch.int16),
    "no elements": torch.empty(0, 3, dtype=torch.bfloat16),
    "no elements, with gaps": torch.empty(0)[::2],
    "parameter": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
    "complex": torch.tensor([1 - 2j], dtype=torch.complex128),
    "bool": torch.tensor([True, False, True]),
    "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_of_any_layout_and_dtype_arrives(tensor: Tensor, comm: Communicator, post: Post) -> None:
    comm.send_tree({"before": 1, "exp_avg": tensor, "after": (torch.ones(2), None)}, ME)
    came = comm.receive_tree(ME, CPU)
    assert post.messages == []
    assert came["exp_avg"].dtype is tensor.dtype
    assert came["exp_avg"].shape == tensor.shape
    assert torch.equal(came["exp_avg"].to(torch.complex128), tensor.detach().to(torch.complex128))
    assert came["exp_avg"].data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert (came["before"], came["after"][0].tolist(), came["after"][1]) == (1, [1.0, 1.0], None)


@pytest.mark.parametrize(
    "stranger", [object(), torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["object", "sparse", "meta"]
)
def test_what_cannot_travel_is_refused_before_anything_is_sent(stranger: Any, comm: Communicator, post: Post) -> None:
    with pytest.raises(TypeError, match=r"at \['b'\]\."):
        comm.send_tree({"a": torch.ones(1), "b": stranger}, ME)
    assert post.messages == []
