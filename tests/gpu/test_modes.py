"""The modes of docs/accelerators.md on GPUs, but offload: NCCL with up to four ranks, and two Gloo ranks on one.

Skipped without a GPU; where there are fewer than ranks, these share. Each mode runs as it is, and with a sleep on the
GPU before whatever the library gives its side stream, so that a step that does not wait for it takes wrong numbers; and
with one rank alone that asks for the state at every point of an iteration, or evaluates, with snapshots and saves. A
single rank sends everything to itself, so that NCCL is called as by several.
"""

from unittest import mock

import pytest
import torch

from benchmarks.gpu.machines import delay_side_stream
from ddp_zero.core.backward.scratch_buffers import SideStream
from tests.accelerator import simulation
from tests.accelerator.modes import MODES, Report, run
from tests.gpu.modes import GPUS, Gpus, faults, modes_of
from tests.multiproc.harness import Setup, run_ranks

RANKS = [*(("nccl", ranks) for ranks in sorted({1, 2, 3, 4, max(1, GPUS)})), ("gloo", 2)]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_simulation = pytest.mark.skipif(simulation.missing() is not None, reason=str(simulation.missing()))


@needs_gpu
@pytest.mark.parametrize(("backend", "ranks"), RANKS)
def test_modes(backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _, found = faults(backend, ranks, [mode.name for mode in modes_of(ranks)], has_beside=backend == "nccl")
    assert not found, "\n".join(found)


@needs_simulation
def test_modes_on_the_simulated_accelerator() -> None:
    """All of them run in tests/accelerator; here, that this file does not rot."""
    simulation.compiled()
    # before torch 2.13 DDP looks for unused parameters on CUDA alone
    assert not faults("simccl", 1, [mode.name for mode in modes_of(1) if not mode.find_unused])[1]
    assert not faults("simccl", 2, ["stage 2, interleaved", "stage 1, standalone"])[1]
    assert not faults("simccl", 2, ["stage 2, interleaved"], has_beside=True)[1]


def _without_join(setup: Setup) -> Report:
    delay_side_stream()
    (mode,) = (mode for mode in MODES if mode.name == "stage 2, step after backward")
    with mock.patch.object(SideStream, "join"):
        return run(mode, setup, Gpus(), torch.device("cuda", 0), "cpu:gloo,cuda:nccl")


@needs_gpu
def test_a_missing_join_is_a_wrong_number() -> None:
    (report,) = run_ranks(_without_join, 1)
    assert report.different, "the delay has delayed nothing"
