"""Lints prose, beside ruff: docstrings, comments, messages, pages, links, drawn pictures and tables of raw results.

    python -m tests.prose

prints what it finds, and exits with 1 if that is anything.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import draw_design, draw_parallel, front
from tests import pronouns
from tests.pages import DOCS, OUTSIDE, PAGES, ROOT, SITE, anchors_of, links_of, prose_of

PACKAGE = ROOT / "ddp_zero"
LIBRARY = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [path for name in ("examples", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
ROOMS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"))

Text = tuple[str, str]
"""A place and what stands there."""

ANSWERS = {
    "quickstart.md": "opt = shard_optimizer(model, AdamW, stage=2, lr=3e-4)",
    "guides/checkpoint.md": "load as ever; nothing to convert",
    "guides/clip.md": "stage=2, max_grad_norm=1.0, lr=3e-4)",
    "guides/gradients.md": "opt.full_grad(param)`, on every rank",
    "guides/memory.md": "DDP's first iteration has one bucket",
    "guides/migrate.md": "from ddp_zero import ZeroRedundancyOptimizer",
    "guides/deepspeed.md": "from ddp_zero.deepspeed import initialize",
    "guides/frameworks.md": 'zero={"stage": 2})',
    "guides/nodes.md": "--rdzv-id=job1 train.py",
    "troubleshooting.md": "python -m ddp_zero explain ZERO-203",
}
"""By page: the answer to what a newcomer asks first."""

VAGUE = {
    r"\bwhat\b": 8,
    r"\b(?:that|those) of\b": 4,
    r"\b(?:of which|of whom|to whom|to which)\b": 4,
    r"\bothers\b": 14,
}
"""Words without a noun, and how often they may stand in 10,000 words."""
QUESTION = re.compile(r"(?:What|Who|Whom|Whose|Where|How|Whether|Which|When|Why)\b")
NO_VALUE = re.compile(r"got (one|it|others|another|some)\b|got none of\b")
"""The grammar *Expected X, got Y* where there is no Y."""

COMMENTED = 0.04
HAZARDS = """
    checkpoint/tensor_file
    core/backward/hook core/backward/scratch_bucket core/backward/planned_reducer
    core/backward/scratch_buffers
    core/comm/communicator core/comm/control_group core/comm/exchange core/comm/parameter_sync core/comm/ranks
    core/comm/reduction core/comm/ring
    core/local/storage core/local/copy_pipeline core/comm/requests core/state/gather snapshots/connections
    core/step/join launch/guard parallel/gradients parallel/joint_decision
    snapshots/copies snapshots/memory_files snapshots/snapshots insight/flight core/comm/recorder
