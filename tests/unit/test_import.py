import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ddp_zero

PACKAGE = Path(ddp_zero.__file__).parent


@pytest.mark.parametrize("has_numpy", [True, False])
def test_importing_it_is_silent_even_with_warnings_as_errors(has_numpy: bool) -> None:
    hidden = "" if has_numpy else "import sys; sys.modules['numpy'] = None; "
    command = [sys.executable, "-W", "error", "-c", f"{hidden}import ddp_zero"]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_importing_it_does_not_load_what_few_need() -> None:
    heavy = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.pipelining"]
    code = f"import sys, torch; old = set(sys.modules); import ddp_zero; print({{*{heavy}}} & (set(sys.modules) - old))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout.strip() == "set()", result


def test_it_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_all_is_exactly_what_is_public() -> None:
    public = [
        name for name, value in vars(ddp_zero).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert sorted(public) == sorted(ddp_zero.__all__)
    assert len(set(ddp_zero.__all__)) == len(ddp_zero.__all__)
