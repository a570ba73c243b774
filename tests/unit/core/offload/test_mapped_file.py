"""Tensors in a memory-file file: where they lie, what is reused, and disks that are full."""

import gc
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ddp_zero.core.local.inner import options_on_host, state_like
from ddp_zero.core.offload.mapped_file import EXTENT_BYTES, MappedFile, mapped_bytes
from ddp_zero.core.offload.placement import OnDisk, moved, tensors_in
from tests import internals

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    return MappedFile(tmp_path)


def test_a_tensor_has_the_shape_the_strides_and_memory_of_its_own(file: MappedFile) -> None:
    like = torch.randn(3, 4, 5, 2).to(memory_format=torch.channels_last)
    found = [file.room(like, torch.float32) for _ in range(3)]
    assert {(one.shape, one.stride(), one.dtype) for one in found} == {(like.shape, like.stride(), torch.float32)}
    assert all(one.data_ptr() % 64 == 0 for one in found)
    for place, one in enumerate(found):
        one.fill_(place)
    assert [one.unique().tolist() for one in found] == [[0.0], [1.0], [2.0]]
    assert [one.untyped_storage().nbytes() for one in found] == [480] * 3, "saving one does not save the others"


def test_it_knows_its_own(file: MappedFile) -> None:
    small, large = (file.room(torch.empty(numel), torch.float32) for numel in (10, MIB))
    assert all(file.has(one) for one in (small, large, large[MIB // 2 :]))
    assert not any(file.has(one) for one in (torch.empty(10), torch.empty(MIB), torch.empty(0)))
    assert file.room(torch.empty(0, 3), torch.float64).shape == (0, 3)


def test_the_file_has_no_name(file: MappedFile, tmp_path: Path) -> None:
    file.room(torch.empty(MIB), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_what_is_dropped_from_memory_is_not_lost(file: MappedFile) -> None:
    tensors = [file.room(torch.empty(numel), torch.float32) for numel in (7, 100, 3 * MIB, 5)]
    for tensor in tensors:
        tensor.copy_(torch.arange(tensor.numel()))
    file.drop([*tensors, torch.ones(3)])
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float32))


def test_room_that_nothing_refers_to_is_used_again(file: MappedFile) -> None:
    for _ in range(5):
        tensor = file.room(torch.empty(MIB), torch.float32)
        view = tensor[5:]
        del tensor
        assert file.has(view), "a view keeps it"
        del view
    assert file.nbytes == 4 * MIB


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    tensor = file.room(torch.empty(MIB), torch.float32).fill_(3.0)
    del file
    gc.collect()
    assert tensor.sum().item() == 3.0 * MIB


SIZES = [[], [1], [4 * MIB, 100], [EXTENT_BYTES - 64, 64, 1], [EXTENT_BYTES, 5, EXTENT_BYTES + 1, 700_000, 700_000]]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_file_is_as_large_as_the_formula_says(tmp_path: Path, sizes: list[int]) -> None:
    file = MappedFile(tmp_path)
    kept = [file.room(torch.empty(size), torch.uint8) for size in sizes]
    assert len(kept) == len(sizes)
    assert file.nbytes == mapped_bytes(sizes)
    reserved = MappedFile(tmp_path)
    reserved.reserve(sizes)
    assert reserved.nbytes == mapped_bytes(sizes)
    kept += [reserved.room(torch.empty(size), torch.uint8) for size in sizes]
    assert reserved.nbytes == mapped_bytes(sizes), "what was reserved is enough"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield tmp_path
    gc.collect()
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_raises_when_room_is_asked_for(small_disk: Path) -> None:
    file = MappedFile(small_disk)
    kept = file.room(torch.empty(3 * MIB), torch.uint8).fill_(7)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"room for 2,097,152 more.*holds 3,145,728: No space left.*lost"):
            file.room(torch.empty(2 * MIB), torch.uint8)
        with pytest.raises(RuntimeError, match="No space left"):
            file.reserve([MIB // 2, MIB, MIB])
    assert kept.unique().tolist() == [7]
    more = file.room(torch.empty(MIB), torch.uint8).fill_(1)
    assert more.unique().tolist() == [1], "what is left can be used"


def test_a_file_may_not_grow_beyond_the_limit_of_the_process(file: MappedFile) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        with pytest.raises(RuntimeError, match=r"File too large \([\d,]+ bytes free\)"):
            file.room(torch.empty(3 * MIB), torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.nbytes == 0


def test_a_file_that_was_cut_is_noticed(file: MappedFile) -> None:
    file.check()
    file.room(torch.empty(MIB), torch.float32)
    file.check()
    internals.cut_off(file, 100)
    with pytest.raises(RuntimeError, match=r"before anything is stepped, got 100 bytes of 4,194,304"):
        file.check()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Cannot create a file for offload in.*nowhere.*No such file"):
        MappedFile(tmp_path / "nowhere")


# States


def test_a_state_is_kept_once_however_nested(tmp_path: Path) -> None:
    residence = OnDisk(2, tmp_path)
    state = {"step": torch.tensor(1.0), "m": torch.ones(3), "blocks": {"scale": torch.ones(2)}, "list": [torch.ones(4)]}
    assert residence.keep([state]) == 4 * (3 + 2 + 4)
    held = list(tensors_in(state))
    assert [one.numel() for one in held] == [3, 2, 4]
    assert residence.keep([state]) == 0
    assert all(one is other for one, other in zip(held, tensors_in(state), strict=True))
    state["m"] = torch.full((3,), 2.0)  # as an optimizer does that replaces its state
    assert residence.keep([state]) == 12
    assert next(iter(tensors_in(state))).tolist() == [2.0] * 3


def test_moving_keeps_kinds() -> None:
    state = {"a": (torch.ones(2), "text", 3), "b": [torch.ones(1)], "c": None}
    found = moved(state, lambda tensor: tensor + 1)
    assert found is state
    assert type(state["a"]) is tuple
    assert [one.tolist() for one in tensors_in(state)] == [[2.0, 2.0], [2.0]]


# What a class will need


CLASSES = [
    (torch.optim.SGD, {"lr": 0.1}, []),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, [(6, 4)]),
    (AdamW, {"fused": True}, [(6, 4), (6, 4)]),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}, [(6, 4)] * 3),
    (torch.optim.Adafactor, {}, [(6, 1), (1, 4)]),
]


@pytest.mark.parametrize(("kind", "options", "shapes"), CLASSES)
def test_the_state_of_a_class_is_known_without_memory(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], shapes: list[tuple[int, ...]]
) -> None:
    param = nn.Parameter(torch.randn(6, 4))
    inner = kind([param], **options)
    found = list(tensors_in(state_like(inner, inner.param_groups[0], param)))
    assert [tuple(one.shape) for one in found] == shapes
    assert all(one.is_meta == (kind is not torch.optim.Adafactor) for one in found), "which reads values"
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    assert not inner.state
    inner.step()
    assert [tuple(one.shape) for one in tensors_in(inner.state[param])] == shapes
    assert not torch.equal(before, param)


class _ReadsValues(AdamW):
    """Cannot step what has no values."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if all(bool((param == 0).all()) for group in self.param_groups for param in group["params"]):
            super().step()


def test_a_class_that_reads_values_steps_zeros() -> None:
    inner = _ReadsValues([nn.Parameter(torch.randn(3))])
    found = list(tensors_in(state_like(inner, inner.param_groups[0], torch.empty(3, device="meta"))))
    assert [(tuple(one.shape), one.device.type) for one in found] == [((3,), "cpu")] * 2


def test_a_step_on_the_host_is_fused_unless_the_user_says_how() -> None:
    assert options_on_host(AdamW, {"lr": 0.1}) == {"lr": 0.1, "fused": True}
    for own in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True}):
        assert options_on_host(AdamW, own) == own
    assert options_on_host(torch.optim.RMSprop, {}) == {}
