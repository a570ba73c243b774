"""The parent's half: starts ranks, keeps them over many cases, watches the time, puts together what they report."""

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz.before.case import BeforeCase
from tests.fuzz.case import Case, Fault
from tests.fuzz.loops.case import LoopCase
from tests.fuzz.mesh.case import MeshCase
from tests.fuzz.rank import Done, Group, Run, Verdict, serve

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.optim", "ddp_zero", "tests.fuzz.rank"])

GROUP_TIMEOUT = 20.0
CASES_PER_POOL, MESH_CASES_PER_POOL = 150, 20
"""Cases after which ranks are replaced, so that nothing can pile up: meshes keep process groups, with their threads."""
_LATE = 0.7
"""The part of the group's time-out after which an error has come from it."""
_FAULT_TIMEOUT = 6.0
_DUMP_SECONDS = 1.0
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        case: which.
        verdict: ``"passed"``, ``"refused"``, ``"both raised"``, or ``"failed"``.
        kind: of the refusal or of the failure.
        op: the last operation.
        text: what ranks have said.
        compared: steps that were compared.
        seconds: how long it took.
    """

    case: Case | BeforeCase | LoopCase | MeshCase
    verdict: str
    kind: str
    op: int
    text: str
    compared: int
    seconds: float


_ASKS_ALONE = "saved before the step"
"""Refusals that may be those of one rank: its peers are in a step of theirs, which waits for it, or need not ask."""


def _was_refused_alone(case: Case | BeforeCase | LoopCase | MeshCase, reports: Sequence[Any]) -> bool:
    """Whether the first refusal came in a statement of one rank, whose process would end where these live on."""
    first = min(report.op for report in reports)
    return isinstance(case, LoopCase) and first >= 0 and case.statements[first].rank is not None


def _are_of_some_ranks(reports: Sequence[Any]) -> bool:
    """Whether some ranks were refused, and each other one waited for them in vain or has a consolidated state."""
    others = [report for report in reports if report.status != "refused"]
    gives_up = re.compile("ZERO-503|Timed out waiting|pair closure|Connection closed").search
    asked_at = {report.op for report in reports if report.status == "refused"}
    return 0 < len(others) < len(reports) and all(
        asked_at == {report.op}
        if report.status == "ok"
        else report.status == "failed" and gives_up(report.what + report.text)
        for report in others
    )


class _Stopped(Exception):
    """Ranks were not heard of: ``kind`` and the text."""


class Pool:
    """Processes that run one case after the other.

    Args:
        ranks: how many.
        timeout: seconds after which a case without progress is a hang.
        injects: see `tests.fuzz.sides.Place`.
        device: ``"cpu"``, ``"cuda"`` with NCCL, or ``"sim"``, the simulated accelerator.
    """

    def __init__(self, ranks: int, timeout: float = 60.0, injects: str | None = None, device: str = "cpu") -> None:
        self._ranks, self._device = ranks, device
        self._timeout = timeout
        self._injects = injects
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._groups = 0
        self._age = 0
        self._has_group = False
        self._group_timeout = GROUP_TIMEOUT

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill()
        self._folder.cleanup()

    def run(self, case: Case | BeforeCase | LoopCase | MeshCase) -> Outcome:
        """Run a case."""
        if case.fault is not None:
            self._kill()
        self._group_timeout = _FAULT_TIMEOUT if case.fault is not None else GROUP_TIMEOUT
        started = time.monotonic()
        try:
            self._prepare()
            self._send(Run(case, self._folder.name, self._injects))
            outcome = self._follow(case, started)
        except _Stopped as stopped:
            kind, text = stopped.args
            outcome = Outcome(case, "failed", kind, -1, text + self._stacks(), 0, time.monotonic() - started)
        self._age += 1
        is_calm = outcome.verdict in ("passed", "refused", "both raised") or outcome.kind.startswith("difference")
        if isinstance(case, MeshCase):
            is_calm = outcome.verdict == "passed"  # distributed tensors remember meshes of groups that would be gone
        if self._device != "cpu":
            is_calm = outcome.verdict == "passed"  # streams of a device may stay stuck, or it has failed for good
        limit = MESH_CASES_PER_POOL if isinstance(case, MeshCase) else CASES_PER_POOL
        if not is_calm or case.fault is not None or self._age >= limit:
            self._kill()
        elif outcome.verdict != "passed":
            self._has_group = False
        return outcome

    # Processes

    def _prepare(self) -> None:
        if not self._processes:
            for rank in range(self._ranks):
                ours, theirs = _CONTEXT.Pipe()
                log = f"{self._folder.name}/log {rank}"
                process = _CONTEXT.Process(target=serve, args=(theirs, rank, self._ranks, log), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        if not self._has_group:
            self._groups += 1
            self._send(Group(f"{self._folder.name}/rendezvous {self._groups}", self._group_timeout, self._device))
            self._hear(_START_SECONDS)
            self._has_group = True

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._has_group, self._age = False, 0

    def _stacks(self) -> str:
        """Where every rank is, and what it has said."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        files = sorted(Path(self._folder.name).glob("log *"))
        return "".join(f"\n--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    # Messages

    def _send(self, message: object, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self._ranks) if ranks is None else ranks:
            try:
                self._pipes[rank].send(message)
            except OSError as error:
                raise _Stopped("died", f"rank {rank} is gone: {error}") from None

    def _hear(self, timeout: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """One message of every rank."""
        waited = list(range(self._ranks) if ranks is None else ranks)
        heard: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(heard) < len(waited):
            pipes = {self._pipes[rank]: rank for rank in waited if rank not in heard}
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                told = "".join(f"\n--- rank {rank}: {message}" for rank, message in heard.items())
                raise _Stopped("hang", f"ranks {sorted(pipes.values())} did nothing for {timeout:.0f} s{told}")
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    heard[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise _Stopped("died", f"rank {rank} has died") from None
        return heard

    # A case

    def _follow(self, case: Case | BeforeCase | LoopCase | MeshCase, started: float) -> Outcome:
        """Hear of every operation from all ranks until the case is over."""
        fault: Fault | None = case.fault
        is_silent = fault is not None and fault.how != "raise"
        ranks = [rank for rank in range(self._ranks) if not (is_silent and fault is not None and rank == fault.rank)]
        compared, last, kind = 0, -1, ""
        verdict = "passed"
        while verdict == "passed":
            heard = self._hear(self._timeout, ranks)
            if all(isinstance(message, Done) for message in heard.values()):
                return Outcome(case, "passed", "", last, "", compared, time.monotonic() - started)
            verdict, kind = self._judge(heard, case)
            last = next((message.op for message in heard.values() if not isinstance(message, Done)), last)
            compared += max((getattr(message, "compared", 0) for message in heard.values()), default=0)
            answered = [rank for rank in ranks if not isinstance(heard[rank], Done)]
            self._send(Verdict(verdict == "passed"), answered)
        text = "".join(
            f"\n--- rank {rank}: {getattr(m, 'status', m)} {getattr(m, 'what', '')} "
            f"after {getattr(m, 'seconds', 0):.1f} s\n{getattr(m, 'text', '')}"
            for rank, m in heard.items()
        )
        if verdict != "failed" or kind.startswith("difference"):
            self._hear(self._timeout, ranks)
        return Outcome(case, verdict, kind, last, text, compared, time.monotonic() - started)

    def _judge(self, heard: dict[int, Any], case: Case | BeforeCase | LoopCase | MeshCase) -> tuple[str, str]:
        """What an operation comes to, with what all ranks say of it; loops report only where they have ended."""
        is_in_step = not isinstance(case, LoopCase)
        if any(isinstance(message, Done) for message in heard.values()):
            return "failed", "ranks at different operations"
        reports = list(heard.values())
        if is_in_step and len({report.op for report in reports}) > 1 and reports[0].what != "a rank failed":
            return "failed", "ranks at different operations"
        statuses = {report.status for report in reports}
        refused = {report.what for report in reports if report.status == "refused"}
        may_part = all(what.startswith(_ASKS_ALONE) for what in refused) or _was_refused_alone(case, reports)
        if not is_in_step and may_part and _are_of_some_ranks(reports):
            return "refused", refused.pop()
        failed = sorted({report.what for report in reports if report.status == "failed"})
        if any("accelerator has failed" in report.what for report in reports):
            return "failed", "the simulated accelerator"
        if failed:
            is_calm = statuses <= {"ok", "failed"} and failed[0].startswith("difference")
            return "failed", failed[0] if len(failed) == 1 and (is_calm or statuses == {"failed"}) else str(failed)
        if statuses == {"ok"}:
            return "passed", ""
        if len(statuses) > 1:
            return "failed", "not on every rank"
        is_late = max(report.seconds for report in reports) > _LATE * self._group_timeout
        if self._device != "cpu" and statuses == {"both raised"}:
            is_late = False  # of an error in one rank's step the others hear by the time-out there: docs/limits.md
        if is_late and reports[0].what != "a rank failed" and not _was_refused_alone(case, reports):
            return "failed", "by the time-out only"
        return next(iter(statuses)), max(report.what for report in reports)
