"""Records that are damaged, or made to do harm, are refused in a sentence with the file's name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_zero.__main__ import main
from ddp_zero.insight.record_format import FIELDS, VERSION
from ddp_zero.tools.postmortem.records import read, read_folder

NAME = "attempt-0-rank-00000.json"
ROW = [1, 0, 3, "sync", 2, 1e9, None, 10, 20, "(1, 2)", "rank 1 (global rank 1)", False]


def content(**more: Any) -> dict[str, Any]:
    return {
        **{"version": VERSION, "rank": 0, "members": [0, 1], "attempt": 0, "host": "here", "process": 7},
        **{"started": 1e9, "written": 1e9 + 5, "time_out": 60.0, "reason": "a time-out", "error": ""},
        **{"stacks": {"MainThread": ["line"]}, "fields": list(FIELDS), "events": [ROW]},
        "collectives": [["0", 3, "all_reduce", "[[4]]", 1e9, True]],
        **more,
    }


def written(folder: Path, data: bytes) -> Path:
    (folder / NAME).write_bytes(data)
    return folder / NAME


def test_a_record_is_read(tmp_path: Path) -> None:
    record = read(written(tmp_path, json.dumps(content()).encode()))
    assert (record.rank, record.events[0].phase, record.events[0].peer_rank) == (0, "sync", 1)
    assert str((record.collectives or ())[0]) == "all_reduce [[4]], collective 3 of process group '0'"
    assert read(written(tmp_path, json.dumps(content(collectives=None)).encode())).collectives is None


@pytest.mark.parametrize(
    "more",
    [
        {"rank": "0"},
        {"members": 3},
        {"members": [[]]},
        {"attempt": None},
        {"host": 5},
        {"started": "soon"},
        {"written": 1e300},
        {"written": float("nan")},
        {"stacks": []},
        {"stacks": {"MainThread": 3}},
        {"stacks": {"MainThread": [3]}},
        {"events": 3},
        {"events": [3]},
        {"events": [ROW[:-1]]},
        {"events": [[*ROW[:5], -1.0, *ROW[6:]]]},
        {"events": [["1", *ROW[1:]]]},
        {"version": {}},
        {"collectives": 3},
        {"collectives": [["0", "3", "all_reduce", "[[4]]", 1e9, True]]},
        {"fields": None},
        {"rank": 10**400},
    ],
)
def test_values_of_the_wrong_kind_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"Expected a flight record of version {VERSION} in .*{NAME}, got "):
        read(written(tmp_path, json.dumps(content(**more)).encode()))


@pytest.mark.parametrize(
    "data", [b"", b"[1]", b"3", b"\xff\xfe", b'{"a": ' * 100_000, b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"]
)
def test_files_that_are_no_records_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=NAME):
        read(written(tmp_path, data))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("make", [_pipe, _huge, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_read_folder_refuses_paths_that_are_no_regular_files(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / NAME)
    with pytest.raises(ValueError, match=NAME):
        read_folder(tmp_path)
    assert main(["postmortem", str(tmp_path)]) == 1


def test_control_characters_of_records_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\x9b31m\u202e"
    row = [*ROW[:3], evil, *ROW[4:9], evil, evil, False]
    everywhere = {"host": evil, "reason": evil, "error": evil, "stacks": {evil: [evil], "MainThread": [evil]}}
    written(tmp_path, json.dumps(content(**everywhere, events=[row])).encode())
    assert main(["postmortem", str(tmp_path), "--events", "3", "--stacks"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("title") >= 5
    assert all(letter.isprintable() or letter == "\n" for letter in printed)
