"""Runs scripts on ranks forked from the server that has imported torch, instead of with torchrun.

Torchrun and two ranks import torch three times, some ten CPU seconds. A forked rank differs in nothing else that a
script sees: it runs as ``__main__`` with torchrun's variables, its own arguments and its own streams.
"""

import faulthandler
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run as torchrun
from torch.distributed.launcher.api import elastic_launch

from tests import HANG
from tests.multiproc.harness import CONTEXT

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Ended:
    """How a job ended and what its ranks printed, rank 0 first.

    Attributes:
        code: the largest of the ranks' exit codes.
        output: of all ranks.
        errors: of all ranks.
    """

    code: int
    output: str
    errors: str


def run_example(script: str, options: str) -> str:
    """Run a script of ``examples/`` on two forked ranks, and return what it prints."""
    ended = run_script(ROOT / "examples" / script, options.split())
    assert ended.code == 0, ended.errors
    return ended.output


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    ranks: int | None = 2,
    *,
    folder: Path | None = None,
    warnings_are_errors: bool = False,
    timeout: float = HANG,
) -> Ended:
    """Run a script on forked ranks, or for None in one process that no launcher started.

    Args:
        script: the file.
        arguments: of its command line.
        ranks: number of processes.
        folder: in which it runs; None: this one.
        warnings_are_errors: as ``python -W error``.
        timeout: seconds after which all ranks are killed and the test fails.
    """
    works = _works(script, arguments, ranks, folder, warnings_are_errors)
    return _run(_be_the_main_program, works, timeout)


def run_under_torchrun(script: Path, arguments: Sequence[str], *, max_restarts: int, timeout: float) -> Ended:
    """As `run_script`, with torchrun's agent, which starts all ranks again when one has failed."""
    return _run(_be_torchrun, [(script, list(arguments), 2, max_restarts)], timeout)


def kill_script(
    script: Path, arguments: Sequence[str], ranks: int, *, once: Callable[[], bool], timeout: float = HANG
) -> None:
    """Run a script on forked ranks, and kill all of them without warning as soon as something is so."""
    with _started(_be_the_main_program, _works(script, arguments, ranks)) as (processes, streams):
        deadline = time.monotonic() + timeout
        while not once():
            ended = [process.exitcode for process in processes if process.exitcode is not None]
            assert not ended, f"it ended by itself: {ended}\n{_printed(streams, ranks)}"
            assert time.monotonic() < deadline, f"not so after {timeout:.0f} s"
            time.sleep(0.005)


def _works(script: Path, arguments: Sequence[str], ranks: int | None, *more: Any) -> list[tuple[Any, ...]]:
    """For each rank what `_be_the_main_program` takes besides its streams."""
    port = _free_port()
    names = [{} if ranks is None else _names_of_torchrun(rank, ranks, port) for rank in range(ranks or 1)]
    return [(script, list(arguments), names_of_rank, *more) for names_of_rank in names]


def _run(body: Callable[..., None], works: Sequence[tuple[Any, ...]], timeout: float) -> Ended:
    with _started(body, works) as (processes, streams):
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        states = [_state_of(process) for process in processes]
        output, errors = _printed(streams, len(processes))
        if None in codes:
            pytest.fail(f"ranks still running after {timeout:.0f} s: {codes}, {states}\n{output}\n{errors}")
        return Ended(max(abs(code or 0) for code in codes), output, errors)


@contextmanager
def _started(body: Callable[..., None], works: Sequence[tuple[Any, ...]]) -> Iterator[tuple[list[BaseProcess], Path]]:
    """A forked process for each of these arguments, which come after where its streams go; killed in the end."""
    with ExitStack() as stack:
        streams = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = list[BaseProcess]()
        for rank, work in enumerate(works):
            processes.append(CONTEXT.Process(target=body, args=(streams / str(rank), *work)))
            processes[-1].start()
            stack.callback(_end, processes[-1])
        yield processes, streams


def _printed(streams: Path, ranks: int) -> tuple[str, str]:
    output, errors = (
        "".join(Path(f"{streams / str(rank)}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err")
    )
    return output, errors


def _names_of_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _state_of(process: BaseProcess) -> str:
    """The state of a process in Linux's letters, Z if it has ended; one that runs writes where its threads are."""
    if process.exitcode is not None or process.pid is None:
        return "ended"
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    process.join(2.0)
    stat = Path(f"/proc/{process.pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _be_the_main_program(
    streams: Path,
    script: Path,
    arguments: list[str],
    names: dict[str, str],
    folder: Path | None = None,
    warnings_are_errors: bool = False,
) -> None:
    _write_to(streams)
    os.environ.update(names)
    if folder is not None:
        os.chdir(folder)
    if warnings_are_errors:
        warnings.simplefilter("error")
    _run_as_main(script, arguments)


def _be_torchrun(streams: Path, script: Path, arguments: list[str], ranks: int, max_restarts: int) -> None:
    _write_to(streams)
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]  # --standalone
    options += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", "--start-method=fork"]
    config, *_ = torchrun.config_from_args(torchrun.parse_args([*options, str(script), *arguments]))
    elastic_launch(config, _be_a_worker)(script, arguments)


def _be_a_worker(script: Path, arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler, but what a program starts with
    _run_as_main(script, arguments)


def _write_to(streams: Path) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{streams}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)


def _run_as_main(script: Path, arguments: list[str]) -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
