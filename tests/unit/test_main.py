"""``python -m ddp_zero COMMAND``: one program, one help, a sentence for a command that does not exist."""

import pytest

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
    assert capsys.readouterr().out.startswith(f"usage: python -m ddp_zero {name}")


def test_without_a_command_it_checks_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "ddp_zero can work here" in capsys.readouterr().out


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chekpoint"]) == 2
    assert "Expected a command of the list, got 'chekpoint'" in capsys.readouterr().err
