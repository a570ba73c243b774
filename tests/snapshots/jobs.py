"""Starts the training on one host or on several, kills parts of it, and reads what its ranks have written down."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training.py")


@contextmanager
def namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """Hosts of network namespaces, joined by a bridge: their names and addresses. For root only."""
    mark = f"sn{os.getpid() % 10_000}"
    subnet = f"10.{210 + os.getpid() % 40}.{os.getpid() % 250}"
    names = [f"{mark}-{number}" for number in range(count)]
    try:
        _run(f"ip link add {mark}br type bridge")
        _run(f"ip addr add {subnet}.254/24 dev {mark}br")
        _run(f"ip link set {mark}br up")
        for number, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip link add {mark}v{number} type veth peer name eth0 netns {name}")
            _run(f"ip link set {mark}v{number} master {mark}br up")
            _run(f"ip -n {name} addr add {subnet}.{number + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
        yield [(name, f"{subnet}.{number + 1}") for number, name in enumerate(names)]
    finally:
        for number, name in enumerate(names):
            for command in (f"ip netns del {name}", f"ip link del {mark}v{number}"):
                subprocess.run(shlex.split(command), capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{mark}br"], capture_output=True, check=False)


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), capture_output=True, check=True)


@dataclass
class Step:
    """A step that a rank has written down: its number, the digest of the parameters, and the time."""

    number: int
    digest: int
    at: float


@dataclass
class Start:
    """A start of a rank: the step from which it went on, the time, what it has restored, and the steps that it took."""

    step: int
    at: float
    told: str
    steps: list[Step] = field(default_factory=list)


def starts_of(log: Path) -> list[Start]:
    """All starts that a rank has written down."""
    found: list[Start] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        kind, *rest = line.split(maxsplit=3)
        if kind == "start":
            found.append(Start(int(rest[0]), float(rest[1]), rest[2]))
        elif kind == "step" and len(rest) == 3:
            found[-1].steps.append(Step(int(rest[0]), int(rest[1]), float(rest[2])))
    return found


class Job:
    """The ranks of a job, started anew after each crash.

    Args:
        memory: a folder for snapshots, with one of each host in it.
        log: a folder for the ranks' own words, and for checkpoints.
        ranks: number of ranks on each host.
        hosts: names and addresses of namespaces; None: one host, this machine.
        arguments: of the script.
    """

    def __init__(
        self, memory: Path, log: Path, ranks: int, hosts: list[tuple[str, str]] | None, *arguments: str
    ) -> None:
        self.memory, self.log, self._ranks, self._arguments = memory, log, ranks, arguments
        self.hosts = hosts or [("", "127.0.0.1")]
        self._attempt = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        log.mkdir(parents=True, exist_ok=True)
        memory.mkdir(parents=True, exist_ok=True)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return len(self.hosts) * self._ranks

    def start(self) -> None:
        """Start all ranks."""
        self._attempt += 1
        for rank in range(self.world_size):
            host = rank // self._ranks
            name, _ = self.hosts[host]
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(rank % self._ranks),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": self.hosts[0][1],
                # below the ports that systems give to connections: one of those may be taken at the next start
                "MASTER_PORT": str(20_000 + (os.getpid() * 7 + self._attempt) % 12_000),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
            }
            if name:
                variables["GLOO_SOCKET_IFNAME"] = "eth0"
            inside = ["ip", "netns", "exec", name] if name else []
            command = [*inside, sys.executable, str(SCRIPT), f"{self.memory}/host-{{host}}", str(self.log)]
            with (self.log / f"errors-{rank}").open("ab") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [*command, *self._arguments], env={**os.environ, **variables}, stdout=errors, stderr=errors
                    )
                )

    def starts(self) -> list[list[Start]]:
        """For each rank, its starts."""
        return [starts_of(self.log / f"rank-{rank}") for rank in range(self.world_size)]

    def wait_for_steps(self, count: int, time_out: float = 120.0) -> None:
        """Wait until every rank has taken so many steps since this start."""
        deadline = time.monotonic() + time_out
        while time.monotonic() < deadline:
            found = self.starts()
            if all(len(one) == self._attempt and len(one[-1].steps) >= count for one in found):
                return
            if any(process.poll() not in (None, 0) for process in self.processes):
                break
            time.sleep(0.02)
        self.stop()
        errors = "\n".join((self.log / f"errors-{rank}").read_text()[-3000:] for rank in range(self.world_size))
        raise AssertionError(f"Expected {count} steps of every rank, got\n{errors}")

    def kill_rank(self, rank: int) -> float:
        """SIGKILL one rank. Returns the time."""
        at = time.time()
        self.processes[rank].send_signal(signal.SIGKILL)
        return at

    def kill_host(self, host: int) -> float:
        """SIGKILL all ranks of a host, and delete its snapshots. Returns the time."""
        at = time.time()
        mine = self.processes[host * self._ranks : (host + 1) * self._ranks]
        for process in mine:
            process.send_signal(signal.SIGKILL)
        for process in mine:
            process.wait()
        shutil.rmtree(self.memory / f"host-{host}")
        return at

    def wait_for_the_end(self, time_out: float = 60.0) -> list[int]:
        """Wait until every rank has ended; exit codes, None replaced by that of the kill that had to be."""
        deadline = time.monotonic() + time_out
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in self.processes]
        self.stop()
        return [-9 if code is None else code for code in codes]

    def stop(self) -> None:
        """SIGKILL whatever still runs."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.processes.clear()


@dataclass
class Crash:
    """A crash and its cost.

    Attributes:
        lost: what was killed.
        step: the last step that any rank had finished.
        resumed: the step from which all ranks went on.
        seconds: from the kill to the end of the first new step.
        told: what was restored.
    """

    lost: str
    step: int
    resumed: int
    seconds: float
    told: str

    @property
    def lost_steps(self) -> int:
        """Steps that had to be taken again."""
        return self.step - self.resumed


def crash_often(job: Job, times: int, loses_hosts: bool, order: random.Random, seconds: float = 1.5) -> list[Crash]:
    """Kill a random rank, or a random host with its memory, at random moments, and start again each time."""
    crashes = []
    job.start()
    job.wait_for_steps(2)
    ranks_per_host = job.world_size // len(job.hosts)
    for _ in range(times):
        time.sleep(order.uniform(0.0, seconds))
        if loses_hosts:
            host = order.randrange(job.world_size // ranks_per_host)
            lost, at = f"host {host}", job.kill_host(host)
        else:
            rank = order.randrange(job.world_size)
            lost, at = f"rank {rank}", job.kill_rank(rank)
        job.wait_for_the_end(20.0)
        before = max(one[-1].steps[-1].number for one in job.starts())
        job.start()
        job.wait_for_steps(2)
        starts = [one[-1] for one in job.starts()]
        assert len({start.step for start in starts}) == 1, "all ranks go on from one step"
        first = max(start.steps[0].at for start in starts)
        crashes.append(Crash(lost, before, starts[0].step, first - at, starts[0].told))
    job.stop()
    return crashes


def wrong_steps(job: Job, unbroken: list[Step]) -> list[int]:
    """Numbers of the steps after which a rank's parameters were not those of an unbroken job."""
    expected = {step.number: step.digest for step in unbroken}
    found = [step for starts in job.starts() for start in starts for step in start.steps]
    assert found, "steps were taken"
    return sorted({step.number for step in found if step.digest != expected[step.number]})
