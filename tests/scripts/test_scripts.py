"""Training loops as people write them, in every mode that they can have, saved and resumed: as plain DDP, or refused.

Both lives of a plain script run first; then those of each variant, the second from the file of the first. Where the
first is refused, the second goes on from the plain script's.
"""

import pytest

from tests.multiproc.harness import Cases
from tests.scripts.checks import check
from tests.scripts.variants import IN_FRAMEWORKS, MODES, SCRIPTS

CHANGED = {
    "gpt": (2, 4),
    "diffusion": (2, 5),
    "dino": (2, 5),
    "gan": (3, 5),
    "gan whose generator overlaps": (3, 5),
    "ppo": (2, 4),
    "timm": (2, 3),
    "imagenet": (2, 3),
    "mingpt": (2, 4),
    "tutorial": (2, 3),
    "detection": (2, 3),
    "speech": (2, 4),
    "sft": (2, 2),
    "accelerate": (2, 4),
}
"""Lines that change, are added or removed, in stages 1 and 2: at most 3 and 5."""


@pytest.mark.parametrize("title", SCRIPTS)
def test_scripts(title: str) -> None:
    Cases.pool_of(2).run(check, title, timeout=300.0, group_timeout=60.0)


def test_changed_lines() -> None:
    """Prints them, beside the modes that are equal and refused: ``pytest -s``."""
    scripts = {**SCRIPTS, **IN_FRAMEWORKS}
    print("\nscript                                         lines, stages 1 and 2   equal  to last bits  refused in")
    for title, script in scripts.items():
        lines = [script.changed_lines(mode) for mode in script.simplest if mode in script.modes]
        equal = len(set(script.modes) - set(script.close) - set(script.refused))
        refused = ", ".join(mode for mode in script.modes if mode in script.refused) or "none"
        print(f"{title:46} {lines!s:24} {equal:6} {len(set(script.close) & set(script.modes)):13}  {refused}")
    found = {title: tuple(scripts[title].changed_lines(mode) for mode in scripts[title].simplest) for title in CHANGED}
    assert found == CHANGED
    assert all(in_stage_1 <= 3 and in_stage_2 <= 5 for in_stage_1, in_stage_2 in found.values())
    assert all(set(script.refused) | set(script.close) <= set(MODES) for script in scripts.values())
