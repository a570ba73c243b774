import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ddp_zero
from ddp_zero import public
from tests import HANG

PACKAGE = Path(ddp_zero.__file__).parent


@pytest.mark.parametrize("has_numpy", [True, False])
def test_importing_it_is_silent_even_with_warnings_as_errors_and_loads_nothing_that_few_need(has_numpy: bool) -> None:
    heavy = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.pipelining"]
    before = "import torch" if has_numpy else "sys.modules['numpy'] = None"
    code = f"import sys; {before}; old = set(sys.modules); from ddp_zero import wrap; "
    code += f"print({{*{heavy}}} & (set(sys.modules) - old))"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=HANG, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "set()", "")


def test_it_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_all_is_exactly_what_is_public() -> None:
    found = [
        name for name, value in vars(public).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert sorted(found) == sorted(ddp_zero.__all__)
    assert set(found) <= set(dir(ddp_zero))
    assert all(getattr(ddp_zero, name) is getattr(public, name) for name in found)
    with pytest.raises(AttributeError, match="module 'ddp_zero' has no attribute 'nothing'"):
        ddp_zero.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert len(set(ddp_zero.__all__)) == len(ddp_zero.__all__)
