"""The pages of the documentation: their blocks of Python, their links and their anchors.

Blocks of Python without a comment in the line before them are typed in their order, after the box with their names, by
`tests/multiproc/test_pages.py`. Others have one of these:

- ``<!-- names -->``: the box, on `NAMES`;
- ``<!-- fragment: needs ddp, loss -->``: `tests/multiproc/test_pages.py` runs it on two ranks with these at hand;
- ``<!-- fragment: needs mesh; run by tests/x.py::test -->``: the named test runs the same calls;
- ``<!-- fragment: needs deepspeed; not run -->``: code of another library, shown for comparison;
- ``<!-- file: x.py -->``: the file, or as a diff how it differs from the file before it on the page;
- ``<!-- example -->``: the example of the README, which `tests/multiproc/test_readme.py` runs.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = sorted(path for path in DOCS.rglob("*.md"))
PAGES = [ROOT / "README.md", *SITE]
NAMES = DOCS / "guides" / "index.md"
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
"""Pages in Markdown that are not part of the site."""

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"fragment: needs (?P<needs>[\w, ]+)(?:; (?P<instead>run by (?P<test>\S+)|not run))?")


@dataclass(frozen=True)
class Block:
    """A block of Python on a page.

    Attributes:
        page: path of the page, from the root of the repository.
        line: number of the block's first line.
        code: the text of the block.
        mark: the comment before it, empty if there is none.
    """

    page: str
    line: int
    code: str
    mark: str

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def is_typed(self) -> bool:
        """Whether the block runs after the box and the blocks before it."""
        return not self.mark

    @property
    def is_fragment(self) -> bool:
        """Whether the block says which things it needs."""
        return _MARK.fullmatch(self.mark) is not None

    @property
    def needs(self) -> list[str]:
        """Names of the things that a fragment needs, in the order in which they are made."""
        found = _MARK.fullmatch(self.mark)
        return [] if found is None else [name.strip() for name in found["needs"].split(",") if name != "nothing"]

    @property
    def test(self) -> str | None:
        """The test, or file of tests, that runs the same calls."""
        found = _MARK.fullmatch(self.mark)
        return None if found is None else found["test"]

    @property
    def is_run(self) -> bool:
        """Whether the fragment itself is run."""
        found = _MARK.fullmatch(self.mark)
        return found is not None and found["instead"] is None


def blocks_of(page: Path) -> list[Block]:
    """All blocks of Python on a page."""
    text = page.read_text()
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, found.start("code")) + 1, found["code"], found["mark"] or "")
        for found in _BLOCK.finditer(text)
    ]


def links_of(page: Path) -> list[tuple[str, str]]:
    """File and anchor of each link to a file, either may be empty; links in blocks of code do not count."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page: its headings, and those set by hand."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles]
    by_hand = set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.MULTILINE))
    return by_hand | {re.sub(run, "-", title) for run in (r"[\s-]+", r"\s") for title in plain}


def prose_of(page: Path) -> str:
    """A page's text without blocks of code and comments."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
