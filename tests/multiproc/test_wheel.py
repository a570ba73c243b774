"""The wheel: what is in it, and that it works where there is no checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import ddp_zero
from ddp_zero.tools.check import RUN

pytest.importorskip("hatchling", reason="the wheel is built by hatchling, which the extra [test] installs")

ROOT = Path(__file__).parents[2]

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_zero
from ddp_zero.tools.check import RUN

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2), gradient_as_bucket_view=True)
opt = ddp_zero.shard_optimizer(model, torch.optim.AdamW, stage=2, lr=0.1)
plain = torch.nn.Linear(4, 2)
plain.load_state_dict(model.module.state_dict())
before = plain.weight.detach().clone()
reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
for x in torch.randn(3, 8, 4):
    for net, optimizer in ((model, opt), (plain, reference)):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
assert torch.equal(model.module.weight, plain.weight)
assert not torch.equal(plain.weight, before)
print(ddp_zero.__file__)
del model, opt
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; without the variables that would lead Python to the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    about = f"ddp_zero-{ddp_zero.__version__}.dist-info"
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ddp_zero").rglob("*.py")}
    with ZipFile(wheel) as archive:
        names, fields = set(archive.namelist()), message_from_string(archive.read(f"{about}/METADATA").decode())
    its_own = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == package | {"ddp_zero/py.typed", "ddp_zero/troubleshooting.md"} | its_own
    assert fields["License-Expression"] == "BSD-3-Clause"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert set(fields.get_all("Provides-Extra", [])) >= {"transformers", "accelerate", "lightning", "plot"}
    assert [need for need in fields.get_all("Requires-Dist", []) if "extra" not in need] == [
        f"torch>={RUN['torch'][0]}"
    ]


@pytest.mark.nightly
def test_it_reports_and_trains_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows the installed torch as a folder at the end of its path."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = {str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)))  # their own .pth files are not followed

    found = json.loads(run(python, "-m", "ddp_zero", "--json", cwd=tmp_path))
    assert found["works"] is True
    assert run(home / "bin" / "ddp-zero", "--version", cwd=tmp_path) == f"ddp_zero {ddp_zero.__version__}\n"
    assert found["versions"]["ddp_zero"] == ddp_zero.__version__
    assert [one["name"] for one in found["findings"] if not one["works"]] == []

    (tmp_path / "train.py").write_text(TRAIN)
    where = run(python, "train.py", tmp_path / "store", cwd=tmp_path).strip()
    assert Path(where) == packages / "ddp_zero" / "__init__.py"
