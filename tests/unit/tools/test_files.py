"""Progress on a terminal, and nothing in logs."""

import io
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import pytest
import torch

from ddp_zero.checkpoint import load, save
from ddp_zero.checkpoint.export import export
from ddp_zero.tools import files


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Bar:
    """As ``tqdm.tqdm``."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.done, self.is_closed = options, 0, False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        assert not self.is_closed
        self.done += count

    def close(self) -> None:
        self.is_closed = True


def a_tqdm() -> types.ModuleType:
    """A module that can be imported as ``tqdm``, and looked for, as parts of torch do."""
    module = types.ModuleType("tqdm")
    module.__spec__ = ModuleSpec("tqdm", None)
    vars(module)["tqdm"] = Bar
    return module


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars that are shown on a terminal."""
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(files, "sys", types.SimpleNamespace(stderr=Terminal()))  # pytest sets that of sys itself
    monkeypatch.setitem(sys.modules, "tqdm", a_tqdm())
    return Bar.made


def test_a_bar_counts_bytes_and_is_closed_by_errors_too(bars: list[Bar]) -> None:
    files.advance(1)
    with files.showing("saving", 30), files.showing("within", 5):
        files.advance(10)
        files.advance(20)
    with pytest.raises(KeyError), files.showing("loading", 7):
        raise KeyError("x")
    with files.showing("unwanted", 7, wanted=False):
        files.advance(7)
    files.advance(1)
    assert [(bar.options["desc"], bar.options["total"], bar.done, bar.is_closed) for bar in bars] == [
        ("saving", 30, 30, True),
        ("loading", 7, 0, True),
    ]


def test_progress_is_hidden_in_logs_and_without_tqdm(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it raises
    with files.showing("saving", 30):
        files.advance(30)
    monkeypatch.setitem(sys.modules, "tqdm", a_tqdm())
    log = io.StringIO()
    monkeypatch.setattr(files, "sys", types.SimpleNamespace(stderr=log))
    with files.showing("saving", 30):
        files.advance(30)
    assert (bars, log.getvalue()) == ([], "")


def test_checkpoints_show_all_bytes_that_are_written_and_read(bars: list[Bar], tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    nbytes = sum(param.nbytes for param in model.parameters())
    nbytes += sum(value.nbytes for one in state.values() for value in one.values())
    save(tmp_path / "saved", model, optimizer, step=3)
    load(tmp_path / "saved", model, optimizer)
    export(tmp_path / "saved", tmp_path / "plain")
    shown = [(bar.options["desc"], bar.options["total"], bar.done) for bar in bars]
    assert all(bar.is_closed for bar in bars)
    assert [name for name, _, _ in shown] == [
        "saving step 3",
        *("checking step-00000003", "loading step-00000003"),
        *("checking step-00000003", "exporting step-00000003"),
    ]
    assert [(total, done) for _, total, done in shown[:4]] == [(nbytes, nbytes)] * 4
    assert shown[4][1] == nbytes
    assert nbytes <= shown[4][2] < nbytes + 10_000, "and the headers of torch.save"
    save(tmp_path / "saved", model, optimizer, step=4, background=True).wait()
    assert len(bars) == 5, "nothing in the background"


def test_the_real_tqdm_shows_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(files, "DELAY_SECONDS", 0.0)
    with files.showing("saving step 3", 1 << 20):
        files.advance(1 << 19)
    assert "saving step 3" in terminal.getvalue()
    assert "/1.00M" in terminal.getvalue()
