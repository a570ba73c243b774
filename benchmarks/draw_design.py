"""Draws docs/images/packages.svg and bucket.svg: the packages by floor, and the way of a bucket in stage 2.

python -m benchmarks.draw_design
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PACKAGES, BUCKET = DOCS / "images" / "packages.svg", DOCS / "images" / "bucket.svg"
_CORE, _TOOLS, _USERS = "#4477aa", "#777777", "#228833"
_RANKS = ("#4477aa", "#ee6677", "#228833")


@dataclass(frozen=True)
class Move:
    """A stage of a bucket, at one moment.

    Attributes:
        bucket: number of its row.
        start: column in which it begins.
        width: number of columns.
        label: text in its box.
        colour: colour of its box.
    """

    bucket: int
    start: int
    width: int
    label: str
    colour: str


def floors(page: str) -> dict[int, list[str]]:
    """Packages by floor, from the table of the design page."""
    found: dict[int, list[str]] = {}
    for floor, name in re.findall(r"^\| *(\d+) *\| *`?([\w.]+)", page, flags=re.MULTILINE):
        found.setdefault(int(floor), []).append(name)
    return found


def draw_packages(by_floor: Mapping[int, Sequence[str]]) -> str:
    """A row of boxes per floor, the highest at the top."""
    left, width, height, gap = 90, 150, 30, 10
    parts, top = [], 16
    for floor in sorted(by_floor, reverse=True):
        parts.append(_text(10, top + 20, f"floor {floor}"))
        for number, name in enumerate(by_floor[floor]):
            colour = _CORE if name.startswith("core.") else _TOOLS if name.startswith("tools.") else _USERS
            parts.append(_box(left + number * (width + gap), top, width, height, colour, name))
        top += height + gap
    notes = (
        ("A file imports from lower floors and from its own package only.", "black"),
        ("blue: core, private", _CORE),
        ("green: users import from here, or its parts", _USERS),
        ("grey: tools, to look at a run", _TOOLS),
    )
    for note, colour in notes:
        parts.append(_text(10, top + 14, note, colour))
        top += 20
    return _svg(left + max(map(len, by_floor.values())) * (width + gap) + 10, top + 10, parts)


def way(buckets: int) -> list[Move]:
    """The stages of some buckets: each is filled while the last is reduced and the bucket before that is stepped."""
    moves = []
    for number in range(buckets):
        moves += [
            Move(number, number, 1, "backward fills", "#ccbb44"),
            Move(number, number + 1, 1, "reduce to owners", "#ee6677"),
            Move(number, number + 2, 1, "owners step, sync", "#4477aa"),
            Move(number, number + 3, 1, "parameters new", "#228833"),
        ]
    return moves


def draw_bucket(moves: Sequence[Move]) -> str:
    """Time goes to the right, a row per bucket; below, one bucket on three ranks."""
    left, width, height, gap = 90, 150, 36, 12
    rows = 1 + max(move.bucket for move in moves)
    columns = max(move.start + move.width for move in moves)
    parts = [_text(10, 22, "Stage 2, time to the right: three buffers are in use at any moment", weight="bold")]
    for row in range(rows):
        parts.append(_text(10, 58 + row * (height + gap), f"bucket {row}"))
    for move in moves:
        x, y = left + move.start * width, 36 + move.bucket * (height + gap)
        parts.append(_box(x, y, move.width * width - 8, height, move.colour, move.label))
    top = 36 + rows * (height + gap) + 24
    parts.append(_text(10, top, "One bucket on three ranks: the colour is the owner", weight="bold"))
    titles = ("own gradients", "sums at owners", "stepped by owners", "new parameters")
    for column, title in enumerate(titles):
        x = left + column * 235
        parts.append(_text(x, top + 26, title))
        for rank in range(3):
            y = top + 36 + rank * (height + gap)
            if column == 0:
                parts.append(_text(10, y + 23, f"rank {rank}"))
            for part in range(3):
                is_there = column in (0, 3) or part == rank
                parts.append(_part(x + part * 60, y, 60, height, _RANKS[part], is_there, column))
        if column < 3:
            parts.append(_text(x + 188, top + 36 + height + gap + 23, "→", size=24))
    arrows = ("reduce", "local step", "sync")
    bottom = top + 36 + 3 * (height + gap) + 12
    for column, arrow in enumerate(arrows):
        parts.append(_text(left + column * 235 + 176, bottom, arrow))
    return _svg(max(left + columns * width, left + 4 * 235) + 10, bottom + 16, parts)


def _box(x: int, y: int, width: int, height: int, colour: str, label: str) -> str:
    middle = x + width // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" fill-opacity="0.18" '
        f'stroke="{colour}" stroke-width="2"/>'
        f'<text x="{middle}" y="{y + height // 2 + 5}" font-size="13" text-anchor="middle">{label}</text>'
    )


def _part(x: int, y: int, width: int, height: int, colour: str, is_there: bool, column: int) -> str:
    opacity = (0.25, 0.5, 0.8, 0.8)[column] if is_there else 0
    dash = "" if is_there else ' stroke-dasharray="3 3"'
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" fill-opacity="{opacity}" '
        f'stroke="{colour}"{dash}/>'
    )


def _text(x: int, y: int, text: str, colour: str = "black", weight: str = "normal", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}">{text}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def pictures() -> dict[Path, str]:
    """Both pictures, by their files."""
    return {
        PACKAGES: draw_packages(floors((DOCS / "design.md").read_text())),
        BUCKET: draw_bucket(way(3)),
    }


if __name__ == "__main__":
    for target, picture in pictures().items():
        target.write_text(picture)
