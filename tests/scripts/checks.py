"""Checks of a script beside plain DDP."""

import gc
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.frameworks.job import forget
from tests.multiproc.cases import assert_identical
from tests.multiproc.harness import Setup
from tests.scripts.variants import IN_FRAMEWORKS, SCRIPTS, Main, Script

FROZEN = re.compile(r"original0|frozen|scale|shift")
"""Parameters and buffers of DINO and of the detector that training leaves as they are."""


@dataclass
class Life:
    """What a script has logged, the state of its models at its end, and its error."""

    logged: list[float]
    models: list[dict[str, Tensor]]
    error: str | None


def _live(main: Main, folder: Path, steps: int, resume: bool) -> Life:
    """A life on all ranks, after which nothing is left of it but its files."""
    forget()
    life = Life([], [], None)
    try:
        models = main(folder, steps, resume, life.logged.append)
        life.models = [{name: one.detach().clone() for name, one in each.state_dict().items()} for each in models]
    except RuntimeError as error:
        life.error = str(error)
    gc.collect()
    dist.barrier()
    return life


def check(setup: Setup, title: str) -> None:
    """Compare all lives of the variants of a script with the plain one's."""
    script = {**SCRIPTS, **IN_FRAMEWORKS}[title]
    warnings.filterwarnings("ignore", r".*\[ZERO-305\]$")  # once, of a discriminator's second pass before the step
    plain = script.load()
    expected = [_live(plain, _folder(setup, "first"), script.ends_at[0], resume=False)]
    expected += [_live(plain, _folder(setup, "second", "first"), script.ends_at[1], resume=True)]
    for one, other in zip(expected[0].models, expected[1].models, strict=True):
        assert all(not torch.equal(one[name], other[name]) for name in one if not FROZEN.search(name)), title
    for mode in script.modes:
        main = script.load(mode)
        match = script.refused.get(mode, (None, None))
        first = _folder(setup, f"{mode}, first")
        _compare(expected[0], _live(main, first, script.ends_at[0], resume=False), match[0], script, mode)
        saved = "first" if match[0] is not None else f"{mode}, first"
        if saved != "first" and script.has_plain_files and mode not in script.close and setup.rank == 0:
            _assert_same_files(setup.folder / "first", first)
        second = _folder(setup, f"{mode}, second", saved)
        _compare(expected[1], _live(main, second, script.ends_at[1], resume=True), match[1], script, mode)


def _folder(setup: Setup, name: str, source: str | None = None) -> Path:
    """A folder of all ranks, empty or with the files of another one."""
    folder = setup.folder / name
    if setup.rank == 0:
        folder.mkdir() if source is None else shutil.copytree(setup.folder / source, folder)
    dist.barrier()
    return folder


def _compare(expected: Life, life: Life, match: str | None, script: Script, mode: str) -> None:
    where = f"{script.file}, {mode}"
    if match is not None:
        assert life.error is not None, f"{where} was not refused"
        assert re.search(match, life.error, re.DOTALL), f"{where}: {life.error}"
        assert_identical(expected.logged[: len(life.logged)], life.logged, where)
        return
    assert life.error is None, f"{where}: {life.error}"
    if mode in script.close:
        assert life.logged == pytest.approx(expected.logged, abs=1e-2), where
        torch.testing.assert_close(life.models, expected.models, rtol=0, atol=2e-3)
        return
    assert_identical(expected.logged, life.logged, where)
    assert_identical(expected.models, life.models, where)


def _assert_same_files(expected: Path, actual: Path) -> None:
    for file in expected.iterdir():
        one, other = (torch.load(folder / file.name, weights_only=False) for folder in (expected, actual))
        assert_identical(_unnamed(one), _unnamed(other), f"{actual.name}, {file.name}")


def _unnamed(saved: Any) -> Any:
    """Without the names of parameters, which `shard_optimizer` gives to the class."""
    if isinstance(saved, dict):
        return {key: _unnamed(value) for key, value in saved.items() if key != "param_names"}
    return [_unnamed(one) for one in saved] if isinstance(saved, list) else saved
