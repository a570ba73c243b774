"""Draws docs/images/parallel.svg: the ranks that reduce and shard each kind of parameter.

python -m benchmarks.draw_parallel
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "images" / "parallel.svg"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5500", "#777777")
_CELL, _HEIGHT, _LEFT, _TOP = 78, 34, 170, 62


@dataclass(frozen=True)
class Row:
    """Parameters of one kind.

    Attributes:
        label: their name.
        groups: the ranks that hold the same of them; each reduces and shards among itself.
    """

    label: str
    groups: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Panel:
    """A job, with the parameters of its ranks."""

    title: str
    rows: Sequence[Row]


PANELS = (
    Panel(
        "4 x 2: data x expert, eight ranks",
        [
            Row("dense", [range(8)]),
            Row("experts 0, 1", [range(0, 8, 2)]),
            Row("experts 2, 3", [range(1, 8, 2)]),
        ],
    ),
    Panel(
        "2 x 2 x 2: data x pipeline x tensor, eight ranks",
        [
            Row("embedding (tied)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
            Row("stage 0, cut", [[0, 4], [1, 5]]),
            Row("stage 0, replicated", [[0, 4], [1, 5]]),
            Row("stage 1, cut", [[2, 6], [3, 7]]),
            Row("stage 1, replicated", [[2, 6], [3, 7]]),
        ],
    ),
)
_TWICE = {"stage 0, replicated", "stage 1, replicated", "embedding (tied)"}
"""LocalParameter by two groups alike: the second adds nothing to norms."""


def draw(panels: Sequence[Panel]) -> str:
    """The picture as SVG: a row of boxes per kind of parameter, a column per rank, a colour per group.

    The filled part of a box is the rank's shard. A group whose parameters count in norms elsewhere has dashed boxes.
    """
    parts: list[str] = []
    top = 0
    for panel in panels:
        parts.append(_text(8, top + 22, panel.title, "bold"))
        for rank in range(8):
            parts.append(_text(_LEFT + rank * _CELL + 18, top + 48, f"rank {rank}"))
        colour = 0
        for number, row in enumerate(panel.rows):
            y = top + _TOP + number * (_HEIGHT + 10)
            parts.append(_text(8, y + 22, row.label))
            for order, group in enumerate(row.groups):
                dashed = order > 0 and row.label in _TWICE
                for position, rank in enumerate(group):
                    parts.append(_box(rank, y, position, len(group), _COLOURS[colour % len(_COLOURS)], dashed))
                colour += 1
        top += _TOP + len(panel.rows) * (_HEIGHT + 10) + 14
    notes = (
        "Boxes of one colour in a row: the same parameters. Their ranks average gradients and shard state among "
        "themselves; the filled part is owned.",
        "Dashed: the same values as the group before; they do not count in norms again.",
    )
    for note in notes:
        parts.append(_text(8, top + 16, note))
        top += 20
    width = _LEFT + 8 * _CELL + 40
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 12}" font-family="sans-serif">'
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def _box(rank: int, y: int, position: int, size: int, colour: str, dashed: bool) -> str:
    x, width = _LEFT + rank * _CELL, _CELL - 10
    share = width / size
    stroke = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_HEIGHT}" fill="white" stroke="{colour}" stroke-width="2"'
        f'{stroke}/><rect x="{x + position * share:.2f}" y="{y}" width="{share:.2f}" height="{_HEIGHT}" '
        f'fill="{colour}" fill-opacity="0.6"/>'
    )


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw(PANELS))
