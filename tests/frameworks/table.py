"""What works in which framework, each with the tests that show it: the source of the table in docs/frameworks.md.

``pytest tests/frameworks --write-frameworks`` writes the table from the outcomes of that run; any run that has the
frameworks fails if the page claims what it has not shown. See `tests/conftest.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
COLUMNS = ("train", "clip", "accumulate", "save", "resume", "other number of ranks")
YES, NOT_RUN = "yes", "not run"
_BEGIN, _END = "<!-- written by pytest tests/frameworks --write-frameworks -->\n", "<!-- end of the table -->"


def _row(framework: str, mode: str, file: str, case: str, suffix: str, elsewhere: str) -> tuple[str, ...]:
    """A row's framework and mode, and the pattern of the test cases for each column.

    Args:
        framework: the first cell.
        mode: the second cell.
        file: the test file, without its prefix.
        case: the case that trains, with every recipe.
        suffix: what the name of the case that saves and resumes has in addition.
        elsewhere: the parameter of the test at another number of ranks.
    """
    test = f"tests/frameworks/test_{file}.py::test_{file}"
    ranks = f"tests/frameworks/test_{file}.py::test_[a-z_]*at_another_number_of_ranks"
    other = rf"{ranks}\[sizes[01]-{elsewhere}\]"
    return (framework, mode, *[rf"{test}\[{case}-2\]"] * 3, *[rf"{test}\[{case}{suffix}-2\]"] * 2, other)


HF, ACC, PL = "transformers", "accelerate", "lightning"
ROWS = [
    _row(HF, "1, `Trainer`", HF, "stage_1_untouched", "_resumes", "stage 1, untouched"),
    _row(HF, "1, `ZeroTrainer`", HF, "zero_trainer_in_stage_1", "_resumes", "stage 1"),
    _row(HF, "2, `ZeroTrainer`", HF, "zero_trainer_in_stage_2", "_resumes", "stage 2"),
    _row(ACC, "1, `accelerator.prepare`", ACC, "stage_1_untouched", "_saves", "stage 1, untouched"),
    _row(ACC, "1, `prepare`", ACC, "stage_1", "_saves", "stage 1"),
    _row(ACC, "2, `prepare`", ACC, "stage_2", "_saves", "stage 2"),
    _row(PL, '1, `strategy="ddp"`', PL, "stage_1_in_plain_ddp", "", "stage 1, in plain ddp"),
    _row(PL, "1, `ZeroDDPStrategy`", PL, "stage_1", "_saves", "stage 1"),
    _row(PL, "2, `ZeroDDPStrategy`", PL, "stage_2", "_saves", "stage 2"),
    _row("Fabric", "1, `fabric.setup`", PL, "fabric", "", "Fabric, stage 1"),
    _row("Fabric", "2, `shard_optimizer`", PL, "fabric", "", "Fabric, stage 2"),
]


def verdict(pattern: str, outcomes: Mapping[str, str]) -> str | None:
    """What the outcomes say of a cell; None if none of its cases is known."""
    found = {outcome for case, outcome in outcomes.items() if re.fullmatch(pattern, case)}
    return None if not found else YES if found == {"passed"} else NOT_RUN


def _cells_of(page: str) -> dict[tuple[str, str, str], str]:
    rows = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in page.splitlines() if line.startswith("| ")]
    return {
        (row[0], row[1], column): word
        for row in rows
        if len(row) == len(COLUMNS) + 2
        for column, word in zip(COLUMNS, row[2:], strict=True)
    }


def _cells(outcomes: Mapping[str, str]) -> dict[tuple[str, str, str], str | None]:
    return {
        (framework, mode, column): verdict(pattern, outcomes)
        for framework, mode, *patterns in ROWS
        for column, pattern in zip(COLUMNS, patterns, strict=True)
    }


def unshown(page: str, outcomes: Mapping[str, str]) -> list[str]:
    """Cells in which the page says yes, and of which the outcomes say otherwise."""
    claims = _cells_of(page)
    return [", ".join(cell) for cell, found in _cells(outcomes).items() if found == NOT_RUN and claims.get(cell) == YES]


def render(outcomes: Mapping[str, str], page: str) -> str:
    """The page with the table as the outcomes have it; cells of which they say nothing keep what the page says."""
    claims, found = _cells_of(page), _cells(outcomes)
    lines = [f"| framework | stage | {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * (len(COLUMNS) + 2))} |"]
    for framework, mode, *_ in ROWS:
        cells = [(framework, mode, column) for column in COLUMNS]
        lines.append(f"| {framework} | {mode} | {' | '.join(found[c] or claims.get(c, NOT_RUN) for c in cells)} |")
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + "\n".join(lines) + "\n" + _END + rest.partition(_END)[2]
