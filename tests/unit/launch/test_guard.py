"""The guard on a host: how its command ends, and that nothing is left of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_zero.launch import guard

DAEMON = """\
import signal, subprocess, sys, time
daemon = f"import signal, time; {sys.argv[1]}; print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
time.sleep(0.5)
"""
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
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)],
)
def test_the_exit_code_is_that_of_the_command(tmp_path: Path, program: str, code: int) -> None:
    with start(tmp_path, *python(program)) as process:
        assert process.wait(30) == code


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with start(tmp_path, "no-such-program") as process:
        assert process.wait(30) == 127
        assert process.stderr is not None
        assert "Expected a command that can be run" in process.stderr.read()


@pytest.mark.parametrize("ignores", ["pass", DEAF])
def test_a_daemon_ends_with_its_command(tmp_path: Path, ignores: str) -> None:
    with start(tmp_path, *python(DAEMON, ignores)) as process:
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "up\n"  # to its end: the daemon, which could write more, is gone


def test_the_end_of_its_input_and_signals_stop_the_command(tmp_path: Path) -> None:
    for end in ("input", "SIGTERM", "SIGINT", "SIGHUP"):
        with start(tmp_path, *python(FOREVER)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdin is not None
            process.stdout.readline()
            (child,) = children_of(process)
            if end == "input":
                process.stdin.close()
            else:
                process.send_signal(signal.Signals[end])
            assert process.wait(30) == 143
            said = "the launcher has closed the connection" if end == "input" else f"got {end}"
            assert said in process.stderr.read()
            assert not Path(f"/proc/{child}").exists()


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *python(f"import signal; {DEAF}; {FOREVER}")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 137


def test_silence_stops_the_command_and_a_word_in_time_does_not(tmp_path: Path) -> None:
    with start(tmp_path, *python(FOREVER), options=("--grace=1", "--lost-after=1.5")) as process:
        assert process.stdin is not None
        for _ in range(5):
            time.sleep(0.6)
            print(file=process.stdin, flush=True)
        assert process.poll() is None
        assert process.wait(30) == 143
        assert process.stderr is not None
        assert "nothing was heard from the launcher for 1.5 s" in process.stderr.read()


def test_a_guard_that_is_killed_takes_its_command_along(tmp_path: Path) -> None:
    with start(tmp_path, *python(FOREVER)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == ""  # to its end: nobody holds it any more


def test_an_inner_guard_ends_the_daemons_of_one_that_is_killed(tmp_path: Path) -> None:
    inner = (sys.executable, guard.__file__, f"--chdir={tmp_path}", "--grace=1", "--inner", "--")
    with start(tmp_path, *inner, *python(f"{DAEMON}{FOREVER}", DEAF), options=("--grace=5",)) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"up\n"}, "the command and its daemon"
        process.kill()
        assert process.stdout.read() == ""  # to its end: the daemon, which is deaf, is gone as well
    with start(tmp_path, *inner, *python("raise SystemExit(3)")) as process:
        assert process.wait(30) == 3


def test_what_outlives_a_command_may_end_on_its_own(tmp_path: Path) -> None:
    later = "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); time.sleep(2); raise SystemExit"
    with start(tmp_path, *python(DAEMON, later), options=("--grace=1", "--linger=20")) as process:
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_variables_and_the_folder(tmp_path: Path) -> None:
    program = "import os; print(os.getcwd(), os.environ['A'])"
    with start(tmp_path, *python(program), options=("--env=A=b=c d",)) as process:
        assert process.stdout is not None
        assert process.stdout.read() == f"{tmp_path} b=c d\n"
    with start(tmp_path / "nowhere", *python(program)) as process:
        assert process.wait(30) == 2


def test_a_check_tells_addresses_and_a_port(
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
