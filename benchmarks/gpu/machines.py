"""Devices of the benchmark: GPUs, and the simulated accelerator in ``tests/accelerator``.

Both count host synchronisations, report peak memory, and can delay work beside backward: a GPU by a sleep before
everything that the library enqueues on its side stream, the simulated one by running all work as late as its results
allow.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

import ddp_zero
from ddp_zero.core.backward.scratch_buffers import RunningOn, SideStream
from ddp_zero.core.comm.communicator import Communicator

LIBRARY = str(Path(ddp_zero.__file__).parent) + "/"
SLEEP_CYCLES = 10_000_000
"""About 5 ms at 2 GHz: longer than backward of a small model."""


def share_gpus(rank: int, ranks: int) -> None:
    """Where there are fewer GPUs than ranks, let NCCL give several to one. Before the first communicator.

    NCCL refuses two ranks of one host on one device. So each says that it is on a host of its own, and they talk by
    sockets. Orders, bits, bytes and memory are those of a job; times are not.
    """
    if torch.cuda.device_count() < ranks:
        for part in ("IB", "P2P", "SHM"):
            os.environ[f"NCCL_{part}_DISABLE"] = "1"
        os.environ.update({"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"})


class Machine(Protocol):
    """The devices of one rank.

    Attributes:
        backend: backend for ``init_process_group``.
        name: name of the device, for the report.
    """

    backend: str
    name: str

    def choose(self, rank: int) -> torch.device:
        """Make this rank's device current."""

    def forget_peak(self) -> None:
        """Count the most memory from here."""

    def peak_bytes(self) -> int:
        """The most that tensors had at once since `forget_peak`."""

    def syncs(self) -> AbstractContextManager[list[str]]:
        """A list that holds, afterwards, the places at which the host waited for the device: ``file:line``."""

    def races(self) -> list[str]:
        """Unordered uses of memory, if the device can detect them."""


class Cuda:
    """GPUs, with NCCL or Gloo.

    Args:
        backend: ``nccl`` or ``gloo``.
        ranks: number of ranks, which share GPUs if there are more.
        late: sleep before the library's work on its side stream, in this process from now on.
    """

    def __init__(self, backend: str, ranks: int, late: bool) -> None:
        self._ranks = ranks
        self.backend = f"cpu:gloo,cuda:{backend}"
        self.name = torch.cuda.get_device_name()
        if late:
            delay_side_stream()

    def choose(self, rank: int) -> torch.device:
        """One GPU per rank, in turns where there are fewer."""
        share_gpus(rank, self._ranks)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def forget_peak(self) -> None:
        """See `Machine`."""
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """See `Machine`."""
        return torch.cuda.max_memory_allocated()

    @contextmanager
    def syncs(self) -> Iterator[list[str]]:
        """Those that torch knows of: `torch.cuda.set_sync_debug_mode`."""
        found: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [_place(one.filename, one.lineno) for one in caught if "called a synchronizing" in str(one.message)]

    def races(self) -> list[str]:
        """None: a GPU cannot tell."""
        return []


class Simulated:
    """The simulated accelerator, one device per rank. Its times are meaningless.

    Args:
        ranks: number of ranks.
        folder: folder for the rendezvous of the ranks' process groups.
        late: True to run work as late as its results allow.
    """

    backend = "cpu:gloo,sim:simccl"
    name = "simulated accelerator, whose times say nothing"

    def __init__(self, ranks: int, folder: Path, late: bool) -> None:
        from tests.accelerator import simulation

        os.environ["SIMULATED_DEVICE_FOLDER"] = str(folder)
        self._extension: Any = simulation.load(ranks, late)

    def choose(self, rank: int) -> torch.device:
        """See `Machine`."""
        self._extension.set_device(rank)
        return torch.device("sim", rank)

    def forget_peak(self) -> None:
        """See `Machine`."""
        self.peak_bytes()

    def peak_bytes(self) -> int:
        """See `Machine`. The count begins anew."""
        return int(self._extension.most_allocated(self._extension.current_device()))

    @contextmanager
    def syncs(self) -> Iterator[list[str]]:
        """See `Machine`."""
        found: list[str] = []
        before = len(self._extension.host_syncs())
        yield found
        found += [f"ddp_zero/{line}" if line else what for what, line in self._extension.host_syncs()[before:]]

    def races(self) -> list[str]:
        """See `Machine`."""
        found: list[str] = self._extension.races()
        return found


def choose(job: dict[str, Any], folder: Path) -> Machine:
    """The machine of a job."""
    if job["device"] == "sim":
        return Simulated(job["ranks"], folder, job["late"])
    return Cuda(job["backend"], job["ranks"], job["late"])


def _place(file: str, line: int) -> str:
    """Of this library by its module, elsewhere by the file's name."""
    return f"ddp_zero/{file.removeprefix(LIBRARY)}:{line}" if file.startswith(LIBRARY) else f"{Path(file).name}:{line}"


class _Late(RunningOn):
    """Work that comes after a sleep of the GPU."""

    def __enter__(self) -> None:
        super().__enter__()
        torch.cuda._sleep(SLEEP_CYCLES)


def delay_side_stream() -> None:
    """Sleep on the GPU before the library's work on its side stream, in this process from now on."""
    running = SideStream.running

    def late(side: SideStream, device: torch.device) -> AbstractContextManager[object]:
        return _Late(side.stream(device)) if device.type == "cuda" else running(side, device)

    SideStream.running = late  # type: ignore[method-assign, assignment]


def send_to_itself() -> None:
    """Let the library call collectives also where a process is alone, from now on."""
    Communicator.is_alone = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]
