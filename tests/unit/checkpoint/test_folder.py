import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_zero.checkpoint import folder as checkpoint_folder
from ddp_zero.checkpoint.folder import (
    MARKER,
    Marker,
    complete_in,
    newest,
    next_step,
    publish,
    read_marker,
    read_text,
    start,
    write_text,
)
from ddp_zero.tools.files import open_regular
from tests.unit.checkpoint.things import at_once, thing

NOT_ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do everything")


def saved(root: Path, step: int, keep: int | None = None, digest: str = "0" * 64) -> str:
    """Save a checkpoint without tensors; the name of its folder."""
    unfinished = root / start(root, step)
    write_text(unfinished / "part-0.json", "{}")
    return publish(unfinished, Marker(step, (digest,)), keep).name


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def complete(root: Path) -> list[str]:
    return [path.name for path in complete_in(root)]


def with_marker(folder: Path, line: str) -> Path:
    """Mark a folder with any line, so that its checksum fits."""
    folder.mkdir(exist_ok=True)
    (folder / MARKER).write_text(f"{hashlib.sha256(line.encode()).hexdigest()}\n{line}\n", encoding="utf-8")
    return folder


# Starting


def test_a_new_checkpoint_starts_as_an_empty_hidden_folder(tmp_path: Path) -> None:
    name = start(tmp_path / "runs" / "1", 12)
    assert name.startswith(".step-00000012-")
    assert list((tmp_path / "runs" / "1" / name).iterdir()) == []
    assert complete(tmp_path / "runs" / "1") == []


def test_start_deletes_unfinished_checkpoints(tmp_path: Path) -> None:
    for step in (3, 10**17):
        unfinished = tmp_path / start(tmp_path, step)
        (unfinished / "deep").mkdir()
        (unfinished / "deep" / "__0_0.distcp").write_bytes(b"\0" * 100)
    name = start(tmp_path, 3)
    assert names(tmp_path) == [name]


def test_start_keeps_all_other_folders_and_files(tmp_path: Path) -> None:
    finished = saved(tmp_path, 1)
    others = [
        *(".step-1-0123456789abcdef", ".step-00000001-0123456789abcde", ".step-00000001-0123456789ABCDEF"),
        *(".step-00000001-0123456789abcdef.old", "step-00000002-0123456789abcdef", "..step-00000001-0123456789abcdef"),
        *(".step-00000001-0123456789abcdef\n", ".git", "logs", "step-00000007"),
    ]
    for other in others:
        (tmp_path / other).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    name = start(tmp_path, 2)
    assert names(tmp_path) == sorted([*others, finished, name, "notes.txt"])


@pytest.mark.parametrize("step", [-1, 10**18, 10**30])
def test_a_step_out_of_range_is_refused_before_anything_is_made(step: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"Expected a step from 0 to .*, got {step}"):
        start(tmp_path / "runs", step)
    assert names(tmp_path) == []


@NOT_ROOT
def test_a_folder_that_may_not_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        start(tmp_path, 1)


# Publishing


def test_publish_writes_the_marker_and_renames_the_folder(tmp_path: Path) -> None:
    unfinished = tmp_path / start(tmp_path, 7)
    write_text(unfinished / "part-0.json", "{}")
    published = publish(unfinished, Marker(7, ("ab", "cd")), None)
    assert published == tmp_path / "step-00000007"
    assert names(tmp_path) == ["step-00000007"]
    assert names(published) == [MARKER, "part-0.json"]
    assert read_marker(published) == Marker(7, ("ab", "cd"))


