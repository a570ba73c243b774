"""``ddp-zero launch``: choose hosts, check their readiness, start torchrun on each, stop together."""

import json
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from ddp_zero.error_codes import coded
from ddp_zero.launch import guard
from ddp_zero.launch.guard import MARK
from ddp_zero.launch.job import (
    Host,
    HostCommand,
    Meeting,
    check_command,
    check_options,
    commands,
    filter_hosts,
    hosts_of_allocation,
    is_allocation,
    limit_hosts,
    parse_environment,
    parse_hostfile,
    port_of_allocation,
    variables_to_export,
)

LOCAL = "localhost"
DEFAULT_PORT = 29500
_ANSWER_SECONDS = 60.0
_FAILED_TO_START = 2
_INTERRUPTED = 130
_MOST_AT_ONCE = 64
_SHOWN_LINES = 3
_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 2.0
MARGIN_SECONDS = 15.0
_LONGEST_LINE = 1 << 16
_LOST = 255
"""Exit code for a host whose guard is gone, as ssh's for a lost connection."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A host's addresses, the most useful first, and a free port on it."""

    addresses: tuple[str, ...]
    port: int


def main(parsed: Namespace) -> int:
    """Run a job; returns the exit code, see `run`, or 2 if nothing was started."""
    try:
        options = check_options(parsed)
        hosts = hosts_of(options, os.environ)
        launcher = launcher_of(options, hosts, os.environ)
        variables = variables_of(options, launcher, os.environ)
        folder = Path.cwd()
        own = Path(guard.__file__).resolve()
        answers: dict[str, Answer] = {}
        if launcher == "ssh" and not options.dry_run:
            names = [host.name for host in hosts]
            toward = {name: names[0] for name in names} | {names[0]: names[1] if len(names) > 1 else ""}
            answers = ask(names, lambda name: check_command(name, toward[name], options, own, folder), _ANSWER_SECONDS)
        meeting = meeting_of(options, launcher, hosts, answers, os.environ)
        started = commands(launcher, hosts, meeting, options, own, folder, variables)
        if options.node_rank is not None:
            started = (started[options.node_rank],)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"error: {coded(str(error), '[ZERO-901]')}")
        return _FAILED_TO_START
    except KeyboardInterrupt:  # while hosts are asked; nothing runs yet
        return _INTERRUPTED
    if options.dry_run:
        for command in started:
            print(f"{command.host}: {shlex.join(command.argv)}")
        return 0
    return run(started, options.grace, options.lost_after, say)


def say(text: str) -> None:
    print(f"ddp-zero launch: {text}", file=sys.stderr, flush=True)


