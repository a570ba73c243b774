"""Snapshots: a job that is interrupted goes on with the bits of a job that was not, whatever was lost.

An interruption is a new model, optimizer and `Snapshots` on the same folder; processes that are killed are in
`tests/multiproc/test_snapshots_killed.py`. Hosts are folders here: each rank has the folder of its host.
"""

import errno
import fcntl
import gc
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from ddp_zero import DynamicLossScale, Offload, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.checkpoint import Loaded
from ddp_zero.checkpoint.folder import MARKER, Marker, marker_text
from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.checkpoint.tensor_file import as_written
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.control_group import ControlGroup
from ddp_zero.optimizer import shard_of
from ddp_zero.snapshots import Snapshots, recovery, snapshots
from ddp_zero.snapshots.copies import Keeper, send_copy
from ddp_zero.snapshots.memory_files import Staged, bytes_in
from ddp_zero.snapshots.seals import GIVEN_UP, holdings, names_of_part, rank_folder
from ddp_zero.snapshots.snapshots import Complaints
from tests import internals
from tests.multiproc.cases import assert_identical, step_on
from tests.multiproc.checkpointed import everything
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.multiproc.moved_state import Spread

case = Cases(group_timeout=30)
OPTIONS: dict[str, Any] = {"lr": 1e-2}
EVERY = 2


class Loader:
    """Draws batches; has a state of its own, different on each rank."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)

    def draw(self) -> torch.Tensor:
        return torch.randn(4, 6, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


@dataclass
class Job:
    """A training with dropout, a scheduler and a loader, and its snapshots."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: StepLR
    loader: Loader
    snapshots: Snapshots
    loaded: Loaded | None = None

    def train(self, until: int, waits: bool = True) -> None:
        """Train until so many steps were done; by default, every snapshot is done before the next step."""
        while self.snapshots.steps < until:
            self.optimizer.zero_grad()
            inputs = torch.nn.functional.dropout(self.loader.draw(), 0.2)
            loss = self.model(inputs).square().mean() * (1 + random.random())
            scaled = isinstance(self.optimizer, ZeroRedundancyOptimizer) and self.optimizer.loss_scale is not None
            (self.optimizer.scale(loss) if scaled else loss).backward()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.scheduler.step()
            self.snapshots.step()
            if waits:
                self.snapshots.wait()

    def state(self) -> Any:
        """All that must be equal."""
        values, states, groups = everything(self.model, self.optimizer)
        options = [sorted(group.items()) for group in groups]
        return values, states, options, self.scheduler.state_dict(), torch.rand(1), random.random()


Build = Callable[[], tuple[nn.Module, Optimizer]]


def sharded(stage: int = 2, seed: int = 0, **options: Any) -> tuple[nn.Module, Optimizer]:
    """A small model and its sharded optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    return ddp, shard_optimizer(ddp, options.pop("build", AdamW), stage=stage, **{**OPTIONS, **options})


def plain(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """DDP with an unsharded optimizer."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    return ddp, AdamW(ddp.parameters(), **OPTIONS)


def low_precision() -> tuple[nn.Module, Optimizer]:
    """bf16 with masters."""
    torch.manual_seed(0)
    model = Rounded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    return ddp, shard_optimizer(ddp, AdamW, stage=2, master_weights=True, **OPTIONS)