def test_the_marker_is_on_disk_before_the_name_and_the_name_before_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    unfinished = tmp_path / start(tmp_path, 2)
    folder = unfinished.stat().st_ino
    synced: list[tuple[str, bool, bool]] = []

    def fsync(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        what = {folder: "checkpoint", tmp_path.stat().st_ino: "root"}.get(inode, "marker")
        synced.append((what, (tmp_path / "step-00000002").exists(), (tmp_path / "step-00000001").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    publish(unfinished, Marker(2, ("ab",)), 1)
    assert synced == [("marker", False, True), ("checkpoint", False, True), ("root", True, True)]
    assert complete(tmp_path) == ["step-00000002"]


def test_the_same_step_saved_again_comes_after(tmp_path: Path) -> None:
    assert [saved(tmp_path, 5, digest=str(save)) for save in range(12)] == [
        "step-00000005",
        *(f"step-00000005-{again}" for again in range(1, 12)),
    ]
    assert [read_marker(path).parts for path in complete_in(tmp_path)] == [(str(save),) for save in range(12)]
    assert newest(tmp_path).name == "step-00000005-11"


def test_a_failure_before_the_rename_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    unfinished = tmp_path / start(tmp_path, 2)

    def rename(self: Path, target: Path) -> Path:
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="disk gone"):
            publish(unfinished, Marker(2, ("ab",)), 1)
    assert complete(tmp_path) == ["step-00000001"]
    assert saved(tmp_path, 2) == "step-00000002"
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_folders_and_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = tmp_path / saved(tmp_path, 1)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


# Keeping the last few


def test_only_complete_checkpoints_count_and_only_they_go(tmp_path: Path) -> None:
    for torn in ("step-00000001", "step-00000009"):
        (tmp_path / torn).mkdir()
    (tmp_path / "best").mkdir()
    for step in (2, 3, 4):
        saved(tmp_path, step, 2)
    assert names(tmp_path) == ["best", "step-00000001", "step-00000003", "step-00000004", "step-00000009"]


def test_a_kill_while_an_old_one_goes_leaves_no_torn_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)

    def rmtree(path: Path) -> None:
        (path / "part-0.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, 2, 1)
    assert complete(tmp_path) == ["step-00000002"]
    saved(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


steps = st.integers(0, 12) | st.integers(0, 10**18 - 1)


@settings(max_examples=25)
@given(st.lists(st.tuples(steps, st.none() | st.integers(1, 4)), unique_by=lambda save: save[0], max_size=8))
def test_after_any_saves_the_highest_steps_and_the_new_one_are_left(saves: list[tuple[int, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, left = Path(folder), list[int]()
        for step, keep in saves:
            saved(root, step, keep)
            most = len(left) if keep is None else keep - 1
            left = sorted([step, *sorted(left, reverse=True)[:most]])
            assert [read_marker(path).step for path in complete_in(root)] == left
            assert len(names(root)) == len(left)
            assert read_marker(newest(root)).step == left[-1]
            assert next_step(root) == left[-1] + 1


# Finding


def test_a_checkpoint_may_be_moved_and_called_something_else(tmp_path: Path) -> None:
    folder = (tmp_path / saved(tmp_path, 1)).rename(tmp_path / "best")
    assert newest(folder) == folder
    assert complete(tmp_path) == []


def torn(folder: Path, kind: str) -> None:
    """A folder as a kill, a full disk or a bad copy may leave it."""
    if kind == "file":
        folder.write_text("torn")
        return
    folder.mkdir()
    write_text(folder / "part-0.json", "{}")
    if kind == "marker is a folder":
        (folder / MARKER).mkdir()
    elif kind == "marker is a link to nowhere":
        (folder / MARKER).symlink_to(folder / "nothing")
    elif kind == "marker is a pipe":
        os.mkfifo(folder / MARKER)


@pytest.mark.parametrize(
    "kind", ["no marker", "file", "marker is a folder", "marker is a link to nowhere", "marker is a pipe"]
)
def test_a_torn_folder_is_never_picked(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, 3)
    torn(tmp_path / "step-00000004", kind)
    assert complete(tmp_path) == ["step-00000003"]
    assert newest(tmp_path).name == "step-00000003"
    assert next_step(tmp_path) == 4
    with pytest.raises(FileNotFoundError, match=r"No complete checkpoint .*step-00000004, nor"):
        newest(tmp_path / "step-00000004")


@pytest.mark.parametrize(
    "name",
    [
        *("step-1", "step-0000001", "step-0000000000000000001", "step-00000001-", "step-00000001-x"),
        *("step-00000001.bak", "step-00000001-1234567", "step--0000001", "xstep-00000001", "step-00000001\n"),
        *(".step-00000001", "STEP-00000001"),
    ],
)
def test_complete_ignores_folders_of_other_names(name: str, tmp_path: Path) -> None:
    (tmp_path / saved(tmp_path, 1)).rename(tmp_path / name)
    assert complete(tmp_path) == []
    assert next_step(tmp_path) == 1


@pytest.mark.parametrize("path", ["", "nowhere", "file"])
def test_where_there_is_no_checkpoint_the_message_names_the_place(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert complete(tmp_path / path) == []
    assert next_step(tmp_path / path) == 1
    with pytest.raises(FileNotFoundError) as caught:
        newest(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)


# The marker


def test_a_marker_is_json_below_its_checksum(tmp_path: Path) -> None:
    digest, line, rest = (tmp_path / saved(tmp_path, 4) / MARKER).read_text().split("\n")
    assert digest == hashlib.sha256(line.encode()).hexdigest()
    assert json.loads(line) == {"format": "ddp_zero", "version": 4, "step": 4, "parts": ["0" * 64]}
    assert rest == ""


def test_a_marker_with_any_byte_damaged_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / saved(tmp_path, 1)
    whole = (folder / MARKER).read_bytes()
    for position in range(len(whole)):
        for flip in (0x01, 0x20, 0xFF):  # 0x20 makes upper case of lower
            damaged = bytearray(whole)
            damaged[position] ^= flip
            (folder / MARKER).write_bytes(damaged)
            with pytest.raises(ValueError, match=MARKER):
                read_marker(folder)


def test_a_marker_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / saved(tmp_path, 1)
    whole = (folder / MARKER).read_bytes()
    for length in range(len(whole) - 1):  # without the last line break it still says the same
        (folder / MARKER).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=MARKER):
            read_marker(folder)


FIELDS: dict[str, Any] = {"format": "ddp_zero", "version": 4, "step": 3, "parts": ["ab"]}
OTHER_FIELDS: list[dict[str, Any]] = [
    *({"format": "other"}, {"format": None}, {"version": 3}, {"version": 5}, {"version": "1"}, {"version": None}),
    *({"step": "3"}, {"step": 3.0}, {"step": True}, {"step": None}, {"step": [3]}),
    *({"parts": "ab"}, {"parts": None}, {"parts": {"ab": 1}}, {"parts": [1]}, {"parts": ["ab", None]}),
]
LINES = [
    *(json.dumps({**FIELDS, **fields}) for fields in OTHER_FIELDS),
    *(json.dumps({key: value for key, value in FIELDS.items() if key != gone}) for gone in FIELDS),
    *("", "null", "3", '"ddp_zero"', "[]", '["format", "version"]', "{", "NaN", "{'a': 1}", "[" * 100_000),
    *("1" * 5000, "[1,]"),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:90])
def test_a_marker_with_a_fitting_checksum_that_is_none_is_refused(line: str, tmp_path: Path) -> None:
    assert read_marker(with_marker(tmp_path / "good", json.dumps(FIELDS))) == Marker(3, ("ab",))
    with pytest.raises(ValueError, match=MARKER):
        read_marker(with_marker(tmp_path / "bad", line))


# Reading files that may be anything


THINGS = [
    *("nothing", "folder", "pipe", "socket", "link to nowhere", "link to a file", "link to an endless device"),
    "link to itself",
]


@pytest.mark.parametrize("kind", THINGS)
@pytest.mark.parametrize("read", [open_regular, read_text])
def test_files_that_are_not_regular_are_refused_without_blocking(
    read: Callable[[Path], Any], kind: str, tmp_path: Path
) -> None:
    path = thing(tmp_path / "part-0.json", kind)
    with pytest.raises(ValueError, match=r"^Expected a regular file.*part-0\.json"):
        at_once(lambda: read(path))


@pytest.mark.parametrize("kind", THINGS)
def test_a_marker_that_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    thing(tmp_path / MARKER, kind)
    with pytest.raises(ValueError, match=MARKER):
        at_once(lambda: read_marker(tmp_path))


def test_no_file_stays_open_behind_a_refusal(tmp_path: Path) -> None:
    folders = [thing(tmp_path / kind, kind) for kind in ("folder", "pipe")]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        for path in folders:
            with pytest.raises(ValueError, match="a different kind"):
                open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before


@NOT_ROOT
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("x")
    (tmp_path / MARKER).chmod(0)
    with pytest.raises(ValueError, match=rf"Expected a regular file that can be read, got .*{MARKER}"):
        read_marker(tmp_path)


def test_the_largest_text_is_one_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "LARGEST_TEXT", 5)
    (tmp_path / "text").write_text("12345")
    assert read_text(tmp_path / "text") == "12345"
    (tmp_path / "text").write_text("123456")
    with pytest.raises(ValueError, match="Expected at most 5 bytes, got 6"):
        read_text(tmp_path / "text")


@pytest.mark.parametrize("raw", [b"\xff", b"abc\x80", b"\xed\xa0\x80", b"\xc3"], ids=repr)
def test_bytes_that_are_no_text_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(raw)
    with pytest.raises(ValueError, match=r"Expected UTF-8 text in .*text, got"):
        read_text(tmp_path / "text")


def test_a_text_is_never_written_over_another(tmp_path: Path) -> None:
    write_text(tmp_path / "text", "first")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "text", "second")
    assert read_text(tmp_path / "text") == "first"