def hosts_of(options: Namespace, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of the job: of the hostfile, of the Slurm allocation, or this machine."""
    nproc = options.nproc
    if options.hostfile is not None:
        hosts = parse_hostfile(Path(options.hostfile).read_text(encoding="utf-8"), options.hostfile)
    elif options.launcher == "slurm" or (options.launcher is None and is_allocation(environment)):
        hosts = hosts_of_allocation(environment, nproc)
    elif options.launcher is None:
        hosts = (Host(LOCAL, tuple(range(nproc or _devices_here() or 1))),)
    else:
        raise ValueError(f"--launcher {options.launcher} needs --hostfile. [ZERO-901]")
    return limit_hosts(filter_hosts(hosts, options.include, options.exclude), options.num_nodes, nproc)


def _devices_here() -> int:
    import torch  # takes seconds

    return torch.accelerator.device_count()


def launcher_of(options: Namespace, hosts: Sequence[Host], environment: Mapping[str, str]) -> str:
    """The way to reach the hosts: one of `LAUNCHERS`, or ``"local"`` for this machine alone."""
    if options.node_rank is not None:
        if options.node_rank >= len(hosts):
            raise ValueError(f"Expected --node-rank below {len(hosts)}, got {options.node_rank}. [ZERO-901]")
        if options.launcher is not None:
            raise ValueError(f"Expected --no-ssh or --launcher, got both: {options.launcher}. [ZERO-901]")
        return "local"
    is_here = len(hosts) == 1 and hosts[0].name in (LOCAL, "127.0.0.1", socket.gethostname(), socket.getfqdn())
    if options.launcher is not None:
        return str(options.launcher)
    if options.hostfile is None and is_allocation(environment):
        return "slurm"
    return "local" if is_here else "ssh"


def variables_of(options: Namespace, launcher: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the processes: from files and, on other hosts, relevant ones of this process."""
    found = {} if launcher == "local" else variables_to_export(environment)
    for file in options.env_files:
        found.update(parse_environment(Path(file).read_text(encoding="utf-8"), file, environment))
    return found


def meeting_of(
    options: Namespace,
    launcher: str,
    hosts: Sequence[Host],
    answers: Mapping[str, Answer],
    environment: Mapping[str, str],
) -> Meeting:
    """The rendezvous of torchrun's agents: the first host."""
    first = hosts[0].name
    job = f"ddp_zero-{secrets.token_hex(4)}"
    if len(hosts) == 1:
        return Meeting(None, options.master_port, job)
    own = {name: answer.addresses[0] for name, answer in answers.items() if answer.addresses}
    address = options.master_addr or own.get(first) or (None if answers else first)
    if address is None:
        raise RuntimeError(f"{first} has no address that other hosts can reach. Say --master-addr. [ZERO-903]")
    port = answers[first].port if answers else DEFAULT_PORT
    if launcher == "slurm":
        port = port_of_allocation(environment)
        own = {host.name: host.name for host in hosts}
    return Meeting(address, options.master_port or port, job, own)


# Readiness of hosts


def ask(hosts: Sequence[str], command_of: Callable[[str], HostCommand], time_out: float) -> dict[str, Answer]:
    """The answers of hosts to commands, by name, each within ``time_out`` seconds.

    Raises RuntimeError naming every host that has not answered, or is not ready, with the reason.
    """
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        found = list(pool.map(lambda host: _ask(command_of(host), time_out), hosts))
    wrong = [f"{host}: {answer}" for host, answer in zip(hosts, found, strict=True) if isinstance(answer, str)]
    if wrong:
        raise RuntimeError(
            "\n  ".join([f"Expected all {len(hosts)} hosts to be ready, got from", *wrong]) + " [ZERO-903]"
        )
    return {host: answer for host, answer in zip(hosts, found, strict=True) if isinstance(answer, Answer)}


def read_answer(printed: str) -> Answer | None:
    """The answer in a host's output, which may begin with a greeting; None if there is none."""
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


# The processes of all hosts: output, exit codes, and the end of all when one fails


class Lines:
    """Turns pieces of a stream into whole lines with a prefix; a carriage return also ends a line."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The lines that a piece completes; an empty piece, at the end of the stream, completes the last one."""
        text = self._rest + piece
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not piece or len(text) - cut > _LONGEST_LINE:
            text += b"\n" if len(text) > cut else b""
            cut = len(text)
        self._rest = text[cut:]
        whole = text[:cut].replace(b"\r\n", b"\n")
        return b"".join(self._prefix + line for line in whole.splitlines(keepends=True))


class HostProcess:
    """The command of one host, as a process in its own session."""

    def __init__(self, command: HostCommand) -> None:
        self.command = command
        # when, on the monotonic clock, its input was found closed by the other end: the guard there is gone then,
        # though a connection may live on whose output a daemon holds open
        self.deaf_since: float | None = None
        pipe = subprocess.PIPE if command.has_prefix else None
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
            bufsize=0,
        )

    def streams(self) -> Iterator[tuple[IO[bytes], IO[bytes], Lines]]:
        """Each stream of output, the stream to forward it to, and its lines."""
        for source, target in ((self.process.stdout, sys.stdout.buffer), (self.process.stderr, sys.stderr.buffer)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                yield source, target, Lines(f"{self.command.host}: ".encode())

    def beat(self) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(b"\n")
            except BrokenPipeError:
                self.deaf_since = self.deaf_since or time.monotonic()
            except (OSError, ValueError):  # its input was closed to stop it
                pass

    def stop(self) -> None:
        """Ask the host to stop: closing its input reaches the host's guard, which does the rest."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def is_alive(self) -> bool:
        """True if a process of the session is left; the first may end before its children."""
        self.process.poll()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, 0)
            return True
        return False


def run(commands: Sequence[HostCommand], grace: float, lost_after: float, say: Say) -> int:
    """Run all commands; if one fails, or this process is told to end, stop all.

    A host's processes have ``grace`` seconds to end; a host stops after ``lost_after`` seconds of silence. Returns 0,
    the exit code of the first that failed, or 128 and the number of the signal that this process received.
    """
    with _signals() as signals:
        running: list[HostProcess] = []
        try:
            for command in commands:
                running.append(HostProcess(command))
        except OSError as error:
            say(f"Expected {command.argv[0]} to be started for {command.host}, got: {error}.")
            _Job(running, signals, say).end(grace)
            return 127
        ended = threading.Event()
        heart = threading.Thread(target=_beat, args=(running, ended, lost_after / 4), daemon=True)
        heart.start()
        try:
            return _Job(running, signals, say).run(grace)
        finally:
            ended.set()


def _beat(running: Sequence[HostProcess], ended: threading.Event, every: float) -> None:
    while not ended.wait(every):
        for one in running:
            one.beat()


class _Job:
    """All hosts' commands together; see `run`."""

    def __init__(self, running: Sequence[HostProcess], signals: list[int], say: Say) -> None:
        self._running, self._signals, self._say = running, signals, say
        self._selector = selectors.DefaultSelector()
        for one in running:
            for source, target, lines in one.streams():
                self._selector.register(source, selectors.EVENT_READ, (target, lines))

    def run(self, grace: float) -> int:
        """Forward output until all have ended, or one fails; then end the rest. Returns the exit code of `run`."""
        code = 0
        left = list(self._running)
        while left and not code:
            code = self._pass_on(_POLL_SECONDS) or (128 + self._signals[0] if self._signals else 0)
            if self._signals:
                self._say(f"got {signal.Signals(self._signals[0]).name}; stopping {_names(left)}")
            for one in [one for one in left if one.process.poll() is not None]:
                left.remove(one)
                code = code or self._code_of(one, left)
            for one in [one for one in left if one.deaf_since is not None]:
                if time.monotonic() - (one.deaf_since or 0.0) > grace:
                    left.remove(one)
                    code = code or _LOST
                    self._say(
                        f"{one.command.host} no longer listens: its guard has ended, by SIGKILL perhaps, while "
                        f"something there holds the output open; stopping {_names([one, *left])}"
                    )
        self.end(grace)
        return code

    def _code_of(self, one: HostProcess, left: Sequence[HostProcess]) -> int:
        number = one.process.returncode
        code = 128 - number if number < 0 else number
        if code:
            lost = ", that of a connection that failed" if one.command.argv[0] == "ssh" and code == 255 else ""
            stopping = f"; stopping {_names(left)}" if left else ""
            self._say(f"{one.command.host} ended with exit code {code}{lost}{stopping}")
        return code

    def end(self, grace: float) -> None:
        """Stop the remaining processes, gracefully at first, and forward all output."""
        for one in self._running:
            if one.process.poll() is None:
                one.stop()
        for number, seconds in ((None, grace + MARGIN_SECONDS), (signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            left = [one for one in self._running if one.is_alive()]
            if number is not None:
                for one in left:
                    self._say(f"{one.command.host} has not ended; sending {number.name}")
                    one.signal(number)
            deadline = time.monotonic() + seconds
            asked = len(self._signals)
            while any(one.is_alive() for one in left) and time.monotonic() < deadline:
                self._pass_on(_POLL_SECONDS)
                if len(self._signals) > asked:  # told again: do not wait any longer
                    break
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pass_on(_POLL_SECONDS)
        self._selector.close()
        for one in self._running:
            one.close()

    def _pass_on(self, seconds: float) -> int:
        """Forward pending output, or wait for some. Returns 141 if the output pipe was closed, else 0."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return 0
        for key, _ in self._selector.select(seconds):
            source: IO[bytes] = key.fileobj  # type: ignore[assignment]
            target, lines = key.data
            piece = source.read(_LONGEST_LINE)
            if piece is None:
                continue
            if not piece:
                self._selector.unregister(source)
            try:
                target.write(lines.feed(piece))
                target.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
                return 128 + signal.SIGPIPE
        return 0


def _names(running: Sequence[HostProcess]) -> str:
    return ", ".join(one.command.host for one in running)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals received within this context, in order, instead of their usual effect."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)

    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    taken = [number for number in _SIGNALS if number is not signal.SIGHUP or not is_kept]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