""".split()
"""Files in which streams, buffers, threads or collectives meet: so many of their lines have a comment."""


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def docstrings(paths: Sequence[Path]) -> list[Text]:
    return [
        (place(path, node.body[0].lineno), text)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node))
    ]


def comments(paths: Sequence[Path]) -> list[Text]:
    return [
        (place(path, token.start[0]), token.string.lstrip("# "))
        for path in paths
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and not re.match(r"# *(?:type:|noqa|mypy:|ruff:)", token.string)
    ]


def vague(part: str, texts: Sequence[Text]) -> Iterator[str]:
    count = sum(len(re.findall(r"[A-Za-z][\w']*", text)) for _, text in texts)
    for pattern, most in VAGUE.items():
        found = [f"  {where}: {line.strip()}" for where, text in texts for line in lines_with(pattern, text)]
        if len(found) * 10_000 > most * count:
            yield "\n".join([f"{part}: more than {most} of {pattern} in 10,000 words", *found])


def lines_with(pattern: str, text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield from [line] * len(re.findall(pattern, line, re.IGNORECASE))


def questions(part: str, texts: Sequence[Text]) -> Iterator[str]:
    asking = [f"  {where}: {text}" for where, text in texts if QUESTION.match(text)]
    if len(asking) * 100 > len(texts):
        yield "\n".join([f"{part}: more than 1% of the docstrings begin with a question", *asking])


def bare_hazards() -> Iterator[str]:
    for name in HAZARDS:
        path = PACKAGE / f"{name}.py"
        if not path.exists():
            yield f"tests/prose.py: there is no {name}.py"
        elif len(comments([path])) < COMMENTED * path.read_text().count("\n"):
            yield f"{name}.py: fewer than {COMMENTED:.0%} of its lines have a comment"


def messages_without_a_value() -> Iterator[str]:
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NO_VALUE.search(node.value):
                yield f"{place(path, node.lineno)}: *Expected X, got Y* without Y: {node.value!r}"


def files_that_are_not_there(page: Path) -> Iterator[str]:
    """Such as ``core/comm/ring`` and ``ddp_zero.core.comm``."""
    text = re.sub(r"\]\([^)]*\)", "", page.read_text())
    named = re.findall(rf"(?<![\w/.-])(?:ddp_zero/)?((?:{ROOMS})/[a-z_0-9/]+)", text)
    named += [name.replace(".", "/") for name in re.findall(r"\bddp_zero\.((?:core|tools)(?:\.[a-z_0-9]+)+)", text)]
    for name in named:
        if not (PACKAGE / name).exists() and not (PACKAGE / f"{name}.py").exists():
            yield f"{page.relative_to(ROOT)}: there is no {name}"


def lost_links(page: Path) -> Iterator[str]:
    for link, anchor in links_of(page):
        target = (page.parent / link).resolve() if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            yield f"{page.relative_to(ROOT)}: {link}#{anchor} leads nowhere"


def undated_tables() -> Iterator[str]:
    for section in re.split(r"^##+ ", (DOCS / "performance.md").read_text(), flags=re.MULTILINE):
        before, table, _ = section.partition("\n| --- |")
        dated = r"20\d\d-\d\d-\d\d.*\bcommits? [0-9a-f]{7}|Measured between"
        if table and not re.search(dated, before, re.DOTALL):
            yield f"docs/performance.md: a table without a date and a commit in {section.partition(chr(10))[0]!r}"


def old_pictures() -> Iterator[str]:
    drawn = {**draw_design.pictures(), draw_parallel.TARGET: draw_parallel.draw(draw_parallel.PANELS)}
    for target, picture in drawn.items():
        if target.read_text() != picture:
            yield f"{target.relative_to(ROOT)}: run python -m benchmarks.draw_design and benchmarks.draw_parallel"


def old_figures() -> Iterator[str]:
    for page in front.blocks():
        if front.written(page, page.read_text()) != page.read_text():
            yield f"{page.relative_to(ROOT)}: not the figures of the raw results. Run python -m benchmarks.front"


def far_answers() -> Iterator[str]:
    """Answers that two links do not lead to, from either front page."""
    for page, words in ANSWERS.items():
        if words not in (DOCS / page).read_text():
            yield f"docs/{page}: no {words!r}"
    for first in (ROOT / "README.md", DOCS / "index.md"):
        near = {first}
        for _ in range(2):
            near |= {page for link in near for page in pages_linked_from(link)}
        for page in ANSWERS.keys() - {str(link.relative_to(DOCS)) for link in near if link.is_relative_to(DOCS)}:
            yield f"{first.relative_to(ROOT)}: docs/{page} is more than two links away"


def pages_linked_from(page: Path) -> Iterator[Path]:
    targets = [(page.parent / link).resolve() for link, _ in links_of(page) if link.endswith(".md")]
    yield from (target for target in targets if target.exists())


def findings() -> Iterator[str]:
    for part, paths in (("library", LIBRARY), ("examples and benchmarks", PROGRAMS)):
        told = docstrings(paths)
        yield from vague(part, [*told, *comments(paths)])
        yield from questions(part, told)
    yield from vague("pages", [(page.name, prose_of(page)) for page in PAGES])
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        yield from files_that_are_not_there(page)
    for page in [*OUTSIDE, *SITE]:
        yield from lost_links(page)
    for look in (bare_hazards, messages_without_a_value, undated_tables, old_pictures, old_figures, far_answers):
        yield from look()
    if pronouns.count() > pronouns.MOST:
        yield f"more than {pronouns.MOST} lines with *one* in the place of a noun: python -m tests.pronouns"
    if len((DOCS / "design.md").read_text().split()) > 2000:
        yield "docs/design.md: more than 2,000 words"


if __name__ == "__main__":
    sys.exit("\n".join(findings()) or 0)
