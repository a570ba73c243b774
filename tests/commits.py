"""``python -m tests.commits``: new commits have short subjects, and reasons where a test, limit or number changes.

New are those after `SINCE`. Where the history does not reach so far, as in a shallow clone, that is said, and nothing
is checked.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 72
SINCE = "085c7d1f49857e0253e808828014d21084148872"

_OF_TESTS = re.compile(r"def test_|\bassert\b|\bpytest\.|\d")
_CONSTANT = re.compile(r"_?[A-Z][A-Z_]+\b.*= .*\d")


def git(*arguments: str, root: Path) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout


def changes_a_claim(diff: str) -> bool:
    """Whether a diff takes away or changes an assertion, a test, or a number in tests, a constant, or a limit."""
    for part in diff.split("\ndiff --git "):
        file = re.search(r"^--- a/(.*)$", part, re.MULTILINE)
        if file is None:  # a new file
            continue
        lines = {sign: Counter(re.findall(rf"^\{sign}\s*(\S.*)$", part, re.MULTILINE)) for sign in "-+"}
        for line in lines["-"] - lines["+"]:  # not those that have moved within the file
            if line.startswith("-- a/"):
                continue
            in_tests = file[1].startswith("tests/") and file[1].endswith(".py")
            if file[1] == "docs/limits.md" or _CONSTANT.match(line) or (in_tests and _OF_TESTS.search(line)):
                return True
    return False


def new_commits(root: Path, since: str = SINCE) -> list[str] | None:
    """The commits after another, newest first, merges left out; None: that one is not in the history that is here."""
    try:
        if Path(git("rev-parse", "--show-toplevel", root=root).strip()).resolve() != root.resolve():
            return None
        git("merge-base", "--is-ancestor", since, "HEAD", root=root)
    except (OSError, subprocess.CalledProcessError):
        return None
    return git("rev-list", "--no-merges", f"{since}..HEAD", root=root).split()


def findings(root: Path, commits: list[str]) -> Iterator[str]:
    """Each commit that breaks a rule, with the rule."""
    for commit in commits:
        # git's own subject: all before the first empty line
        subject, body = git("log", "-1", "--format=%s%x00%b", commit, root=root).split("\0")
        if len(subject) > LONGEST:
            yield f"{commit[:8]}: Expected a subject of at most {LONGEST} characters, got {len(subject)}: {subject}"
        if not body.strip() and changes_a_claim(git("show", "-U0", "--format=", commit, root=root)):
            yield f"{commit[:8]}: Expected a body that tells why a test, limit or number changes, got none: {subject}"


def main(root: Path = ROOT, since: str = SINCE) -> int:
    """Print what is found; 1 if that is anything."""
    commits = new_commits(root, since)
    if commits is None:
        print(f"No history that reaches {since[:8]} is here: no commit was checked.")
        return 0
    found = list(findings(root, commits))
    print("\n".join([*found, f"{len(commits)} new commits were checked."]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
