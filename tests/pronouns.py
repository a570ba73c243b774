"""``python -m tests.pronouns [--all]``: lines of pages, comments and strings in which *one* stands for a noun.

It is a pronoun as *ones*; after *the*, *this*, *each* and the like; and before a mark, a verb or a preposition. Numbers
(*one rank*, *one of two*), *one by one* and names in code are none. Some are missed: those at the end of a line.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 700

_AFTER = (
    "a an after and are as at be because been before but by can cannot could did do does else for from "
    "given gets had has have he holds i if in into is it its like may must nor not on or out over same "
    "shall should since so than that the then there they this to too under until was we were when where "
    "which while who whose will with without would"
).replace(" ", "|")
_BEFORE = "the|this|that|each|every|any|another|which|no|own|other|first|last|next|same|new|old|such|only|later|earlier"
_ONE = re.compile(
    rf"\b(?:ones|(?:{_BEFORE}) one(?! (?:rank|line|step|process|by|after|of)\b)"
    rf"|one(?=(?: (?:{_AFTER})\b)| *[.,;:)?!]))(?![\w'`-])",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"\b(?:one by one|one after (?:the other|another)|one and the same|one at a time|(?:from|to|at|by|than) one\b)",
    re.IGNORECASE,
)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose of a file, with their numbers."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(
            re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S).split("\n"), 1
        )
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from enumerate(node.value.split("\n"), node.lineno)


def found() -> dict[Path, list[tuple[int, str]]]:
    """The lines of each file that git knows, each line once."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", ":!benchmarks/results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {}
    for path in (ROOT / name for name in names.stdout.split()):
        of_file = {
            n: text.strip() for n, text in texts_of(path) if _ONE.search(_NUMBER.sub("", re.sub(r"`[^`]*`", "x", text)))
        }
        if of_file:
            lines[path] = sorted(of_file.items())
    return lines


def count() -> int:
    """The number of these lines."""
    return sum(map(len, found().values()))


def main() -> int:
    """Print how many lines there are in each file, or with ``--all`` the lines; 1 if there are more than `MOST`."""
    by_file = {path.relative_to(ROOT).as_posix(): lines for path, lines in found().items()}
    if "--all" in sys.argv:
        for name, lines in by_file.items():
            print("\n".join(f"{name}:{number}: {text}" for number, text in lines))
    else:
        for name, number in Counter({name: len(lines) for name, lines in by_file.items()}).most_common(40):
            print(f"{number:4} {name}")
    total = sum(map(len, by_file.values()))
    print(f"{total} lines, {MOST} allowed")
    return int(total > MOST)


if __name__ == "__main__":
    sys.exit(main())
