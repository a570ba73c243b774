"""`report` and `resume` with a stand-in for Ray Train: where they save, and what they report, remove and refuse."""

import importlib
import sys
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

import ddp_zero.integrations
from ddp_zero import checkpoint


class Checkpoint:
    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(path)


class CheckpointUploadMode(Enum):
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The integration, imported anew with stand-ins; forgotten at the end of the test."""
    for name in ("ray", "ray.train"):
        module = ModuleType(name)
        vars(module).update(Checkpoint=Checkpoint, CheckpointUploadMode=CheckpointUploadMode, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    # recorded first, so that what the test imports is taken away again
    monkeypatch.setitem(sys.modules, "ddp_zero.integrations.ray", ModuleType("old"))
    monkeypatch.setattr(ddp_zero.integrations, "ray", None, raising=False)
    del sys.modules["ddp_zero.integrations.ray"]
    return importlib.import_module("ddp_zero.integrations.ray")


class Run:
    """A run of Ray Train, and the integration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int = 0, kind: str = "local") -> None:
        self.module = imported(monkeypatch)
        self.reports: list[Any] = []
        self.last: Checkpoint | None = None
        storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path=str(folder))
        context = SimpleNamespace(get_world_rank=lambda: rank, get_storage=lambda: storage)
        train = self.module.train
        train.get_context, train.report = lambda: context, self._report
        train.get_checkpoint = lambda: self.last
        monkeypatch.setattr(self.module, "Agreement", lambda *args: nullcontext())
        monkeypatch.setattr(self.module, "Communicator", lambda group: None)

    def _report(self, metrics: Any, **options: Any) -> None:
        self.reports.append((metrics, options))
        self.last = options["checkpoint"] or self.last


def test_a_report_is_saved_in_the_folder_of_the_run_and_not_uploaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, model = Run(monkeypatch, tmp_path), nn.Linear(2, 2)
    folder = run.module.report({"loss": 1.0}, model, step=7, extra="words")
    assert folder == tmp_path / "step-00000007"
    ((metrics, options),) = run.reports
    assert metrics == {"loss": 1.0}
    assert options["checkpoint"].path == str(folder)
    assert options["checkpoint_upload_mode"].name == CheckpointUploadMode.NO_UPLOAD.name
    assert run.module.resume(model).extra == "words"


def test_only_rank_0_names_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, rank=1)
    run.module.report({}, nn.Linear(2, 2))
    assert [options["checkpoint"] for _, options in run.reports] == [None]


def test_a_run_goes_on_from_the_last_report_and_later_checkpoints_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, model = Run(monkeypatch, tmp_path), nn.Linear(2, 2)
    assert run.module.resume(model) is None
    for step in (3, 6):
        run.module.report({}, model, step=step)
    checkpoint.save(tmp_path, model, step=9)
    assert run.module.resume(model).step == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]
    run.last = None
    assert run.module.resume(model) is None
    assert list(tmp_path.iterdir()) == []


def test_report_refuses_options_of_checkpoints_that_ray_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path)
    with pytest.raises(TypeError, match=r"Expected options of a checkpoint that Ray keeps.* got keep\..*\[ZERO-916\]"):
        run.module.report({}, nn.Linear(2, 2), keep=2)
    with pytest.raises(TypeError, match=r"got background\..*\[ZERO-916\]"):
        run.module.report({}, nn.Linear(2, 2), background=True)
    assert run.reports == []


def test_an_object_store_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, kind="s3")
    with pytest.raises(ValueError, match=r"Expected the run's storage_path to be a folder.* 's3'.*\[ZERO-916\]"):
        run.module.report({}, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Expected the run's storage_path to be a folder.* 's3'.*\[ZERO-916\]"):
        run.module.resume(nn.Linear(2, 2))
