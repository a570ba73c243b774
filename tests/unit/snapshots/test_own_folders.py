"""Where checkpoints may be kept beside snapshots."""

from pathlib import Path

import pytest
from torch import nn

from ddp_zero.snapshots import Snapshots


@pytest.mark.parametrize("where", [".", "checkpoints", "a/../b/c", "link"])
def test_checkpoints_below_the_snapshots_are_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "elsewhere")
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=r"Expected fallback= outside folder=, .*\[ZERO-641\]$"):
        Snapshots(nn.Linear(2, 2), folder=folder, fallback=folder / where)
    Snapshots(nn.Linear(2, 2), folder=folder, fallback=tmp_path / "run-checkpoints")
