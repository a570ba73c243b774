"""Every mode on the simulated accelerator: no races, DDP's numbers, and what each step sends and waits for."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import estimate, shard_optimizer
from ddp_zero.core.backward.scratch_bucket import ScratchBucket
from ddp_zero.core.backward.scratch_buffers import Buffer, RunningOn, SideStream
from tests.accelerator import page, simulation
from tests.accelerator.modes import GROUPS, MODES, STEPS, Mode, Report, small_model
from tests.accelerator.training import BY_NAME, loaded, train
from tests.multiproc.harness import Cases, Setup, run_ranks
from tests.walk import calls

pytestmark = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))

_WAYS = [(ranks, is_late) for ranks in (2, 3, 4) for is_late in (False, True)]
"""Numbers of ranks, and whether work runs as late as it may."""


IN_A_STEP = ("ZERO-307", "ZERO-309")
"""With which a state is refused between a backward pass that has stepped and ``opt.step()``."""


@cache
def _compile() -> None:
    simulation.compiled()  # here, not by all ranks at once while their time-outs run


def _on_ranks(world_size: int, body: Callable[..., Any], *args: object) -> list[Any]:
    _compile()
    return Cases.pool_of(world_size, simulation.NAME).run(body, *args, timeout=120.0, group_timeout=60.0)


def _check(report: Report) -> None:
    assert not report.plain_races, f"DDP with the plain optimizer: {report.plain_races[:3]}"
    assert not report.races, "\n".join(report.races[:5])
    assert not report.faults, "\n".join(report.faults[:5])
    assert not report.different, f"not DDP's numbers: {report.different[:5]}"
    assert report.moved
    held, said = report.memory
    assert held == said, "bytes of stage 2's buffers and of copies in syncs, and the estimate of them"


def _has_no_races(setup: Setup, name: str, is_late: bool) -> None:
    report = train(setup, name, is_late)
    _check(report)
    if setup.world_size == 2 and setup.rank == 0 and not is_late:
        cells = page.cells_of(report)
        assert page.has_row(BY_NAME[name], report), (
            f"docs/accelerators.md does not have {cells!r} for {name}. `python -m tests.accelerator` writes it. "
            f"Waited at {report.syncs}."
        )


_CASES = [*((mode, *way) for way in _WAYS for mode in MODES), (GROUPS, 4, False), (GROUPS, 4, True)]


_MIDDLE = {
    # with the guards that are taken away one at a time below
    ("stage 2, interleaved", 2, False),
    ("stage 2, step after backward", 2, True),
    ("stage 2, `accumulate` after edits, layers of one size", 2, False),
    # other readers and writers of stage 2's buffers, on further streams
    ('stage 2, `sync="forward"`', 2, False),
    ("stage 2, `max_grad_norm`", 2, False),
    ("stage 2, bf16 with masters", 2, False),
    ("stage 2, fp32 accumulation", 2, False),
    ("stage 2, cut parameters", 2, False),
    ("stage 2, offload", 2, False),
    ("stage 2, own stream", 2, False),
    ('stage 2, `sync="forward"`, average on a stream of its own', 2, False),
    ("stage 2, checkpoint saved and loaded", 2, False),
}
"""Modes that README's command runs."""


assert {case[0] for case in _MIDDLE} <= BY_NAME.keys()


def _case(mode: Mode, world_size: int, is_late: bool, middle: set[tuple[str, int, bool]] = _MIDDLE) -> Any:
    name = f"{mode.name}, {world_size} ranks{', late' if is_late else ''}"
    is_middle = (mode.name, world_size, is_late) in middle
    return pytest.param(mode, world_size, is_late, id=name, marks=[pytest.mark.middle] if is_middle else [])


@pytest.mark.parametrize(("mode", "world_size", "is_late"), [_case(*case) for case in _CASES])
def test_modes(mode: Mode, world_size: int, is_late: bool) -> None:
    _on_ranks(world_size, _has_no_races, mode.name, is_late)


def works_beside(setup: Setup, name: str, is_late: bool, moves: bool | None = None) -> None:
    """Train in a mode, with what is in `beside` unless ranks may end early."""
    report = train(setup, name, is_late, has_beside=not BY_NAME[name].joins, moves=moves)
    _check(report)
    found = report.beside
    if found is None:
        return
    assert not found.wrong, f"not the plain side's: {found.wrong}"
    assert set(found.refusals) <= {("after backward", code) for code in IN_A_STEP}, found.refusals
    assert sum(found.answers.values()) >= (STEPS - 1 if setup.world_size < 4 else 1)


_MIDDLE_BESIDE = {("stage 1, standalone", 2, False)}


@pytest.mark.parametrize(
    ("mode", "world_size", "is_late"), [_case(*case, middle=_MIDDLE_BESIDE) for case in _CASES if not case[0].joins]
)
def test_one_rank_alone_and_work_beside(mode: Mode, world_size: int, is_late: bool) -> None:
    _on_ranks(world_size, works_beside, mode.name, is_late)


_MIDDLE_ELSEWHERE = {("stage 2, `Join`", 2, False), ("stage 2, offload", 2, True)}
"""Modes that issue work of buckets on the script's thread: in backward's, the gradients' device is the current one."""


