"""Runs a command on a host, and leaves none of its processes behind; started there by its path, without torch.

The command is stopped by SIGTERM, SIGINT or SIGHUP, when the launcher's end of standard input is closed, which happens
if the launcher or the connection ends, or after too long a silence of the launcher.
"""

import argparse
import ctypes
import importlib.util
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from importlib.machinery import PathFinder
from types import FrameType

MARK = "ddp_zero.launch.check:"
"""Prefix of the line with the answer of a check; a host may print further lines at login."""

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Check a host, or run a command; returns its exit code, or 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(prog="ddp_zero.launch.guard", allow_abbrev=False)
    parser.add_argument("--chdir", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--script", default="")
    parser.add_argument("--module", default="")
    parser.add_argument("--toward", default="")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--lost-after", type=float, default=math.inf)
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    variables = dict(one.split("=", 1) for one in options.env)
    try:
        os.chdir(options.chdir)
        if options.script and not os.access(options.script, os.R_OK):
            raise FileNotFoundError(f"no script {options.script} in {options.chdir}")
        if options.module and not has_module(options.module, [".", *variables.get("PYTHONPATH", "").split(":")]):
            raise FileNotFoundError(f"no module {options.module} in {options.chdir} or on the path of Python")
    except OSError as error:
        _say(f"Expected the folder and the script of the job on {socket.gethostname()}, got: {error}.")
        return 2
    if options.check:
        print(MARK + json.dumps({"addresses": list(addresses(options.toward)), "port": free_port()}), flush=True)
        return 0
    return run(options.command, {**os.environ, **variables}, options.lost_after, options.grace)


# Checking


def has_module(name: str, path: Sequence[str]) -> bool:
    """True if a module is in these folders or on the path of this interpreter; no package around it is imported."""
    root, *parts = name.split(".")
    found = PathFinder.find_spec(root, path) or importlib.util.find_spec(root)
    for part in parts:
        inside = found and found.submodule_search_locations
        found = PathFinder.find_spec(part, list(inside)) if inside else None
    return found is not None


def addresses(toward: str) -> Iterator[str]:
    """Addresses at which other hosts, such as ``toward``, may reach this one, the likeliest first; no loopback."""
    found = [_source_address(toward)] if toward else []
    found += os.environ.get("SSH_CONNECTION", "").split()[2:3]
    found += [_source_address("192.0.2.1"), _source_address("2001:db8::1")]  # any address beyond this network
    for address in dict.fromkeys(found):
        if address and not address.startswith("127.") and address != "::1":
            yield address


def _source_address(target: str) -> str:
    """This host's address on the route to another; nothing is sent."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def free_port() -> int:
    """A port without a listener at present."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# Running


def run(command: Sequence[str], environment: dict[str, str], lost_after: float, grace: float) -> int:
    """Run a command until it ends or has to; then end all processes that it has left.

    Args:
        command: the program and its arguments.
        environment: its variables.
        lost_after: seconds of silence on standard input after which the launcher counts as gone.
        grace: seconds between asking processes to end and killing them.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    # before the child exists: a signal in between would end this process and leave the child
    for number in _SIGNALS:
        signal.signal(number, note)
    prctl = _prctl()
    # torchrun puts each worker in a session of its own, and a daemon leaves its parent: as *subreaper* this process
    # inherits every orphan below it, and can find and end them all
    prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        # if this guard is killed, Linux sends SIGTERM to the child by the parent-death signal
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM)),
        )
    except OSError as error:
        _say(f"Expected a command that can be run, got {error}.")
        return 127
    reason = watch(child, lost_after, signals)
    if reason:
        _say(f"stopping on {socket.gethostname()}: {reason}")
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    _end_descendants(child, min(grace, _KILL_SECONDS))
    code = child.wait()
    return 128 - code if code < 0 else code


def watch(child: "subprocess.Popen[bytes]", lost_after: float, signals: list[int]) -> str:
    """Wait until the command has ended, or must be stopped. Returns the reason, or "" if it has ended."""
    stdin = 0
    heard = time.monotonic()
    poll = select.poll()
    poll.register(stdin, select.POLLIN | select.POLLHUP)
    while child.poll() is None:
        if signals:
            return f"got {signal.Signals(signals[0]).name}"
        if poll.poll(POLL_SECONDS * 1000):
            # end of file: the launcher, or the connection that carried its input, is gone
            if not os.read(stdin, 4096):
                return "the launcher has closed the connection, or is gone"
            heard = time.monotonic()
        elif time.monotonic() - heard > lost_after:
            return f"nothing was heard from the launcher for {lost_after:g} s"
    return ""


def _end_descendants(child: "subprocess.Popen[bytes]", grace: float) -> None:
    """Ask all descendants to end, then kill the remaining ones."""
    stages = [(signal.SIGTERM, grace), (signal.SIGKILL, _KILL_SECONDS)]
    # a child that still runs has been asked to end, and was given its time
    for signum, seconds in stages if child.poll() is not None else stages[-1:]:
        deadline = time.monotonic() + seconds
        asked: set[int] = set()
        # listed anew each time: a process may fork while it is being stopped
        while (left := _descendants(child)) and time.monotonic() < deadline:
            for process in left if signum is signal.SIGKILL else left - asked:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signum)
            asked |= left
            time.sleep(POLL_SECONDS / 5)
    if left := _descendants(child):
        _say(f"Expected no process to be left on {socket.gethostname()}, got {sorted(left)}.")


def _descendants(child: "subprocess.Popen[bytes]") -> set[int]:
    """Running processes below this one; ended ones are reaped."""
    child.poll()  # first: `waitpid` below must not take the child's exit code from its object
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with suppress(OSError, ValueError, IndexError):
            if name.isdecimal():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid() and int(name) != child.pid:
                    os.waitpid(int(name), os.WNOHANG)
                elif state not in ("Z", "X"):
                    parents[int(name)] = int(parent)
    found = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _prctl() -> Callable[[int, int], object]:
    """Linux's ``prctl``, or a function without effect on other systems."""
    function = getattr(ctypes.CDLL(None), "prctl", None)
    return (lambda option, value: function(option, value, 0, 0, 0)) if function else (lambda option, value: None)


def _say(text: str) -> None:
    with suppress(OSError):  # if the launcher is gone, nobody reads it
        print(f"ddp-zero launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
