"""``ddp-zero COMMAND``: one program, one help, a sentence for a command that does not exist, completion."""

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from ddp_zero import __version__
from ddp_zero.__main__ import COMMANDS, main, parsers
from tests import HANG


def run(*arguments: str) -> int:
    """The exit code, also of what argparse ends."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(arguments))
    return int(ended.value.code or 0)


WRONG = {
    ("chekpoint",): "ddp-zero: error: there is no command 'chekpoint'; did you mean 'checkpoint'? [ZERO-905]\n",
    ("xyz",): "ddp-zero: error: there is no command 'xyz'; there are check, estimate, ",
    ("--verison",): "ddp-zero check: error: unrecognized arguments: --verison [ZERO-905]\n",
    ("--print-completion",): "ddp-zero: error: argument --print-completion: expected one argument [ZERO-905]\n",
    ("estimate",): "ddp-zero estimate: error: the following arguments are required: MODULE:FUNCTION [ZERO-905]\n",
    ("launch", "--grace=0", "x.py"): "ddp-zero launch: error: argument --grace: Expected a number of seconds above 0",
    ("launch", "--nproc=1", "--no-ssh", "x.py"): "ddp-zero launch: error: Expected both --no-ssh and --node-rank",
    ("checkpoint", "exprot", "a", "b"): "ddp-zero checkpoint: error: argument action: invalid choice: 'exprot'",
    ("postmortem", "/nowhere"): "ddp-zero postmortem: error: No flight records",
    ("explain", "ZERO-000"): "ddp-zero explain: error: there is no code ZERO-000",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_an_error_begins_with_the_name_of_the_program(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err[: len(WRONG[arguments])]) == ("", WRONG[arguments])


def test_help_and_errors_come_without_torch() -> None:
    asked = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), *map(list, WRONG)]
    code = f"""
import sys
from ddp_zero.__main__ import main
for arguments in {asked}:
    try:
        main(arguments)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, arguments
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("usage: ddp-zero") == 1 + len(COMMANDS)


def all_parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from all_parsers(inner)


def test_every_option_of_every_command_has_a_help_text() -> None:
    found = [(parser.prog, action) for parser in all_parsers(parsers()[0]) for action in parser._actions]
    assert len(found) > 60
    assert [(prog, one.dest) for prog, one in found if not one.help and not isinstance(one, _SubParsersAction)] == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: ddp-zero {name}")


def test_main_without_a_command_checks_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "ddp_zero can work here" in capsys.readouterr().out
    assert main(["--json"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"ddp_zero {__version__}\n"


def test_a_shell_completes_commands_and_their_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "complete.sh"
    script.write_text(capsys.readouterr().out)

    def completions(*words: str) -> set[str]:
        ask = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_ddp_zero ddp-zero "
        ask += f'"{words[-1]}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
        ended = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=HANG, check=True)
        return set(ended.stdout.split())

    assert completions("ddp-zero", "ch") == {"check", "checkpoint"}
    assert "--hostfile" in completions("ddp-zero", "launch", "--h")
    assert completions("ddp-zero", "checkpoint", "ex") == {"export"}


@pytest.mark.parametrize("shells", [[], ["fish"], ["bash", "zsh"]])
def test_completion_is_for_one_known_shell(shells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--print-completion", *shells) == 2
    assert "ddp-zero: error: argument" in capsys.readouterr().err


@contextmanager
def reader_is_gone() -> Iterator[None]:
    """Standard output is a pipe that nobody reads any more."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as output, redirect_stdout(output):
        yield


BY_SIGPIPE = 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    "arguments",
    [*([name, "--help"] for name in COMMANDS), ["--help"], ["explain", "ZERO-203"], ["config", "keys"]],
    ids=" ".join,
)
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with reader_is_gone():
        assert main(arguments) == BY_SIGPIPE
    assert capfd.readouterr() == ("", "")


def test_the_broken_pipe_of_a_command_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> int:
        raise BrokenPipeError("a host")

    monkeypatch.setattr("ddp_zero.tools.explain_code.main", fails)
    with pytest.raises(BrokenPipeError, match="a host"):
        main(["explain", "ZERO-203"])


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_closed_pipe_leaves_no_error_of_the_interpreter(unbuffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-m", "ddp_zero", "explain", "ZERO-203"],
        stdout=writes,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=HANG,
        check=False,
    )
    os.close(writes)
    assert (ended.stderr, ended.returncode) == ("", BY_SIGPIPE)
