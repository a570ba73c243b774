"""A stand-in for an accelerator: host tensors on both sides, and errors where a real device would give wrong numbers.

`StrictTransfer` copies late, as a device does: what has not been waited for is NaN, and a buffer that is used while the
device may still read it is an error. `TwoMemories` refuses operations that mix both sides outside of the transfers, and
reading a value of the device on the host, which would wait for everything that was issued.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.local import placement as host
from ddp_zero.core.local.copy_pipeline import CopyPipeline, Pairs, Transfer, Wait
from tests import internals


class _ToHost:
    def __init__(self, transfer: "StrictTransfer", pairs: Pairs) -> None:
        self._transfer = transfer
        self._pending = [(target, source.clone()) for target, source in pairs]
        for target, _ in pairs:
            assert not transfer.is_busy(target), "a buffer from which the device may still read"
            target.view(torch.uint8).fill_(255) if target.is_contiguous() else target.fill_(float("nan"))

    def wait(self) -> None:
        assert self._pending, "waited for twice"
        self._transfer.log.append("to host")
        for target, value in self._pending:
            target.copy_(value)
        self._pending = []


class _ToDevice:
    def __init__(self, transfer: "StrictTransfer", pairs: Pairs) -> None:
        self._transfer = transfer
        self._sources = [(source, source.clone()) for _, source in pairs]
        transfer.busy.append(self)
        for target, source in pairs:
            target.copy_(source)

    def wait(self) -> None:
        self._transfer.log.append("to device")
        self._transfer.busy.remove(self)
        for source, value in self._sources:
            assert torch.equal(source.view(torch.uint8), value.view(torch.uint8)), "written while the device reads"

    def holds(self, tensor: Tensor) -> bool:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(one.data_ptr() < stop and start < one.data_ptr() + one.nbytes for one, _ in self._sources)


class StrictTransfer(Transfer):
    """Copies between tensors of the host, some of which are taken for those of a device.

    Attributes:
        log: the waits, in order.
        busy: copies to the device that were not waited for.
        made: sizes of the buffers.
    """

    is_on = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.busy: list[_ToDevice] = []
        self.made: list[int] = []

    def buffer(self, nbytes: int) -> Tensor:
        self.made.append(nbytes)
        with _unguarded():
            return torch.full((nbytes,), 255, dtype=torch.uint8)

    def to_host(self, pairs: Pairs) -> Wait:
        with _unguarded():
            return _ToHost(self, [(target.detach(), source.detach()) for target, source in pairs]).wait

    def to_device(self, pairs: Pairs) -> Wait:
        with _unguarded():
            return _ToDevice(self, pairs).wait

    def is_busy(self, tensor: Tensor) -> bool:
        return any(copies.holds(tensor) for copies in self.busy)


@contextmanager
def _unguarded() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextmanager
def taken_for_a_device() -> Iterator[None]:
    """Optimizers built within take the CPU's parameters for those of an accelerator."""
    with mock.patch.object(host, "transfer_for", _strict):
        yield


def _strict(device: torch.device) -> StrictTransfer:
    return StrictTransfer()


def pipeline_of(opt: ZeroRedundancyOptimizer) -> tuple[CopyPipeline, StrictTransfer]:
    """The way of an optimizer's buckets to the host."""
    pipeline, transfer = internals.pipeline_of(opt)
    assert isinstance(transfer, StrictTransfer)
    return pipeline, transfer


class TwoMemories(TorchDispatchMode):
    """Tells tensors of the device from those of the host, by what they were computed from.

    Args:
        device: tensors whose memory is the device's.
        host: tensors whose memory is the host's.
    """

    def __init__(self, device: Iterable[Tensor], host: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._side = {tensor.untyped_storage().data_ptr(): "device" for tensor in device}
        self._side |= {tensor.untyped_storage().data_ptr(): "host" for tensor in host}
        self._alive: list[Any] = []  # so that no memory is used for both sides
        self.operations = {"device": 0, "host": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor) and one.dim()]
        sides = {self._side[one.untyped_storage().data_ptr()] for one in inputs if self._knows(one)}
        assert len(sides) < 2, f"{func} mixes device and host: {[tuple(one.shape) for one in inputs]}"
        assert not (sides == {"device"} and "_local_scalar_dense" in str(func)), f"{func} waits for the device"
        result = func(*args, **(kwargs or {}))
        for side in sides:
            self.operations[side] += 1
            for one in tree_leaves(result):
                if isinstance(one, Tensor):
                    self._side.setdefault(one.untyped_storage().data_ptr(), side)
                    self._alive.append(one.untyped_storage())
        return result

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._side


def assert_away(opt: Any) -> None:
    """What is stepped is no parameter of the device."""
    params = {id(param) for group in opt.param_groups for param in group["params"]}
    assert all(id(param) not in params for group in opt.optim.param_groups for param in group["params"])
