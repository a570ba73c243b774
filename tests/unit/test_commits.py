"""Subjects and bodies of new commits, in histories made for it."""

from pathlib import Path

import pytest

from tests.commits import changes_a_claim, findings, git, main, new_commits

DIFF = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-{1}\n+{2}\n"


@pytest.mark.parametrize(
    ("file", "before", "after", "expected"),
    [
        ("tests/unit/test_a.py", "    assert moved", "    pass", True),
        ("tests/unit/test_a.py", "def test_a() -> None:", "def test_b() -> None:", True),
        ("tests/unit/test_a.py", "    steps = 3", "    steps = 2", True),
        ("tests/unit/test_a.py", "    assert moved", "        assert moved", False),
        ("tests/unit/test_a.py", "    opt.step()", "    step(opt)", False),
        ("ddp_zero/a.py", "LONGEST = 72", "LONGEST = 80", True),
        ("ddp_zero/a.py", "    steps = 3", "    steps = 2", False),
        ("docs/limits.md", "- No LBFGS.", "", True),
        ("docs/launch.md", "- At 3 ranks.", "", False),
    ],
)
def test_changes_of_tests_limits_and_numbers_need_a_body(file: str, before: str, after: str, expected: bool) -> None:
    assert changes_a_claim(DIFF.format(file, before, after)) is expected
    added = DIFF.format(file, before, after).replace(f"--- a/{file}", "--- /dev/null")
    assert not changes_a_claim(added)


def commit(root: Path, message: str, **files: str) -> None:
    for name, text in files.items():
        path = root / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git("add", ".", root=root)
    git("-c", "user.name=A", "-c", "user.email=a@b", "commit", "-q", "-m", message, root=root)


def test_new_commits_are_listed_in_whole_clones_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, shallow = tmp_path / "whole", tmp_path / "shallow"
    root.mkdir()
    assert main(root) == 0
    assert "No history" in capsys.readouterr().out
    git("init", "-q", root=root)
    commit(root, "old" * 40, a="steps = 3\n")
    old = git("rev-parse", "HEAD", root=root).strip()
    assert new_commits(root, old) == []
    commit(root, "A test without a reason", a="steps = 4\n")
    commit(root, "A test with one\n\nIt needs five steps", a="steps = 5\n")
    commit(root, "A subject without an empty line after it\n" + "long " * 9, b="steps = 5\n")
    long, with_reason, without = list(new_commits(root, old) or [])
    found = list(findings(root, [long, with_reason, without]))
    assert found[0].startswith(f"{long[:8]}: Expected a subject")
    assert [one[:8] for one in found] == [long[:8], without[:8]]
    assert main(root, old) == 1
    assert "got none: A test without a reason" in capsys.readouterr().out
    git("clone", "-q", "--depth", "2", root.as_uri(), str(shallow), root=tmp_path)
    assert new_commits(shallow, old) is None
