"""``ddp-zero COMMAND``: one program, one help, a sentence for a command that does not exist, completion."""

import subprocess
from pathlib import Path

import pytest

from ddp_zero import __version__
from ddp_zero.__main__ import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ddp-zero {name}")


def test_without_a_command_it_checks_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "ddp_zero can work here" in capsys.readouterr().out
    assert main(["--json"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddp_zero {__version__}\n"


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chekpoint"]) == 2
    assert "there is no command 'chekpoint'" in capsys.readouterr().err


def test_a_shell_completes_commands_and_their_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "complete.sh"
    script.write_text(capsys.readouterr().out)

    def completions(*words: str) -> set[str]:
        ask = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_ddp_zero ddp-zero "
        ask += f'"{words[-1]}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
        ended = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30, check=True)
        return set(ended.stdout.split())

    assert completions("ddp-zero", "ch") == {"check", "checkpoint"}
    assert "--hostfile" in completions("ddp-zero", "launch", "--h")
    assert completions("ddp-zero", "checkpoint", "ex") == {"export"}


@pytest.mark.parametrize("shells", [[], ["fish"], ["bash", "zsh"]])
def test_completion_is_for_one_known_shell(shells: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", *shells]) == 2
    assert "takes one of bash, zsh, tcsh" in capsys.readouterr().err
