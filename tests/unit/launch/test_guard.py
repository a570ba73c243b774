"""The guard on a host: how its command ends, and that nothing is left of it."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from ddp_zero.launch import guard
from tests import HANG

DAEMON = """\
import os, signal, subprocess, sys, time
reads, writes = os.pipe()
daemon = f"import os, signal, time; is_up = {writes}; {sys.argv[1]}; print('up', flush=True); os.close(is_up); "
subprocess.Popen([sys.executable, "-c", daemon + "time.sleep(600)"], start_new_session=True, pass_fds=[writes])
os.close(writes)
os.read(reads, 1)
"""
"""Its child is a daemon that nobody waits for; it goes on when the daemon is up."""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FOREVER = "import time; print('up', flush=True); time.sleep(600)"


def start(folder: Path, *arguments: str, options: tuple[str, ...] = ("--grace=1",)) -> "subprocess.Popen[str]":
    command = [sys.executable, guard.__file__, f"--chdir={folder}", *options, "--", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-c", program, *arguments


def children_of(process: "subprocess.Popen[str]") -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("program", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)]
)
def test_the_exit_code_is_that_of_the_command(tmp_path: Path, program: str, code: int) -> None:
    with start(tmp_path, *python(program)) as process:
        assert process.wait(HANG) == code


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with start(tmp_path, "no-such-program") as process:
        assert process.wait(HANG) == 127
        assert process.stderr is not None
        assert "Expected a command that can be run" in process.stderr.read()


@pytest.mark.parametrize("ignores", ["pass", DEAF])
def test_a_daemon_that_a_command_left_behind_is_ended_with_it(tmp_path: Path, ignores: str) -> None:
    with start(tmp_path, *python(DAEMON, ignores)) as process:
        assert process.wait(HANG) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "up\n"  # to its end: the daemon, which could write more, is gone


def test_the_end_of_its_input_and_signals_stop_the_command(tmp_path: Path) -> None:
    for end in ("input", "SIGTERM", "SIGINT", "SIGHUP"):
        with start(tmp_path, *python(FOREVER), options=(f"--grace={HANG}",)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdin is not None
            process.stdout.readline()
            (child,) = children_of(process)
            if end == "input":
                process.stdin.close()
            else:
                process.send_signal(signal.Signals[end])
            assert process.wait(HANG) == 143
            said = "the launcher has closed the connection" if end == "input" else f"got {end}"
            assert said in process.stderr.read()
            assert not Path(f"/proc/{child}").exists()


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *python(f"import signal; {DEAF}; {FOREVER}")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(HANG) == 137


def test_silence_stops_the_command(tmp_path: Path) -> None:
    with start(tmp_path, *python(FOREVER), options=(f"--grace={HANG}", "--lost-after=0.5")) as process:
        assert process.wait(HANG) == 143
        assert process.stderr is not None
        assert "nothing was heard from the launcher for 0.5 s" in process.stderr.read()


def test_a_guard_stops_only_after_so_many_seconds_without_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each look at it advances by a second; a word comes before every third look at the child."""
    reads, writes = os.pipe()
    looks = itertools.count()

    def poll() -> None:
        if (look := next(looks)) % 3 == 0 and look < 12:
            os.write(writes, b"\n")

    seconds = itertools.count()
    monkeypatch.setattr(guard, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(guard, "time", mock.Mock(monotonic=lambda: float(next(seconds))))
    stdin = os.dup(0)
    os.dup2(reads, 0)
    try:
        told = guard.watch(mock.Mock(poll=poll), 3.5, [])
    finally:
        os.dup2(stdin, 0)
        for end in (reads, writes, stdin):
            os.close(end)
    assert told == "nothing was heard from the launcher for 3.5 s"
    assert next(looks) == 9 + 1 + 4, "words before looks 0, 3, 6 and 9, and then four seconds of silence"


def test_a_command_ends_when_its_guard_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *python(FOREVER)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # to its end: nobody holds it any more


def test_the_process_gets_its_variables_and_folder_or_exit_code_2(tmp_path: Path) -> None:
    program = "import os; print(os.getcwd(), os.environ['A'])"
    with start(tmp_path, *python(program), options=("--env=A=b=c d",)) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{tmp_path} b=c d\n"
    with start(tmp_path / "nowhere", *python(program)) as process:
        assert process.wait(HANG) == 2


def test_a_module_is_looked_for_without_importing_packages(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/there.py"):
        (tmp_path / "package" / name).write_text("raise RuntimeError('imported')")
    for name in ("package", "package.inner.there", "json.tool"):
        assert guard.has_module(name, [str(tmp_path)]), name
    for name in ("packag", "package.there", "package.inner.there.deeper", "json.nope"):
        assert not guard.has_module(name, [str(tmp_path)]), name


def test_a_check_of_a_host_prints_addresses_and_a_free_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("SSH_CONNECTION", "10.9.9.1 50000 10.9.9.2 22")
    before = os.getcwd()
    try:
        arguments = [f"--chdir={tmp_path}", "--check", "--script=train.py"]
        assert guard.main(arguments) == 0
        answer = json.loads(capsys.readouterr().out.removeprefix(guard.MARK))
        assert answer["addresses"][0] == "10.9.9.2"
        assert not any(address.startswith("127.") for address in answer["addresses"])
        with socket.socket() as server:
            server.bind(("", answer["port"]))
        assert guard.main([f"--chdir={tmp_path}", "--check", "--script=none.py"]) == 2
        assert f"no script none.py in {tmp_path}" in capsys.readouterr().err
    finally:
        os.chdir(before)
