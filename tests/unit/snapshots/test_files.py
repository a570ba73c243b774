"""Parts in memory-backed files: seals, limits, who may read them, and what is refused."""

import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_zero.checkpoint.folder import tensor_file_name
from ddp_zero.checkpoint.tensor_file import text_and_tensors
from ddp_zero.snapshots import memory_files
from ddp_zero.snapshots.memory_files import Budget, NoRoomError, OwnPart, PartFile, bytes_in, private_folder
from ddp_zero.snapshots.seals import Seal, holdings, rank_folder, seal_name, verify_part
from tests import HANG

NAME = f"{'0123456789abcdef' * 2}-7"


def staged_part(root: Path) -> Seal:
    tree = {"model": {"weight": torch.ones(5, 3).t(), "empty": torch.empty(0), "scalar": torch.tensor(1.0)}}
    text, tensors = text_and_tensors(tree, "a test")
    staged = OwnPart(rank_folder(root, 0), 0, Budget(root, None)).stage("a", text, tensors)
    return staged.complete(NAME, 7, 0, 2)[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    private_folder(tmp_path / "run")
    return tmp_path / "run"


# Seals


def test_a_part_is_found_by_its_seal_and_is_whole(root: Path) -> None:
    seal = staged_part(root)
    (holding,) = holdings(root)
    assert (holding.seal, holding.folder) == (seal, rank_folder(root, 0) / "a")
    verify_part(holding.folder, seal)


def test_a_part_without_a_seal_is_unfinished(root: Path) -> None:
    staged_part(root)
    own = OwnPart(rank_folder(root, 0), 0, Budget(root, None))
    own.stage("a", *text_and_tensors({"x": torch.zeros(4)}, "a test"))  # as when the process is killed now
    assert list(holdings(root)) == []


def test_files_and_folders_are_for_this_user_alone(root: Path) -> None:
    staged_part(root)
    modes = {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")] if path.is_dir()} == {0o700}


def test_a_folder_that_somebody_else_can_enter_is_refused(tmp_path: Path) -> None:
    for number, mode in enumerate((0o750, 0o701, 0o777)):
        path = tmp_path / str(number)
        path.mkdir()
        path.chmod(mode)
        with pytest.raises(PermissionError, match="nobody else can enter, got mode d"):
            private_folder(path)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="got mode l"):
        private_folder(tmp_path / "link")
    private_folder(tmp_path / "mine")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(world_size=0),
        lambda content: content.update(rank=-1),
        lambda content: content.update(rank=True),
        lambda content: content.update(nbytes=1 << 62),
        lambda content: content.update(snapshot="../../etc"),
        lambda content: content.update(part="0"),
        lambda content: content.update(format="other"),
        lambda content: content.update(version=1),
        lambda content: content.update(more=1),
        lambda content: content.pop("step"),
    ],
)
def test_a_seal_that_cannot_be_one_is_refused(change: Callable[[dict[str, object]], None]) -> None:
    seal = Seal(snapshot=NAME, step=7, world_size=2, rank=0, part="0" * 64, nbytes=100)
    text = seal.as_text()
    assert Seal.of_text(text, "x") == seal
    content = json.loads(text.splitlines()[1])
    change(content)
    line = json.dumps(content)
    with pytest.raises(ValueError, match=r"Expected the seal of a part in x, got .*ZERO-644"):
        Seal.of_text(f"{hashlib.sha256(line.encode()).hexdigest()}\n{line}\n", "x")
    with pytest.raises(ValueError, match="does not fit its checksum"):
        Seal.of_text(text.replace('"step": 7', '"step": 8'), "x")


