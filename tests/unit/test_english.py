"""English of docstrings and comments, counted: the dialect does not come back, hazards have their comments.

`python -m tests.unit.test_english [ROOM ...]` prints the counts of each room, and lists every place in the rooms named.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ddp_zero

SOURCE = Path(ddp_zero.__file__).parent
PROGRAMS = ("examples", "benchmarks")
PER_10K = {  # at most so many per 10,000 words
    "what": (re.compile(r"\bwhat\b", re.IGNORECASE), 8),
    "that of": (re.compile(r"\b(?:that|those) of\b", re.IGNORECASE), 4),
    "of which": (re.compile(r"\b(?:of which|of whom|to whom|to which)\b", re.IGNORECASE), 4),
    "others": (re.compile(r"\bothers\b", re.IGNORECASE), 14),
}
QUESTION = re.compile(r"(?:What|Who|Whom|Whose|Where|How|Whether|Which|When|Why)\b")
QUESTIONS = 0.01  # of the first lines of docstrings
COMMENTS = 0.04  # of the lines of files at whose lines streams, buffers, threads or collectives meet
HAZARDS = (
    "checkpoint/saving.py",
    "checkpoint/tensor_file.py",
    "core/backward/hook.py",
    "core/backward/owned_sums.py",
    "core/backward/partitioned.py",
    "core/backward/reducer.py",
    "core/backward/scratch_buffers.py",
    "core/comm/communicator.py",
    "core/comm/control_group.py",
    "core/comm/exchange.py",
    "core/comm/parameter_sync.py",
    "core/comm/ranks.py",
    "core/comm/reduction.py",
    "core/comm/ring.py",
    "core/local/storage.py",
    "core/offload/copy_pipeline.py",
    "core/offload/mapped_file.py",
    "core/state/connections.py",
    "core/state/gather.py",
    "core/step/join.py",
    "launch/guard.py",
    "parallel/gradients.py",
    "parallel/joint_decision.py",
    "snapshots/copies.py",
    "snapshots/memory_files.py",
    "snapshots/snapshots.py",
    "tools/record/flight.py",
    "tools/record/recorder.py",
)


@dataclass(frozen=True)
class Text:
    """One docstring or comment."""

    path: Path
    line: int
    words: str
    is_docstring: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(SOURCE.parent)}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.words.strip().split("\n")[0]


def texts(path: Path) -> Iterator[Text]:
    """Docstrings and comments of a Python file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text(path, node.body[0].lineno, docstring, True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# *(?:type:|noqa|mypy:|ruff:)", token.string):
            yield Text(path, token.start[0], token.string.lstrip("# "), False)


def files(room: str = "") -> list[Path]:
    """Python files under a folder of the package, or one file."""
    path = SOURCE / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def counted(part: str) -> list[Text]:
    """Texts of the library or of the programs."""
    programs = [path for name in PROGRAMS for path in sorted((SOURCE.parent / name).rglob("*.py"))]
    return [text for path in (files() if part == "library" else programs) for text in texts(path)]


def words(found: list[Text]) -> int:
    return sum(len(re.findall(r"[A-Za-z][\w']*", text.words)) for text in found)


def places(found: list[Text], pattern: re.Pattern[str]) -> list[str]:
    return [f"{text}: {line.strip()}" for text in found for line in text.words.split("\n") if pattern.search(line)]


def occurrences(found: list[Text], pattern: re.Pattern[str]) -> int:
    return sum(len(pattern.findall(text.words)) for text in found)


def questions(found: list[Text]) -> list[str]:
    return [f"{text}: {text.first_line}" for text in found if text.is_docstring and QUESTION.match(text.first_line)]


def comment_share(path: Path) -> float:
    """Lines with a comment, of all lines; descriptions of class fields are not counted."""
    source = path.read_text()
    fields = {
        entry.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for entry in node.body
        if isinstance(entry, ast.AnnAssign)
    }
    found = [text.line for text in texts(path) if not text.is_docstring]
    return len(set(found) - fields) / source.count("\n")


@pytest.mark.parametrize("part", ["library", "programs"])
@pytest.mark.parametrize("name", PER_10K)
def test_headless_words_are_rare(name: str, part: str) -> None:
    pattern, bound = PER_10K[name]
    found = counted(part)
    per_10k = occurrences(found, pattern) / words(found) * 10_000
    assert per_10k <= bound, f"{name!r} {per_10k:.1f} times per 10,000 words:\n" + "\n".join(places(found, pattern))


@pytest.mark.parametrize("part", ["library", "programs"])
def test_docstrings_do_not_begin_with_a_question(part: str) -> None:
    found = counted(part)
    asking = questions(found)
    count = sum(text.is_docstring for text in found)
    assert len(asking) <= QUESTIONS * count, f"{len(asking)} of {count} docstrings:\n" + "\n".join(asking)


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards_are_commented(name: str) -> None:
    assert comment_share(SOURCE / name) >= COMMENTS


def report(rooms: list[str]) -> None:
    """Print counts per 10,000 words of every room, and all places in the rooms named."""
    print(f"{'room':24}{'lines':>7}{'doc':>7}{'words':>7}" + "".join(f"{name:>10}" for name in PER_10K) + "  questions")
    core = sorted(f"core/{path.name}" for path in (SOURCE / "core").iterdir())
    for room in ["", *sorted({path.name for path in SOURCE.iterdir()} - {"core"}), *core]:
        paths = files(room)
        found = [text for path in paths for text in texts(path)]
        if not found:
            continue
        lines = sum(path.read_text().count("\n") for path in paths)
        doc = sum(text.words.count("\n") + 1 for text in found if text.is_docstring)
        rates = "".join(f"{occurrences(found, p) / words(found) * 10_000:10.1f}" for p, _ in PER_10K.values())
        print(f"{room or 'all':24}{lines:7}{doc:7}{words(found):7}{rates}{len(questions(found)):6}")
    for room in rooms:
        found = [text for path in files(room) for text in texts(path)]
        for pattern, _ in PER_10K.values():
            print(*places(found, pattern), sep="\n")
        print(*questions(found), sep="\n")


if __name__ == "__main__":
    report(sys.argv[1:])
