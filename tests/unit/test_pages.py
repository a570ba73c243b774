"""Pages name only files and modules of the library that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddp_zero"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"))


def files_named(text: str) -> set[str]:
    """Paths such as ``core/comm/exchange`` and modules such as ``ddp_zero.core.comm``, as paths in the package."""
    paths = re.findall(rf"(?<![\w/.-])(?:ddp_zero/)?((?:{ROOMS})/[a-z_0-9/]+)", text)
    modules = re.findall(r"\bddp_zero\.((?:core|tools)(?:\.[a-z_0-9]+)+)", text)
    return {path.rstrip("/") for path in paths} | {module.replace(".", "/") for module in modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_pages_name_files_that_exist(page: Path) -> None:
    named = files_named(page.read_text())
    assert {one for one in named if not (PACKAGE / one).exists() and not (PACKAGE / f"{one}.py").exists()} == set()


def test_paths_and_modules_are_found() -> None:
    text = "`core/comm/ring.py`, `ddp_zero/core/plan/`, `ddp_zero.tools.monitor`, tests/unit/core/comm/test_x.py"
    assert files_named(text) == {"core/comm/ring", "core/plan", "tools/monitor"}