@pytest.mark.parametrize(
    ("mode", "world_size", "is_late"),
    [_case(*case, middle=_MIDDLE_ELSEWHERE) for case in _CASES if case[1] == 2],
)
def test_another_device_is_current(mode: Mode, world_size: int, is_late: bool) -> None:
    for moves in (False, True):
        _on_ranks(world_size, works_beside, mode.name, is_late, moves)


# What each guard prevents: without it, the simulation reports races or the numbers differ.


def _line_of(function: Callable[..., object], text: str) -> str:
    """The place of a line of the library, as reports name it."""
    lines, first = inspect.getsourcelines(function)
    number = next(first + offset for offset, line in enumerate(lines) if text in line)
    return f"{function.__code__.co_filename}:{number}".removeprefix(simulation.LIBRARY)


_GUARDS = [
    (
        "the user's stream joins the side stream",
        "wait",
        _line_of(SideStream.join, "wait_stream"),
        "stage 2, step after backward",
    ),
    (
        "the side stream waits for backward",
        "wait",
        _line_of(RunningOn.__enter__, "wait_stream"),
        "stage 2, interleaved",
    ),
    ("a buffer's next use waits for its last", "wait", _line_of(Buffer.lend, "wait_event"), "stage 2, interleaved"),
    (
        "memory that the side stream reads is not reused before",
        "record_stream",
        _line_of(SideStream.record_use, "record_stream"),
        "stage 2, `accumulate` after edits, layers of one size",
    ),
]


def _is_noticed(setup: Setup, mode: str, what: str, line: str) -> None:
    eager = train(setup, mode, False, (what, line))
    races = torch.tensor(len(eager.races))
    dist.all_reduce(races)
    assert races, f"no race on any rank without {what} at {line}"
    assert not eager.plain_races


def _differs_when_late(setup: Setup, mode: str, what: str, line: str) -> None:
    assert train(setup, mode, True, (what, line)).different, f"DDP's numbers without {what} at {line}"


@pytest.mark.middle
@pytest.mark.parametrize(
    ("what", "line", "mode"), [guard[1:] for guard in _GUARDS], ids=[guard[0] for guard in _GUARDS]
)
def test_a_missing_guard_is_a_race(what: str, line: str, mode: str) -> None:
    _on_ranks(2, _is_noticed, mode, what, line)


@pytest.mark.middle
def test_a_missing_join_is_a_wrong_number_when_work_is_late() -> None:
    _on_ranks(2, _differs_when_late, _GUARDS[0][3], *_GUARDS[0][1:3])


# Work of the host

CALLS = {"whole": 57, "cut": 57, "clipped": 56, "masters": 74, "stage 1": 53}
"""Of Python and C functions for a further bucket, by mode; DDP has none."""


@pytest.mark.middle
def test_no_bucket_makes_more_calls_than_it_did() -> None:
    _compile()
    found = run_ranks(calls.measure, 2, list(CALLS), True, timeout=200.0)[0]
    now = {mode: counted.per_bucket()[0] for mode, counted in found.items()}
    assert all(now[mode] <= most for mode, most in CALLS.items()), now


# Memory


def _sums_at_once(setup: Setup, **options: Any) -> tuple[int, int]:
    """Bytes of the sums in fp32 that exist at once in an overlapped step, and what `estimate` says of them."""
    loaded(setup).set_device(setup.rank)
    device, group = torch.device("sim", setup.rank), dist.new_group([0, 1], backend="cpu:gloo,sim:simccl")
    module = small_model((32,) * 9, torch.bfloat16).to(device)
    ddp = DistributedDataParallel(module, [device.index], process_group=group, bucket_cap_mb=0.001)
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=2, lr=0.1, master_weights=True, partition="elements", **options)
    kept = list[StorageWeakRef]()
    sizes, most = list[int](), 0

    def start(segment: ScratchBucket) -> None:
        nonlocal most
        started(segment)
        kept.append(StorageWeakRef(segment.total(segment.owned[0]).untyped_storage()))
        sizes.append(segment.nbytes)
        most = max(most, sum(size for one, size in zip(kept, sizes, strict=True) if not one.expired()))

    started = ScratchBucket.start
    with mock.patch.object(ScratchBucket, "start", start):
        for step in range(5):
            most = 0 if step == 2 else most  # the first step waits, and keeps all
            ddp(torch.randn(4, 32, dtype=torch.bfloat16, device=device)).float().sum().backward()
            opt.step()
            opt.zero_grad()
    given: dict[str, Any] = {"stage": 2, "partition": "elements", "master_weights": True, **options}
    found = estimate(module, torch.optim.AdamW, ranks=2, bucket_cap_mb=0.001, **given)
    mode = "stage 2, inside backward, cut" + (", offload cpu" if options else "")
    return most, found[mode].device["sums in fp32"]


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}], ids=["on the device", "offload"])
def test_sums_in_fp32_are_as_many_as_estimated(options: dict[str, Any]) -> None:
    for most, said in _on_ranks(2, partial(_sums_at_once, **options)):
        assert most == said
