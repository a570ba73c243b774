"""Starts a command as a user does, the launcher above all, and looks for what it has left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """\
import os, subprocess, sys, time
token, fails = sys.argv[1:3]
place = "rank " + os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", token], start_new_session=True)
for stream, text in ((1, "on " + os.environ["GREETING"]), (2, "to stderr")):
    os.write(stream, f"{place} {text}\\n".encode())  # at once, or lines of two ranks mix
deadline = time.time() + (4 if fails == os.environ["RANK"] else 600)
while time.time() < deadline and fails != "none":
    time.sleep(0.05)
sys.exit(3 if fails == os.environ["RANK"] else 0)
"""
"""Waits for ever, or fails after some seconds on one rank; its child is a daemon that nobody waits for."""


def launched(
    folder: Path, *arguments: str, prefix: tuple[str, ...] = ()
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """The launcher; see `started`."""
    return started(folder, *prefix, sys.executable, "-m", "ddp_zero", "launch", *arguments)


@contextmanager
def started(folder: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """A command in a session of its own, which is killed in the end, its output in pipes."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def finish(process: "subprocess.Popen[str]", timeout: float = 120) -> tuple[int, str, str]:
    """The exit code, the output, and that of errors."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for_lines(process: "subprocess.Popen[str]", count: int, text: str) -> list[str]:
    """The first lines of output with a text."""
    assert process.stdout is not None, "launched() makes pipes"
    found: list[str] = []
    for line in process.stdout:
        found += [line] if text in line else []
        if len(found) == count:
            return found
    raise AssertionError(f"Expected {count} lines with {text!r}, got {found}.")


def left_behind(token: str) -> list[str]:
    """Command lines of processes that name a token, on any host of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if token in line and int(path.parent.name) != os.getpid() else []
    return found


def assert_nobody_left(token: str, within: float) -> None:
    """Nobody runs any more after at most some seconds."""
    deadline = time.monotonic() + within
    while (left := left_behind(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
