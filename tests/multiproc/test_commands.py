"""Every command that the documentation shows is run, here or where `tests.commands` says."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import shard_optimizer
from tests.commands import ELSEWHERE, LONG, PAGES, SHORT, run, shown
from tests.multiproc.harness import Setup, run_ranks


def test_each_command_is_run_somewhere() -> None:
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


def _write_trace(setup: Setup, path: Path) -> None:
    """As docs/insight.md has it, where parameters are still on their way when the profile ends."""
    ddp = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, torch.optim.AdamW, stage=2, sync="forward", lr=1e-3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            ddp(torch.randn(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    if setup.rank == 0:
        profile.export_chrome_trace(str(path))


@pytest.mark.nightly
def test_the_short_ones_end_well(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    (tmp_path / "docs" / "images").mkdir(parents=True)
    run_ranks(_write_trace, 2, tmp_path / "trace.json")
    for command, expected in SHORT.items():
        if ("plot" in command or "timeline" in command) and find_spec("matplotlib") is None:
            continue
        assert expected in run(command, tmp_path), command
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert (tmp_path / "theirs" / "latest_universal").read_text() == "step-00000010_universal"
