"""Files of the repository that pages link to become pages of the site, so that every link works without a network.

A page links to ``../benchmarks/results/x.md`` or ``../examples/x.py`` as it would on a forge. Here such a file is added
under ``source/``: Markdown and pictures as they are, other text as a block of code.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
AS_THEY_ARE = {".md", ".png", ".svg"}
REMOTE = re.compile(
    r"""<(?!a\b)[^>]*\s(?:src|href|srcset|data)=["'](?:https?:)?//[^"']*["']|url\(["']?(?:https?:)?//"""
)
"""Fetched from elsewhere when a page is shown; links that readers follow are left alone."""

TO_NAMES = "Names: [the box](index.md#names)."
"""A line of a guide in whose place the site shows the box itself, closed."""

origins: dict[str, Path] = {}
"""By the place of a page on the site: the file of the repository that it shows."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to."""
    origins.clear()
    for file in files.documentation_pages():
        origins[file.src_uri] = DOCS / file.src_uri
    waiting = list(origins.values())
    while waiting:
        page = waiting.pop()
        for target in _linked(page.read_text(), page):
            uri = _place(target)
            if uri in origins or target.is_relative_to(DOCS):
                continue
            origins[uri] = target
            if target.suffix in AS_THEY_ARE:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
            else:
                files.append(File.generated(config, uri, content=_as_code(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at their places on the site, and show the box of names."""
    markdown = markdown.replace(TO_NAMES, _box())
    origin = origins.get(page.file.src_uri)
    return markdown if origin is None or origin.suffix != ".md" else _rewritten(markdown, origin, page.file.src_uri)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that needs a network to be shown."""
    fetched = REMOTE.search(output)
    if fetched is not None:
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {fetched.group(0)}")
    return output


def _box() -> str:
    found = re.search(r"^```python\n.*?^```$", (DOCS / "guides" / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    if found is None:
        raise PluginError("guides/index.md has no box")
    return '??? note "Names in the blocks below"\n\n' + "".join(f"    {line}\n" for line in found[0].split("\n"))


def _linked(markdown: str, page: Path) -> list[Path]:
    if page.suffix != ".md":
        return []
    found = (_target(match.group(2), page) for match in LINK.finditer(markdown))
    return [target for target in found if target is not None]


def _target(link: str, page: Path) -> Path | None:
    target = Path(os.path.normpath(page.parent / link))
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    uri = f"source/{target.relative_to(ROOT).as_posix()}"
    return uri if target.suffix in AS_THEY_ARE else f"{uri}.md"


def _rewritten(markdown: str, origin: Path, uri: str) -> str:
    def moved(match: re.Match[str]) -> str:
        target = _target(match.group(2), origin)
        if target is None:
            return match.group(0)
        link = os.path.relpath(_place(target), os.path.dirname(uri) or ".")
        return f"{match.group(1)}{link}{match.group(3) or ''}{match.group(4)}"

    return LINK.sub(moved, markdown)


def _as_code(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    language = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".json": "json"}.get(target.suffix, "text")
    return f"# {name}\n\n````{language}\n{target.read_text()}\n````\n"
