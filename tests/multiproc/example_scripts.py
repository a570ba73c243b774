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
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

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
    with ExitStack() as stack:
        streams = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, processes = _free_port(), list[BaseProcess]()
        for rank in range(ranks or 1):
            names = {} if ranks is None else _names_of_torchrun(rank, ranks, port)
            work = (script, list(arguments), names, folder, streams / str(rank), warnings_are_errors)
            processes.append(CONTEXT.Process(target=_be_the_main_program, args=work))
            processes[-1].start()
            stack.callback(_end, processes[-1])
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        states = [_state_of(process) for process in processes]
        output, errors = (
            "".join(Path(f"{streams / str(rank)}.{name}").read_text() for rank in range(len(processes)))
            for name in ("out", "err")
        )
        if None in codes:
            pytest.fail(f"ranks still running after {timeout:.0f} s: {codes}, {states}\n{output}\n{errors}")
        return Ended(max(abs(code or 0) for code in codes), output, errors)


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
    script: Path,
    arguments: list[str],
    names: dict[str, str],
    folder: Path | None,
    streams: Path,
    warnings_are_errors: bool,
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{streams}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    os.environ.update(names)
    if folder is not None:
        os.chdir(folder)
    if warnings_are_errors:
        warnings.simplefilter("error")
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