class Rounded(nn.Module):
    """Takes fp32 inputs into a model of bf16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(inputs.bfloat16()).float()
        return out


def job(setup: Setup, folder: Path, build: Build, **options: Any) -> Job:
    """Start a job, or go on with it."""
    model, optimizer = build()
    scheduler, loader = StepLR(optimizer, 3, gamma=0.5), Loader(setup.rank)
    options = {"every": EVERY, "extra": {"scheduler": scheduler}, "rank_extra": {"loader": loader}, **options}
    found = Job(model, optimizer, scheduler, loader, Snapshots(model, optimizer, folder=folder, **options))
    torch.manual_seed(setup.rank)
    random.seed(setup.rank)
    found.loaded = found.snapshots.load()
    return found


def leave(
    setup: Setup,
    folder: Path,
    steps: int,
    on_rank_0: Callable[[], object] = lambda: None,
    *,
    build: Build = sharded,
    **options: Any,
) -> None:
    """Train so many steps and be gone, after rank 0 has done something to the files of all."""
    found = job(setup, folder, build, **options)
    found.train(steps)
    assert found.snapshots.wait()
    dist.barrier()
    if setup.rank == 0:
        on_rank_0()
    dist.barrier()
    del found
    gc.collect()


def assert_as_unbroken(setup: Setup, folder: Path, found: Job, until: int, where: str) -> None:
    """Train on; all is as after a job that was never interrupted."""
    found.train(until)
    state = found.state()
    unbroken = job(setup, folder, sharded)
    unbroken.train(until)
    assert_identical(unbroken.state(), state, where)
    unbroken.snapshots.close()


def interrupted(setup: Setup, build: Build, folder: Path, at: int, until: int, **options: Any) -> tuple[Job, Any]:
    """A job that was interrupted after ``at`` steps and goes on, and the state of an unbroken job."""
    unbroken = job(setup, folder / "unbroken", build, **options)
    unbroken.train(until)
    expected = unbroken.state()
    leave(setup, folder / "broken", at, build=build, **options)
    second = job(setup, folder / "broken", lambda: build_differently(build), **options)
    return second, expected


def build_differently(build: Build) -> tuple[nn.Module, Optimizer]:
    """The same shapes with different values: loading must replace them all."""
    model, optimizer = build()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    return model, optimizer


def step_of(found: Job) -> int:
    """The step from which the job went on."""
    assert found.loaded is not None
    return found.loaded.step


MODES: dict[str, Build] = {
    "stage 1": lambda: sharded(1),
    "stage 1, standalone": lambda: sharded(1, overlap=False),
    "stage 2": sharded,
    "stage 2, sync in forward": lambda: sharded(sync="forward"),
    "stage 2, cut": lambda: sharded(partition="elements"),
    "stage 2, clipped": lambda: sharded(max_grad_norm=0.1),
    "stage 2, loss scale": lambda: sharded(loss_scale=DynamicLossScale(initial=8.0, growth_interval=2)),
    "stage 2, offloaded": lambda: sharded(offload=Offload("cpu")),
    "stage 1, SGD without state": lambda: sharded(1, build=SGD),
    "bf16, masters": low_precision,
    "unsharded": plain,
}


# Every mode


@case(1, 2, 3, few=[*MODES][::3], every=[*MODES])
def _snapshots_of_every_mode_resume_bit_for_bit(setup: Setup, configurations: list[str]) -> None:
    for number, name in enumerate(configurations):
        if setup.world_size == 3 and name not in ("stage 2", "stage 2, cut"):
            continue
        build = MODES[name]
        second, expected = interrupted(setup, build, setup.folder / str(number), at=3, until=6)
        assert step_of(second) == 2, name
        second.train(6)
        assert_identical(expected, second.state(), name)
        second.snapshots.close()


@case(4)
def _replicas_of_cut_shards_write_each_element_once_and_go_on_bit_equal(setup: Setup) -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]

    def build() -> tuple[nn.Module, Optimizer]:
        return sharded(partition="elements", shard_group=pairs[setup.rank // 2])

    second, expected = interrupted(setup, build, setup.folder, at=3, until=6)
    assert step_of(second) == 2
    saved = SavedCheckpoint.open(next((setup.folder / "broken").glob("restored-*")))
    cut = [one for one in saved.tensors().values() if len(one.chunks) > 1]
    assert cut
    written = as_written(cut)
    assert sum(one.nbytes for one in written) == sum(one.nbytes for one in cut)
    assert len({one.span.file for one in written}) > 2, "more than one replica writes parts"
    second.train(6)
    assert_identical(expected, second.state(), "replicas")


@case(4)
def _experts_on_different_ranks_go_on_bit_equal(setup: Setup) -> None:
    values: dict[str, Any] = {}
    for name, stops in (("unbroken", [7]), ("broken", [5, 7])):
        for stop in stops:
            found = Spread(setup, 2, stage=2)
            taken = Snapshots(found.ddp, found.opt, folder=setup.folder / name, every=2)
            loaded = taken.load()
            assert (None if loaded is None else loaded.step) == (4 if name == "broken" and stop == 7 else None)
            while taken.steps < stop:
                found.train(setup.rank, taken.steps, steps=1)
                taken.step()
                taken.wait()
            dist.barrier()
        values[name] = found.model.state_dict(), found.opt.members[0].stats()["snapshot_step"]
    assert_identical(values["unbroken"], values["broken"], "experts")


# Another number of ranks


def _leave_a_snapshot(setup: Setup, folder: str) -> None:
    found = job(setup, Path(folder), sharded)
    found.train(5)
    found.snapshots.close(keep=True)


def _go_on(setup: Setup, folder: str) -> Any:
    found = job(setup, Path(folder), lambda: sharded(1, seed=5))
    assert step_of(found) == 4
    assert found.loaded is not None
    assert found.scheduler.last_epoch == 4
    assert found.loaded.rank_extra is None
    assert any("number of ranks has changed" in note for note in found.loaded.notes)
    values = [param.tolist() for param in found.model.parameters()]
    found.train(6)
    found.snapshots.close()
    return values


@pytest.mark.parametrize("ranks", [(3, 2), (2, 3), pytest.param((2, 1), marks=pytest.mark.nightly)])
def test_a_different_number_of_ranks_goes_on(ranks: tuple[int, int], tmp_path: Path) -> None:
    before, after = ranks
    run_ranks(_leave_a_snapshot, before, str(tmp_path / "run"))
    saved = _snapshot_values(tmp_path / "run")
    for values in run_ranks(_go_on, after, str(tmp_path / "run")):
        assert values == saved


def _snapshot_values(root: Path) -> list[Any]:
    """Parameters of the newest snapshot, read from the files by a checkpoint's loader in this process."""
    newest = max(holding.seal.step for holding in holdings(root))
    found = {holding.seal: holding.folder for holding in holdings(root) if holding.seal.step == newest}
    whole = root.parent / "whole"
    whole.mkdir()
    for seal, folder in found.items():
        for name in names_of_part(seal.rank):
            shutil.copy(folder / name, whole / name)
    marker = Marker(newest, tuple(seal.part for seal in sorted(found, key=lambda seal: seal.rank)))
    (whole / MARKER).write_text(marker_text(marker))
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 4))
    checkpoint.load(whole, model)
    return [param.tolist() for param in model.parameters()]


