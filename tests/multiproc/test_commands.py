"""Every command that the documentation shows is run, here or where `tests.commands` says."""

import importlib
import json
from pathlib import Path

import pytest

from tests.commands import ELSEWHERE, LONG, PAGES, SHORT, run, shown


def test_each_command_of_the_pages_is_run_by_a_test() -> None:
    found = {command for page in PAGES for command in shown(page.read_text())}
    assert found == {*SHORT, *LONG, *ELSEWHERE}
    for test in ELSEWHERE.values():
        path, name = test.split("::")
        assert hasattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name), test


def test_commands_are_found_in_blocks_and_in_lines() -> None:
    page = (
        "`python -m ddp_zero x` and\n```sh\n.venv/bin/python -m ddp_zero x a  # b\nls\n```\n`torchrun\nexamples/y.py`"
    )
    assert shown(page) == {"python -m ddp_zero x a", "torchrun examples/y.py"}


@pytest.mark.nightly
def test_short_commands_of_the_pages_print_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    for command, expected in SHORT.items():
        assert expected in run(command, tmp_path), command
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert (tmp_path / "theirs" / "latest_universal").read_text() == "step-00000010_universal"