def test_holdings_leave_out_short_missing_linked_and_misnamed_parts(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged_part(root)
    folder = rank_folder(root, 0) / "a"
    tensors = folder / "__0_0.distcp"
    raw = tensors.read_bytes()
    tensors.write_bytes(raw[:-1])
    assert list(holdings(root)) == []
    tensors.unlink()
    tensors.symlink_to("/dev/zero")
    assert list(holdings(root)) == []
    tensors.unlink()
    os.mkfifo(tensors)
    assert list(holdings(root)) == []
    tensors.unlink()
    tensors.write_bytes(raw)
    (folder / seal_name(0)).rename(folder / seal_name(1))
    assert list(holdings(root)) == []
    (folder / seal_name(1)).rename(folder / seal_name(0))
    assert len(list(holdings(root))) == 1
    assert len(re.findall("is left out", caplog.text)) == 4


def test_a_part_whose_index_names_the_tensor_file_of_another_rank_is_refused(root: Path) -> None:
    seal = staged_part(root)
    folder = rank_folder(root, 0) / "a"
    text = (folder / "part-0.json").read_text().replace("__0_0", "__1_0")
    (folder / "part-0.json").write_text(text)
    signed = replace(seal, part=hashlib.sha256(text.encode()).hexdigest())
    (folder / "__1_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    with pytest.raises(ValueError, match="Expected tensors within"):
        verify_part(folder, signed)


# Memory


def test_memory_is_refused_before_the_limit_is_exceeded(root: Path) -> None:
    file = PartFile(rank_folder(root, 0) / "a", 0, Budget(root, 100_000))
    file.begin(60_000)
    before = bytes_in(root)
    assert before >= 60_000
    with pytest.raises(NoRoomError, match=r"within limit=100000 bytes, got 1\d{5}.*ZERO-643"):
        PartFile(rank_folder(root, 0) / "b", 0, Budget(root, 100_000)).begin(60_000)
    assert bytes_in(root) == before, "nothing stays of what was refused"


def test_memory_that_the_file_system_lacks_is_refused(root: Path) -> None:
    with pytest.raises(NoRoomError, match=r"Expected room for \d+ more bytes in .*, got \d+ of the "):
        PartFile(rank_folder(root, 0) / "a", 0, Budget(root, None)).begin(1 << 60)
    assert bytes_in(root) == 0


def test_a_rank_that_gave_up_on_the_lock_waits_for_a_later_holder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience ends once for the process that does not let go, not for ranks that hold the lock for a moment."""
    monkeypatch.setattr(memory_files, "GRACE", 0.0)
    mine, theirs = Budget(root, None, patience=0.0), Budget(root, None)
    with (root / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NoRoomError, match=r"got a process that holds it.*ZERO-643"), mine.room(0):
            pass
        mine.patience = HANG
        with pytest.raises(NoRoomError, match=r"got a process that holds it.*ZERO-643"), mine.room(0):
            pass
    is_held, is_free = threading.Event(), threading.Event()

    def hold() -> None:
        with theirs.room(0):
            is_held.set()
            is_free.wait(HANG)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(HANG)
    threading.Timer(0.2, is_free.set).start()
    with mine.room(0):  # raises, unless it waits
        assert is_free.is_set()
    holder.join(HANG)


def test_a_cgroup_memory_limit_is_respected(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"max": "1000000", "current": "900000", "stat": "anon 5\ninactive_file 20000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(
        memory_files, "CONTROL_GROUPS", ((str(tmp_path), "memory.max", "memory.current", "inactive_file"),)
    )
    # 95% of 1,000,000 bytes, less 900,000 in use, of which 20,000 can be dropped: 70,000
    PartFile(rank_folder(root, 0) / "a", 0, Budget(root, None)).begin(69_000)
    with pytest.raises(NoRoomError, match="got 70000 of the control group"):
        PartFile(rank_folder(root, 0) / "b", 0, Budget(root, None)).begin(71_000)
    (tmp_path / "memory.max").write_text("max\n")
    PartFile(rank_folder(root, 0) / "b", 0, Budget(root, None)).begin(71_000)


def test_files_keep_their_memory_and_change_their_size_as_new_ones(root: Path) -> None:
    file = PartFile(rank_folder(root, 0) / "a", 0, Budget(root, None))
    path = rank_folder(root, 0) / "a" / tensor_file_name(0)
    first = file.begin(10_000)
    inode = path.stat().st_ino
    assert file.begin(10_000).obj is first.obj
    assert path.stat().st_ino == inode
    link = path.with_name("link")
    link.hardlink_to(path)
    first[:4] = b"kept"
    memory = file.begin(20_000)
    assert (len(memory), path.stat().st_ino == inode) == (20_000, False)
    memory[:4] = b"else"
    assert (link.read_bytes()[:4], bytes(first[:4])) == (b"kept", b"kept"), "a reader is not disturbed"
    path.unlink()
    assert len(file.begin(20_000)) == 20_000
    assert path.exists(), "a file that was removed is made again"


def test_equal_shapes_are_copied_into_the_same_memory(root: Path) -> None:
    own = OwnPart(rank_folder(root, 0), 0, Budget(root, None))
    for value in (1.0, 2.0):
        text, tensors = text_and_tensors(
            {"x": torch.full((3,), value), "y": torch.full((2, 2), value).half()}, "a test"
        )
        staged = own.stage("a", text, tensors)
        seal, _ = staged.complete(NAME, 7, 0, 1)
        verify_part(rank_folder(root, 0) / "a", seal)
        flat = torch.frombuffer(bytearray(staged.memory), dtype=torch.uint8)
        assert flat[:12].view(torch.float32).tolist() == [value] * 3
        assert flat[64:72].view(torch.float16).tolist() == [value] * 4
