"""The text that a newcomer reads to find ten answers: ``python -m tests.newcomer`` prints it, ``--write`` writes it.

The reader begins on a front page, README or the site's home, and follows links only. On every page, from its top:

- text is read in order, without the addresses of links; pictures and code are passed over, unless code is the answer;
- a section whose heading does not lead on costs its heading only;
- of a table the first column is read, until a row leads on; that row is read to its link.

A page ends with the link that is followed, the last with the answer. Seconds are characters read / 25, and 2 for
each page that is opened.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
README, HOME = "README.md", "docs/index.md"
STATUS = REPOSITORY / "docs" / "status.md"

CHARACTERS_PER_SECOND, SECONDS_PER_PAGE = 25, 2
MOST_SECONDS, MOST_PAGES = 60, 2


class Step(NamedTuple):
    """One page: the words of the link or of the answer at which reading ends, and the heading of their section."""

    page: str
    section: str
    until: str
    is_link: bool = False


@dataclass(frozen=True)
class Way:
    """The pages of one task from one front page."""

    task: str
    steps: tuple[Step, ...]

    @property
    def characters(self) -> int:
        """Characters read on all pages."""
        return sum(map(characters_read, self.steps))

    @property
    def opened(self) -> int:
        """Pages opened beyond the front page."""
        return len(self.steps) - 1

    @property
    def seconds(self) -> float:
        """Time to the answer."""
        return self.characters / CHARACTERS_PER_SECOND + self.opened * SECONDS_PER_PAGE


GUIDES = "docs/guides/"
ANSWERS = {
    "train": Step("docs/quickstart.md", "3. Stage 2", "opt = shard_optimizer(model, AdamW, stage=2, lr=3e-4)"),
    "resume at another number of ranks": Step(GUIDES + "checkpoint.md", "", "load as ever; nothing to convert"),
    "clip": Step(GUIDES + "clip.md", "", "stage=2, max_grad_norm=1.0, lr=3e-4)"),
    "read a gradient": Step(GUIDES + "gradients.md", "", "opt.full_grad(param)`, on every rank"),
    "find out why memory is high": Step(GUIDES + "memory.md", "", "DDP's first iteration has one bucket"),
    "move from torch's ZeRO": Step(
        GUIDES + "migrate.md", "From torch's ZeroRedundancyOptimizer", "from ddp_zero import ZeroRedundancyOptimizer"
    ),
    "move from DeepSpeed": Step(GUIDES + "deepspeed.md", "", "from ddp_zero.deepspeed import initialize"),
    "use with Trainer": Step(GUIDES + "frameworks.md", "transformers", 'zero={"stage": 2})'),
    "run on two hosts": Step(GUIDES + "nodes.md", "torchrun", "--rdzv-id=job1 train.py"),
    "understand an error": Step("docs/troubleshooting.md", "", "python -m ddp_zero explain ZERO-203"),
}
"""Where each task is answered."""

LINKS = {
    README: {
        "train": ("Documentation", "quickstart"),
        "resume at another number of ranks": ("Documentation", "save and resume"),
        "clip": ("Documentation", "clip"),
        "read a gradient": ("Documentation", "read gradients"),
        "find out why memory is high": ("Documentation", "why is memory high?"),
        "move from torch's ZeRO": ("Documentation", "torch's ZeroRedundancyOptimizer"),
        "move from DeepSpeed": ("Documentation", "DeepSpeed"),
        "use with Trainer": ("Documentation", "Trainer, accelerate, Lightning"),
        "run on two hosts": ("Documentation", "several nodes"),
        "understand an error": ("Documentation", "troubleshooting"),
    },
    HOME: {
        "train": ("I want to", "Quickstart"),
        "resume at another number of ranks": ("I want to", "Save and resume"),
        "clip": ("I want to", "Clip gradients"),
        "read a gradient": ("I want to", "all guides"),
        "find out why memory is high": ("I want to", "Why is memory high?"),
        "move from torch's ZeRO": ("I want to", "From torch's ZeRO"),
        "move from DeepSpeed": ("I want to", "From DeepSpeed"),
        "use with Trainer": ("I want to", "Use with Trainer"),
        "run on two hosts": ("I want to", "all guides"),
        "understand an error": ("I want to", "Troubleshooting"),
    },
}
"""By front page and task: the section and the words of the link that is followed."""

THROUGH = {
    (HOME, "read a gradient"): (Step(GUIDES + "index.md", "", "Read gradients", is_link=True),),
    (HOME, "run on two hosts"): (Step(GUIDES + "index.md", "", "Several nodes", is_link=True),),
}
"""By front page and task: what is read between it and the answer, if anything."""


def ways(front: str) -> list[Way]:
    """The ten tasks from a front page."""
    return [
        Way(task, (Step(front, *LINKS[front][task], is_link=True), *THROUGH.get((front, task), ()), answer))
        for task, answer in ANSWERS.items()
    ]


# Reading


def visible(text: str) -> str:
    """Text as a reader sees it: without comments, pictures, addresses of links and marks."""
    text = re.sub(r"<!--.*?-->|<a id=.*?</a>|!\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`]|^#+ |^> |^- ", "", text, flags=re.MULTILINE).split())


def characters_read(step: Step) -> int:
    """Characters that are read on a page.

    Raises:
        ValueError: if the words at which reading ends are not there.
    """
    text = re.sub(r"\A---\n.*?\n---\n", "", (REPOSITORY / step.page).read_text(), flags=re.DOTALL)
    total = 0
    for heading, body in _sections(text):
        total += len(visible(heading))
        if step.section and not visible(heading).startswith(step.section) and heading.startswith("## "):
            continue
        read, has_ended = _read(body, step)
        total += read
        if has_ended:
            return total
    kind = "link" if step.is_link else "text"
    raise ValueError(f"Expected the {kind} {step.until!r} in {step.page}, under {step.section!r} if that is given.")


def _sections(text: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"^(#{1,3} .*)$", text, flags=re.MULTILINE)
    yield "", parts[0]
    yield from zip(parts[1::2], parts[2::2], strict=True)


def _read(body: str, step: Step) -> tuple[int, bool]:
    """Characters read in a section, and whether reading ends in it."""
    total = 0
    for block in re.split(r"(^```.*?^```$)", body, flags=re.DOTALL | re.MULTILINE):
        is_code = block.startswith("```")
        if is_code and (step.is_link or step.until not in block):
            continue
        for line in _lines(block, is_code):
            before, ends, _ = line.partition(f"[{step.until}](" if step.is_link else step.until)
            if ends:
                return total + _length(before, is_code) + len(step.until), True
            total += _length(line.split("|")[1] if _is_row(line) else line, is_code)
    return total, False


def _lines(block: str, is_code: bool) -> Iterator[str]:
    """Lines of code, and rows of tables; a paragraph is one line."""
    if is_code:
        yield from block.split("\n")[1:-1]
        return
    for paragraph in block.split("\n\n"):
        rows = paragraph.strip().split("\n")
        yield from [row for row in rows if set(row) - set("|-: ")] if _is_row(rows[0]) else [" ".join(rows)]


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _length(text: str, is_code: bool) -> int:
    return len(text.strip() if is_code else visible(text.replace("|", " ")))


# The table


def table() -> str:
    """The rows of the page."""
    from_readme, from_home = ({way.task: way for way in ways(front)} for front in (README, HOME))
    rows = [
        "| task | answered by | pages | from README, s | from the site's home, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for task, answer in ANSWERS.items():
        name = answer.page.removeprefix("docs/")
        both = f"{from_readme[task].seconds:.0f} | {from_home[task].seconds:.0f}"
        rows.append(f"| {task} | [{name}]({name}) | {from_readme[task].opened} | {both} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> None:
    """Print the table, or write it."""
    if "--write" not in arguments:
        print(table())
        return
    page, marked = STATUS.read_text(), r"(<!-- newcomer -->\n).*?(\n<!-- end of newcomer -->)"
    STATUS.write_text(re.sub(marked, lambda found: found[1] + table() + found[2], page, flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1:])
