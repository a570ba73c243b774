import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddp_zero
from ddp_zero import public
from tests import HANG

PACKAGE = Path(ddp_zero.__file__).parent


@pytest.mark.parametrize("has_numpy", [True, False])
def test_importing_ddp_zero_warns_of_nothing_and_loads_no_heavy_module(has_numpy: bool) -> None:
    heavy = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.pipelining"]
    before = "import torch" if has_numpy else "sys.modules['numpy'] = None"
    code = f"import sys; {before}; old = set(sys.modules); from ddp_zero import wrap; "
    code += f"print({{*{heavy}}} & (set(sys.modules) - old))"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=HANG, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "set()", "")


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_all_lists_exactly_the_public_names() -> None:
    found = [
        name for name, value in vars(public).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert sorted(found) == sorted(ddp_zero.__all__)
    assert set(found) <= set(dir(ddp_zero))
    assert all(getattr(ddp_zero, name) is getattr(public, name) for name in found)
    with pytest.raises(AttributeError, match="module 'ddp_zero' has no attribute 'nothing'"):
        ddp_zero.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert len(set(ddp_zero.__all__)) == len(ddp_zero.__all__)


def test_a_file_of_tests_that_needs_another_extra_is_skipped_without_it() -> None:
    """Where README's extra is installed alone, these files are collected without an error."""
    # hidden: all else that is installed here
    held = {"pip", "ddp-zero"} | _required_by("ddp-zero[test]")
    hidden = [name for name, by in packages_distributions().items() if held.isdisjoint(map(canonicalize_name, by))]
    code = f"import sys, pytest; sys.modules.update(dict.fromkeys({hidden})); "
    code += "sys.exit(pytest.main(['--collect-only', '-qq', *sys.argv[1:]]))"
    root = PACKAGE.parent
    skipping = [str(file) for file in root.glob("tests/*/**/test_*.py") if "importorskip" in file.read_text("utf-8")]
    command = [sys.executable, "-c", code, "tests/frameworks", "tests/extras", "tests/deepspeed", *sorted(skipping)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it reads what is hidden
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=HANG, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _required_by(given: str) -> set[str]:
    """Returns the names of the distributions that one with these extras needs here, directly or not."""
    found: set[str] = set()
    asked = [Requirement(given)]
    while asked:
        distribution = asked.pop()
        try:
            needs = [Requirement(line) for line in requires(distribution.name) or ()]
        except PackageNotFoundError:  # for another platform
            continue
        for extra in distribution.extras or {""}:
            met = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
            asked += [need for need in met if canonicalize_name(need.name) not in found]
            found |= {canonicalize_name(need.name) for need in met}
    return found