# Hosts that are lost


@contextmanager
def on_host(number: int) -> Iterator[None]:
    """This rank is on a host of this number, as torchrun tells it."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(number)}):
        yield


@case(4)
def _a_host_that_is_lost_is_restored_from_its_copies(setup: Setup) -> None:
    host = setup.rank // 2
    root = setup.folder / f"host-{host}"

    def lose_host_1() -> None:
        assert len(list((setup.folder / "host-0").glob("rank-*/*/seal-*.json"))) == 8, "two slots, four parts"
        shutil.rmtree(setup.folder / "host-1")

    with on_host(host):
        leave(setup, root, 5, lose_host_1)
        second = job(setup, root, lambda: build_differently(sharded))
        assert step_of(second) == 4
        assert len(list(setup.folder.glob("host-1/restored-*/seal-*.json"))) == 4
        assert_as_unbroken(setup, setup.folder / f"other-{host}", second, 9, "after the loss of a host")
        dist.barrier()
        assert list(setup.folder.glob("host-*/restored-*")) == [], "given up when a new snapshot was complete"


@case(2)
def _crashes_while_loading_and_before_the_next_snapshot_lose_nothing(setup: Setup) -> None:
    host, root = setup.rank, setup.folder / f"host-{setup.rank}"
    with on_host(host):
        first = job(setup, root, sharded)
        first.train(5)
        first.snapshots.close(keep=True)
        with mock.patch.object(checkpoint, "restore", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            job(setup, root, sharded)
        assert {holding.seal.step for holding in holdings(root)} == {2, 4}, "an older snapshot is still there"
        second = job(setup, root, sharded)
        assert step_of(second) == 4
        second.train(5)
        dist.barrier()
        if setup.rank == 0:
            shutil.rmtree(setup.folder / "host-1")
        dist.barrier()
        del first, second
        gc.collect()
        third = job(setup, root, lambda: build_differently(sharded))
        assert step_of(third) == 4, "every host has kept all that was restored"
        assert_as_unbroken(setup, setup.folder / f"unbroken-{setup.rank}", third, 7, "after three crashes")


@case(2)
def _old_snapshots_are_out_of_sight_at_once_and_removed_before_the_first_new_one(setup: Setup) -> None:
    leave(setup, setup.folder / "run", 5)
    may_go_on, removed = threading.Event(), recovery.remove

    def late(folders: list[Path]) -> None:
        assert may_go_on.wait(60)
        removed(folders)

    with mock.patch.object(snapshots, "remove", late):
        second = job(setup, setup.folder / "run", sharded)
    assert step_of(second) == 4
    dist.barrier()  # the first rank of the host has removed nothing yet
    assert {path.name[0] for path in setup.folder.glob("run/*")} == {".", "r"}
    assert {holding.folder.name[:9] for holding in holdings(setup.folder / "run")} == {"restored-"}
    dist.barrier()
    threading.Timer(0.5, may_go_on.set).start()
    second.train(6, waits=False)
    assert may_go_on.is_set(), "the snapshot has waited"
    assert second.snapshots.wait()
    dist.barrier()
    assert [path.name for path in setup.folder.glob("run/.*")] == [".lock"]
    dist.barrier()
    if setup.rank == 0:  # as a crash in between would leave it
        shutil.copytree(rank_folder(setup.folder / "run", 0), setup.folder / "run" / f"{GIVEN_UP}0123456789abcdef")
    dist.barrier()
    del second
    gc.collect()
    third = job(setup, setup.folder / "run", sharded)
    assert step_of(third) == 6
    third.snapshots.close()
    assert [path.name for path in setup.folder.glob("run/*")] == [".lock"]


@case(3)
def _two_hosts_lost_at_once_need_two_copies_or_a_checkpoint(setup: Setup) -> None:
    root = setup.folder / f"host-{setup.rank}"
    for copies, expected in ((2, 4), (1, 3)):
        with on_host(setup.rank):
            first = job(setup, root, sharded, copies=copies, fallback=setup.folder / "disk")
            first.train(3)
            first.snapshots.save()
            first.train(5)
            assert first.snapshots.wait()
            dist.barrier()
            if setup.rank != 1:
                shutil.rmtree(root)
            dist.barrier()
            del first
            gc.collect()
            second = job(setup, root, sharded, copies=copies, fallback=setup.folder / "disk")
            assert step_of(second) == expected
            assert second.loaded is not None
            kind = "snapshot" if expected == 4 else "checkpoint"
            assert f"step {expected} is restored from the {kind}" in second.loaded.notes[0]
            told = [note for note in second.loaded.notes if "step 4: no part of rank" in note]
            assert len(told) == (0 if expected == 4 else 1)
            assert_as_unbroken(setup, setup.folder / f"{copies}-{setup.rank}", second, 6, f"{copies} copies")
            second.snapshots.close()
        dist.barrier()
        if setup.rank == 0:
            shutil.rmtree(setup.folder / "disk")
        dist.barrier()


# Damaged and hostile files


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.unlink()
    path.write_bytes(raw)


def _replace(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a bit of a tensor": ("__{}_0.distcp", _flip),
    "a bit of a part": ("part-{}.json", _flip),
    "a bit of a seal": ("seal-{}.json", _flip),
    "a link instead of tensors": ("__{}_0.distcp", _replace),
    "a link instead of a part": ("part-{}.json", _replace),
    "no tensors": ("__{}_0.distcp", Path.unlink),
}


@case(2, few=[(name, 1 + place % 2) for place, name in enumerate([*DAMAGE][:3])], every=[*product(DAMAGE, (1, 2))])
def _damage_costs_at_most_a_snapshot_and_never_a_wrong_bit(setup: Setup, configurations: list[tuple[str, int]]) -> None:
    """Of one file, or of its copy on the other host as well."""
    unbroken = job(setup, setup.folder / "unbroken", sharded)
    unbroken.train(6)
    expected_state = unbroken.state()
    for number, (name, lost) in enumerate(configurations):
        pattern, damage = DAMAGE[name]
        root = setup.folder / f"{number}" / f"host-{setup.rank}"

        def damage_newest(root: Path = root, pattern: str = pattern, damage: Any = damage, lost: int = lost) -> None:
            """The part of rank 0, in the slot of the second snapshot."""
            damage(rank_folder(root, 0) / "b" / pattern.format(0))
            if lost == 2:
                damage(rank_folder(root.parent / "host-1", 1) / "b" / pattern.format(0))

        with on_host(setup.rank):
            leave(setup, root, 5, damage_newest)
            second = job(setup, root, sharded)
            assert step_of(second) == {1: 4, 2: 2}[lost], f"{name}, {lost} files"
            second.train(6)
            assert_identical(expected_state, second.state(), name)
            second.snapshots.close()


# Memory, copies that are late, peers that are gone


@case(2)
def _training_goes_on_without_snapshots_where_memory_is_full(setup: Setup) -> None:
    found = job(setup, setup.folder / "run", sharded, limit=1_000_000)
    found.train(3)
    assert found.snapshots.wait()
    blocker = setup.folder / "run" / "blocker"
    if setup.rank == 0:
        blocker.write_bytes(b"\1" * 1_000_000)
    dist.barrier()
    found.train(9)
    assert not found.snapshots.wait()
    numbers = found.optimizer.stats()  # type: ignore[attr-defined]
    assert numbers["failed_snapshots"] == 3
    assert (numbers["snapshots"], numbers["snapshot_step"]) == (1, 2)
    dist.barrier()
    if setup.rank == 0:
        blocker.unlink()
    dist.barrier()
    del found
    gc.collect()
    again = job(setup, setup.folder / "run", sharded, limit=1_000_000)
    assert step_of(again) == 2
    again.train(5)
    assert again.snapshots.wait(), "with room again, snapshots are taken again"


@case(2)
def _a_host_without_room_for_lost_parts_goes_on_from_disk(setup: Setup) -> None:
    root = setup.folder / f"host-{setup.rank}"
    with on_host(setup.rank):
        first = job(setup, root, sharded, fallback=setup.folder / "disk")
        first.train(1)
        first.snapshots.save()
        first.train(3)
        first.snapshots.close(keep=True)
        if setup.rank == 1:
            shutil.rmtree(root)
        again = job(setup, root, sharded, fallback=setup.folder / "disk", limit=100 + 4096 * setup.rank)
        assert step_of(again) == 1
        assert again.loaded is not None
        assert any("to stay within limit=4196 bytes" in note for note in again.loaded.notes)


@case(2)
def _a_copy_that_is_late_leaves_out_snapshots_on_all_ranks_and_loses_none(setup: Setup) -> None:
    found = job(setup, setup.folder / "run", sharded)
    found.train(2)
    assert found.snapshots.wait()
    may_go_on = threading.Event()
    complete = Staged.complete

    def late(self: Staged, *arguments: Any) -> Any:
        assert may_go_on.wait(60)
        return complete(self, *arguments)

    with mock.patch.object(Staged, "complete", late if setup.rank == 1 else complete):
        found.train(8, waits=False)  # the one of step 4 is late at 6 and 8, on rank 1 only
        numbers = found.optimizer.stats()  # type: ignore[attr-defined]
        assert [numbers[name] for name in ("late_snapshots", "snapshots", "snapshot_step")] == [2, 1, 2]
        dist.barrier()
        assert {slot.name for slot in setup.folder.glob("run/rank-*/*") if any(slot.glob("seal-1.json"))} == {"a"}
        dist.barrier()  # rank 1 goes on when rank 0 has looked, too
        may_go_on.set()
        assert found.snapshots.wait()
        found.train(10)
        assert found.snapshots.wait()
    assert found.optimizer.stats()["late_snapshots"] == 2  # type: ignore[attr-defined]
    assert found.optimizer.stats()["snapshot_step"] == 4  # type: ignore[attr-defined]
    found.snapshots.close(keep=True)
    assert step_of(job(setup, setup.folder / "run", sharded)) == 10


def hang_up(keeper: Keeper, connection: socket.socket) -> None:
    """Answer nothing, as a process that has just been killed."""
    raise EOFError("gone")


@case(2)
def _a_peer_that_takes_no_copies_costs_the_copies_only(setup: Setup) -> None:
    root = setup.folder / f"host-{setup.rank}"
    with on_host(setup.rank):
        found = job(setup, root, sharded, time_out=5.0)
        found.train(3)
        assert found.snapshots.wait()
        with mock.patch.object(Keeper, "answer", hang_up if setup.rank == 1 else Keeper.answer):
            found.train(7)
            dist.barrier()
        assert found.snapshots.wait() == (setup.rank == 1)
        numbers = found.optimizer.stats()  # type: ignore[attr-defined]
        assert numbers["failed_snapshot_copies"] == (2 if setup.rank == 0 else 0)
        assert (numbers["snapshot_step"], numbers["snapshots"]) == (2, 2), "the copied snapshot is still there"
        dist.barrier()
        newest = {path.read_text().count('"step": 6') for path in root.glob("rank-*/*/seal-*.json")}
        assert newest == {0, 1}
        del found
        gc.collect()
        dist.barrier()
        assert step_of(job(setup, root, sharded)) == 6, "all hosts are still there, so no copy is needed"


@case(2)
def _nobody_sends_copies_without_the_secret_or_out_of_turn(setup: Setup) -> None:
    found = job(setup, setup.folder / "run", sharded, time_out=2.0)
    with mock.patch.object(snapshots, "send_copy", wraps=send_copy) as sent:
        found.train(2)
        assert found.snapshots.wait()
    address, _, seal, *_ = sent.call_args.args
    path = rank_folder(setup.folder / "run", setup.rank) / "a"
    dist.barrier()  # copies have arrived on both
    before = {one.name: one.read_bytes() for one in path.iterdir()}
    stranger = replace(address, secret="0" * 32)
    known = replace(seal, part="0" * 64, nbytes=10)
    with pytest.raises(ConnectionError, match=r"does not know the secret|end of the connection|reset"):
        send_copy(stranger, 2.0, known, "{}", memoryview(b"damaged it"))
    for wrong in (
        replace(known, snapshot=seal.snapshot.replace("-2", "-4"), step=4),
        replace(known, rank=1 - setup.rank),
    ):
        with pytest.raises(OSError, match="does not write snapshot"):
            send_copy(address, 10.0, wrong, "{}", memoryview(b"damaged it"))
    dist.barrier()
    assert {one.name: one.read_bytes() for one in path.iterdir()} == before


# Order of calls


@case(2)
def _wrong_uses_are_refused_on_every_rank(setup: Setup) -> None:
    model, opt = sharded()
    for options, match in (
        ({"every": 0}, "Expected every to be an int of at least 1, got 0"),
        ({"copies": True}, "Expected copies to be an int"),
        ({"copies": None}, "Expected copies to be an int"),
        ({"limit": 0}, "Expected limit to be"),
        ({"time_out": 0}, "Expected time_out to be positive"),
        ({"folder": ""}, "Expected the path of a folder"),
    ):
        with pytest.raises(ValueError, match=match):
            Snapshots(model, opt, **{"folder": setup.folder / "x", **options})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="as 'number', got int"):
        Snapshots(model, opt, folder=setup.folder / "x", extra={"number": 1})
    taken = Snapshots(model, opt, folder=setup.folder / "x", every=1 + setup.rank)
    with pytest.raises(RuntimeError, match=r"Expected Snapshots\.load"):
        taken.step()
    with pytest.raises(ValueError, match="every and copies"):
        taken.load()
    found = job(setup, setup.folder / "x", lambda: sharded(max_grad_norm=1.0))
    with pytest.raises(RuntimeError, match="got a second one"):
        found.snapshots.load()
    with pytest.raises(ValueError, match="Expected fallback="):
        found.snapshots.save()
    found.train(1)
    found.model(found.loader.draw()).sum().backward()
    found.optimizer.step()
    found.snapshots.steps = 3 if setup.rank else 5
    with pytest.raises(RuntimeError, match=r"Expected equally many calls .* got \[6, 4\] by rank"):
        found.snapshots.step()
    found.snapshots.steps = 3
    with Join([found.optimizer]), pytest.raises(RuntimeError, match="not supported inside Join"):  # type: ignore[list-item]
        found.snapshots.step()


@case(2)
def _a_snapshot_that_does_not_fit_is_refused_and_stays(setup: Setup) -> None:
    first = job(setup, setup.folder / "run", sharded)
    first.train(3)
    first.snapshots.close(keep=True)

    def other() -> tuple[nn.Module, Optimizer]:
        ddp = DistributedDataParallel(nn.Linear(6, 5), gradient_as_bucket_view=True)
        return ddp, shard_optimizer(ddp, AdamW, stage=2, **OPTIONS)

    with pytest.raises(ValueError, match=r"Expected .* to fit the model"):
        job(setup, setup.folder / "run", other)
    with pytest.raises(ValueError, match=r"Expected extra with the names that were saved, \['scheduler'\], got \[\]"):
        job(setup, setup.folder / "run", sharded, extra={})
    assert step_of(job(setup, setup.folder / "run", sharded)) == 2


@case(2)
def _a_changed_model_is_refused_and_loads_as_the_message_says(setup: Setup) -> None:
    first = job(setup, setup.folder / "run", sharded)
    first.train(3)
    first.snapshots.close(keep=True)
    expected = first.model.state_dict()["module.0.weight"].clone()

    def other() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5))
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return ddp, shard_optimizer(ddp, AdamW, stage=2, **OPTIONS)

    with pytest.raises(ValueError, match=r"once, and give Snapshots a different folder= .*ZERO-615\]$") as refused:
        job(setup, setup.folder / "run", other)
    named = re.search(r"load '(.*)' with checkpoint\.load\(\)", str(refused.value))
    assert named is not None
    model, opt = other()
    loaded = checkpoint.load(named[1], model, opt, strict=False)
    taken = Snapshots(model, opt, folder=setup.folder / "changed", every=EVERY)
    assert taken.load() is None
    taken.steps = loaded.step
    assert loaded.step == 2
    assert len(loaded.skipped) > 0
    assert not torch.equal(expected, model.state_dict()["module.0.weight"]), "of step 2, not 3"
    for _ in range(2):
        step_on(opt, model(torch.randn(4, 6)).square().mean())
        taken.step()
        taken.wait()
    dist.barrier()
    again = Snapshots(*other(), folder=setup.folder / "changed", every=EVERY).load()
    assert again is not None
    assert again.step == 4


# What is in the folder besides


def _files_of_somebody_else(root: Path) -> list[Path]:
    """Names that resemble those of snapshots, and do not."""
    names = ["results/a.txt", "rank-00000/notes/a.txt", "restored-pictures/a.txt", ".0123456789abcdef/a.txt", "a.txt"]
    files = [root / name for name in names]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weeks of work")
    return files


@case(2)
def _only_snapshots_are_removed(setup: Setup) -> None:
    root = setup.folder / "run"
    files: list[Path] = []
    leave(setup, root, 5, lambda: files.extend(_files_of_somebody_else(root)))
    second = job(setup, root, sharded)
    assert step_of(second) == 4
    second.train(7)
    second.snapshots.close()
    assert all(path.read_text() == "weeks of work" for path in files)
    assert not list(holdings(root))
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [".lock", "results", "rank-00000", "restored-pictures", ".0123456789abcdef", "a.txt"]
    )
    assert [path.name for path in (root / "rank-00000").iterdir()] == ["notes"]


@case(1)
def _a_fallback_among_the_snapshots_is_refused(setup: Setup) -> None:
    root = setup.folder / "run"
    root.mkdir()
    (setup.folder / "link").symlink_to(root)
    for fallback in (root, root / "checkpoints", setup.folder / "x" / ".." / "run" / "y", setup.folder / "link" / "z"):
        with pytest.raises(ValueError, match=r"Expected fallback= outside folder=.*ZERO-641"):
            Snapshots(*sharded(), folder=root, fallback=fallback)
    Snapshots(*sharded(), folder=root, fallback=setup.folder)


# Hosts that cannot write


def _refuses(number: int) -> Callable[..., None]:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@case(2, 3)
def _a_host_that_cannot_write_takes_the_fallback_or_is_told_on_all_ranks(setup: Setup) -> None:
    disk = setup.folder / "disk"
    last = setup.world_size - 1
    for where, name, number, rank in (
        (recovery, "write_privately", errno.ENOSPC, 0),  # a full memory: no room for a marker
        (os, "link", errno.EROFS, last),
        (os, "link", errno.ENOSPC, 0),
    ):
        root = setup.folder / f"{name}-{number}"
        first = job(setup, root, sharded)
        first.train(3)
        first.snapshots.wait()
        checkpoint.save(disk, first.model, first.optimizer, step=1)
        fails = mock.patch.object(where, name, _refuses(number) if setup.rank == rank else getattr(where, name))
        with fails, pytest.raises(RuntimeError, match=r"Expected to go on from a snapshot, got .*step 2.*ZERO-643"):
            job(setup, root, sharded)
        assert {one.seal.rank for one in holdings(root)} == set(range(setup.world_size)), "nothing was removed"
        with fails:
            second = job(setup, root, sharded, fallback=disk)
        assert second.loaded is not None
        assert second.loaded.step == 1
        assert any(os.strerror(number) in note for note in second.loaded.notes), "told on every rank"
        second.train(4)
        second.snapshots.wait()
        dist.barrier()
        assert step_of(job(setup, root, sharded, fallback=disk)) == 4


@case(2)
def _a_folder_that_cannot_be_cleared_or_read_stops_nobody(setup: Setup) -> None:
    root = setup.folder / "run"
    leave(setup, root, 3)
    with mock.patch.object(Path, "rename", _refuses(errno.EROFS)):
        second = job(setup, root, sharded)
    assert step_of(second) == 2
    second.snapshots.close(keep=True)
    with mock.patch.object(recovery, "holdings", _refuses(errno.EACCES)):
        third = job(setup, root, sharded)
    assert third.loaded is None
    third.train(2)


@case(2)
def _a_process_that_holds_the_lock_costs_snapshots_only(setup: Setup) -> None:
    root = setup.folder / "run"
    found = job(setup, root, sharded)
    internals.set_patience(found.snapshots, 1.0)
    with (root / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # both ranks hold it, as no rank could allocate
        dist.barrier()
        found.train(6)
        numbers = found.optimizer.stats()  # type: ignore[attr-defined]
        assert (numbers["failed_snapshots"], numbers["snapshots"]) == (3, 0)
        dist.barrier()
    dist.barrier()
    found.train(8)
    found.train(9)
    dist.barrier()
    assert found.snapshots.wait()
    assert step_of(job(setup, root, sharded)) == 8


@case(2)
def _a_checkpoint_of_its_own_restores_as_much_and_a_newer_one_comes_first(setup: Setup) -> None:
    options = {"fallback": setup.folder / "disk"}
    first = job(setup, setup.folder / "run", sharded, **options)
    first.train(5)
    first.snapshots.save(keep=1).wait()
    first.snapshots.close(keep=True)
    second = job(setup, setup.folder / "run", lambda: build_differently(sharded), **options)
    assert step_of(second) == 5
    assert_as_unbroken(setup, setup.folder / "unbroken", second, 7, "from disk")
    second.snapshots.close(keep=True)
    third = job(setup, setup.folder / "run", sharded, **options)
    assert step_of(third) == 6
    third.snapshots.close()
    checkpoint.save(setup.folder / "disk", third.model, third.optimizer, extra={"mine": 1}, step=8)
    fourth = job(setup, setup.folder / "run", sharded, **options)
    assert fourth.loaded is not None
    assert (fourth.loaded.step, fourth.loaded.extra) == (8, {"mine": 1})
    assert "Snapshots.save() has not written this checkpoint" in fourth.loaded.notes[-1]


@case(2)
def _a_snapshot_sends_only_copies_and_one_small_message(setup: Setup) -> None:
    # with parameters that are cut: each rank writes the elements that it owns
    found = job(setup, setup.folder / "run", lambda: sharded(partition="elements"))
    found.train(3)
    assert any(shard_of(found.optimizer).binding.owned_parts().values())  # type: ignore[arg-type]
    numbers = found.optimizer.stats()  # type: ignore[attr-defined]
    with (
        mock.patch.object(ControlGroup, "all_gather_tensor", autospec=True, wraps=None) as gather,
        mock.patch.object(Communicator, "send_tree", side_effect=AssertionError),
    ):
        gather.side_effect = lambda group, mine: [mine.clone() for _ in range(group.world_size)]
        found.snapshots.step()
        assert found.snapshots.wait()
        (call,) = gather.call_args_list
    assert call.args[1].numel() == 3, "the step, the progress, and whether the layout has changed"
    after = found.optimizer.stats()  # type: ignore[attr-defined]
    assert after["total_sent_bytes"] == numbers["total_sent_bytes"], "nothing on the connections of training"
    assert after["failed_snapshot_copies"] == 0
    dist.barrier()
    copies = [path.parent.parent.name for path in setup.folder.glob(f"run/*/*/__{setup.rank}_0.distcp")]
    assert sorted(copies) == ["rank-00000", "rank-00000", "rank-00001", "rank-00001"], "two slots, here and there"
    nbytes = found.optimizer.stats()["snapshot_bytes"]  # type: ignore[attr-defined]
    assert 0 < nbytes <= bytes_in(setup.folder / "run")
    dist.barrier()
    found.snapshots.close()
    assert [path.name for path in setup.folder.glob("run/*")] == [".lock"]


test_situations = case.each()


def _wait_for_a_late_rank(setup: Setup, time_out: float) -> None:
    model, opt = sharded()
    checkpoint.save(setup.folder / "disk", model, opt)
    taken = Snapshots(model, opt, folder=setup.folder / "run", every=1)
    taken.load()
    for act in (
        lambda: checkpoint.save(setup.folder / "disk", model, opt),
        lambda: checkpoint.save(setup.folder / "disk", model, opt, background=True).wait(),
        lambda: checkpoint.load(setup.folder / "disk", model, opt),
        taken.step,
        taken.close,
        Snapshots(model, opt, folder=setup.folder / "run", every=1).load,
    ):
        dist.barrier()
        if setup.rank == 0:
            time.sleep(time_out / 4)
        act()


@pytest.mark.nightly
def test_a_rank_may_be_late_for_a_save_or_load_by_more_than_a_fifth_of_the_time_out() -> None:
    run_ranks(_wait_for_a_late_rank, 2, 12.0, group_timeout=12.0)


def test_warnings_are_given_once_a_minute() -> None:
    complaints = Complaints()
    with mock.patch("time.monotonic", side_effect=[1000.0, 1001.0, 1002.0, 1061.0, 1062.0]):
        kinds = ("late", "late", "failed", "late", "late")
        assert [complaints.is_due(kind) for kind in kinds] == [True, False, True, True, False]
