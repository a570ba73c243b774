"""Runs one command for each host at the same time: output, exit codes, and the end of all when one fails."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from ddp_zero.launch.commands import HostCommand

_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 2.0
_MARGIN_SECONDS = 15.0
_LONGEST_LINE = 1 << 16
_LOST = 255
"""The exit code for a host whose guard is gone, as ssh's for a connection that is."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


class Lines:
    """Turns pieces of a stream into whole lines with a prefix; what ends in a carriage return counts as a line.

    Args:
        prefix: stands in front of each line.
    """

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


class Running:
    """The command of one host, as a process in a session of its own.

    Attributes:
        deaf_since: when its input was found closed by the other end, on the monotonic clock; None: it was not. The
            guard there is gone then, though a connection may live on, whose output a daemon holds open.
    """

    def __init__(self, command: HostCommand) -> None:
        self.command = command
        self.deaf_since: float | None = None
        pipe = subprocess.PIPE if command.has_prefix else None
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **command.environment},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
            bufsize=0,
        )

    def streams(self) -> Iterator[tuple[IO[bytes], IO[bytes], Lines]]:
        """Where output comes from, where it goes, and how."""
        for source, target in ((self.process.stdout, sys.stdout.buffer), (self.process.stderr, sys.stderr.buffer)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                yield source, target, Lines(f"{self.command.host}: ".encode())

    def beat(self) -> None:
        """Let the host know that the launcher lives."""
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(b"\n")
            except BrokenPipeError:
                self.deaf_since = self.deaf_since or time.monotonic()
            except (OSError, ValueError):  # its input was closed to stop it
                pass

    def stop(self) -> None:
        """Ask the host to stop: the end of its input reaches it, and the host's guard does the rest."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def is_alive(self) -> bool:
        """Whether a process of the session is left; the first may end before those that it has started."""
        self.process.poll()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, 0)
            return True
        return False


def run(commands: Sequence[HostCommand], grace: float, lost_after: float, say: Say) -> int:
    """Run all commands; if one fails, or this process is told to end, stop all.

    Args:
        commands: one for each host.
        grace: seconds that a host's processes have to end.
        lost_after: a host that hears nothing for this long, in seconds, stops.
        say: reports what happens, a line each.

    Returns:
        0, the exit code of the first that failed, or 128 and the number of the signal that this process got.
    """
    with _signals() as signals:
        running: list[Running] = []
        try:
            for command in commands:
                running.append(Running(command))
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


def _beat(running: Sequence[Running], ended: threading.Event, every: float) -> None:
    while not ended.wait(every):
        for one in running:
            one.beat()


class _Job:
    """All hosts' commands together; see `run`."""

    def __init__(self, running: Sequence[Running], signals: list[int], say: Say) -> None:
        self._running = running
        self._signals = signals
        self._say = say
        self._selector = selectors.DefaultSelector()
        for one in running:
            for source, target, lines in one.streams():
                self._selector.register(source, selectors.EVENT_READ, (target, lines))

    def run(self, grace: float) -> int:
        """Pass on output until all have ended, or one fails; then end the others. Returns the exit code of `run`."""
        code, left = 0, list(self._running)
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

    def _code_of(self, one: Running, left: Sequence[Running]) -> int:
        number = one.process.returncode
        code = 128 - number if number < 0 else number
        if code:
            lost = ", that of a connection that failed" if one.command.argv[0] == "ssh" and code == 255 else ""
            stopping = f"; stopping {_names(left)}" if left else ""
            self._say(f"{one.command.host} ended with exit code {code}{lost}{stopping}")
        return code

    def end(self, grace: float) -> None:
        """Stop what still runs, at first kindly, and pass on all output."""
        for one in self._running:
            if one.process.poll() is None:
                one.stop()
        for number, seconds in ((None, grace + _MARGIN_SECONDS), (signal.SIGTERM, grace), (signal.SIGKILL, grace)):
            left = [one for one in self._running if one.is_alive()]
            for one in left if number is not None else []:
                self._say(f"{one.command.host} has not ended; sending {signal.Signals(number or 0).name}")
                one.signal(number or 0)
            deadline, asked = time.monotonic() + seconds, len(self._signals)
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
        """Forward pending output, after a wait if there is none. Returns 141 if the output pipe was closed, else 0."""
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


def _names(running: Sequence[Running]) -> str:
    return ", ".join(one.command.host for one in running)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that this process has got since, in order, instead of their usual effect."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        got.append(number)

    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    taken = [number for number in _SIGNALS if number is not signal.SIGHUP or not is_kept]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
