"""Asks all hosts at once whether they are ready for a job (folder, script, interpreter), and for their addresses."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddp_zero.launch.commands import HostCommand
from ddp_zero.launch.guard import MARK

_MOST_AT_ONCE = 64
_SHOWN_LINES = 3


@dataclass(frozen=True)
class Answer:
    """What a host has said.

    Attributes:
        addresses: its addresses, the most useful first.
        port: a free port on it.
    """

    addresses: tuple[str, ...]
    port: int


def ask(hosts: Sequence[str], command_of: Callable[[str], HostCommand], time_out: float) -> dict[str, Answer]:
    """The answers of hosts, by name.

    Args:
        hosts: their names.
        command_of: what asks a host.
        time_out: seconds that a host may take.

    Raises:
        RuntimeError: naming every host that has not answered, or is not ready, with the reason.
    """
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        found = list(pool.map(lambda host: _ask(command_of(host), time_out), hosts))
    wrong = [f"{host}: {answer}" for host, answer in zip(hosts, found, strict=True) if isinstance(answer, str)]
    if wrong:
        raise RuntimeError("\n  ".join([f"Expected all {len(hosts)} hosts to be ready, got from", *wrong]))
    return {host: answer for host, answer in zip(hosts, found, strict=True) if isinstance(answer, Answer)}


def read_answer(printed: str) -> Answer | None:
    """The answer in what a host has printed, which may begin with a greeting; None if there is none."""
    lines = [line.removeprefix(MARK) for line in printed.splitlines() if line.startswith(MARK)]
    try:
        content = json.loads(lines[-1])
        return Answer(tuple(map(str, content["addresses"])), int(content["port"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _ask(command: HostCommand, time_out: float) -> Answer | str:
    try:
        result = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_out,
            env={**os.environ, **command.environment},
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {time_out:g} s"
    except OSError as error:
        return f"{command.argv[0]} cannot be started: {error.strerror}"
    if result.returncode == 0 and (answer := read_answer(result.stdout)) is not None:
        return answer
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return f"exit code {result.returncode}, " + ("; ".join(lines[-_SHOWN_LINES:]) or "no output")
