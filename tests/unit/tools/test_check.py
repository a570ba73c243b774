import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_zero
from ddp_zero.__main__ import main
from ddp_zero.core.engine.probes import PROBES, NotTried, Probe
from ddp_zero.tools import check
from tests.multiproc.example_scripts import Ended, run_script
from tests.versions import rows_of

ROOT = Path(__file__).parents[3]


def run(folder: Path, code: str, *arguments: str) -> Ended:
    script = folder / "script.py"
    script.write_text(code)
    return run_script(script, arguments, None, folder=ROOT, warnings_are_errors=True)


def test_check_prints_the_same_findings_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert found["works"] is True
    assert found["problem"] is None
    assert found["versions"]["ddp_zero"] == ddp_zero.__version__
    for finding in found["findings"]:
        assert f"{finding['name']}: {finding['means']}" in text
    assert "gloo yes" in text
    assert re.search(r"no +nccl on cuda", text)
    assert text.endswith("ddp_zero can work here.\n")


def test_everything_that_the_library_relies_on_is_there_in_the_torch_that_it_is_tested_with() -> None:
    found = [probe.run() for probe in PROBES]
    assert {one.name: (one.works, one.detail) for one in found if not one.works} == {}
    assert not dist.is_initialized()


def test_as_a_program_it_names_frameworks_without_importing_them_and_leaves_no_process_group(tmp_path: Path) -> None:
    for name in check.FRAMEWORKS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
        (tmp_path / f"{name}-7.8.dist-info").mkdir()
        (tmp_path / f"{name}-7.8.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.8\n"
        )
    ended = run(
        tmp_path,
        "import runpy, sys, torch.distributed as dist\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['ddp_zero', '--json']\n"
        "try: runpy.run_module('ddp_zero', run_name='__main__')\n"
        "except SystemExit as error: code = error.code\n"
        "assert (code, dist.is_initialized()) == (0, False), code\n",
    )
    assert (ended.errors, ended.code) == ("", 0)
    versions = json.loads(ended.output)["versions"]
    assert versions["ddp_zero"] == ddp_zero.__version__
    assert [versions[name] for name in check.FRAMEWORKS] == ["7.8", "7.8", "7.8"]


def test_without_a_backend_it_says_why_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "mpi")
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is False
    assert "neither" in found["problem"]
    assert not any(one["is_here"] for one in found["combinations"])
    assert main(["check"]) == 1
    assert "cannot work here. This PyTorch is built with neither Gloo nor NCCL" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_backend_is_enough(backend: str) -> None:
    assert check.problem_of({"gloo": False, "nccl": False, backend: True}) is None


_IMPORTS_IN_CHANGED_PYTORCHES = """
import os, sys, warnings
import torch, torch.distributed
warnings.simplefilter("ignore", DeprecationWarning)  # where threads run as a process is forked
for change in sys.argv[1:]:
    if os.fork() == 0:
        exec(change)
        for name in [name for name in sys.modules if name.startswith("ddp_zero")]:
            del sys.modules[name]
        try:
            from ddp_zero import wrap
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_importing_under_a_pytorch_that_lacks_a_name_is_refused_with_the_name(tmp_path: Path) -> None:
    got = "Expected a PyTorch that has what ddp_zero relies on, got .*"
    lacks = {
        "torch.distributed.is_available = lambda: False": "ddp_zero needs a PyTorch with torch.distributed",
        "del torch._C._dynamo.eval_frame._FrameAction": rf"{got}has no attribute '_FrameAction'\. Install",
    }
    ended = run(tmp_path, _IMPORTS_IN_CHANGED_PYTORCHES, *lacks)
    assert ended.errors == ""
    for told, lack in zip(ended.output.splitlines(), lacks.values(), strict=True):
        assert re.match(lack, told), told


_BUILDS_IN_CHANGED_PYTORCHES = """
import os, sys, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_zero import ZeroRedundancyOptimizer
from ddp_zero.core.ddp.known_models import KnownModels
warnings.simplefilter("ignore", DeprecationWarning)
for change in sys.argv[1:]:
    if os.fork() == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DDP(torch.nn.Linear(1, 1))
        build = lambda **options: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)
        exec(change)
        ways = [build, lambda: KnownModels().know([model]), lambda: build(overlap_with_ddp=True)]
        for way in [*ways, lambda: build(accumulate_in_fp32=True), lambda: build(stage=2)]:
            try:
                way()
                print("-", flush=True)
            except RuntimeError as error:
                print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_an_optimizer_in_a_mode_whose_names_pytorch_lacks_is_refused_when_built(tmp_path: Path) -> None:
    reads, hooks, partitions = ["-", "no", "no", "no", "no"], ["-", "-", "no", "no", "no"], ["-", "-", "-", "-", "no"]
    refused_without = {
        "DDP's reducer has no _check_reducer_finalized": ("torch.distributed.Reducer._check_reducer_finalized", reads),
        "DDP has no _get_ddp_logging_data": ("DDP._get_ddp_logging_data", reads),
        "DDP's reducer has no _rebuild_buckets": ("torch.distributed.Reducer._rebuild_buckets", hooks),
        "torch._C has no _current_graph_task_id": ("torch._C._current_graph_task_id", reads),
        "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", hooks),
        "DDP's reducer has no _reset_state": ("torch.distributed.Reducer._reset_state", partitions),
    }
    ended = run(tmp_path, _BUILDS_IN_CHANGED_PYTORCHES, *(f"del {name}" for name, _ in refused_without.values()))
    assert ended.errors == ""
    told = iter(ended.output.splitlines())
    for lack, (name, expected) in refused_without.items():
        for way, outcome in enumerate(expected):
            found = next(told)
            assert (found == "-") == (outcome == "-"), (name, way, found)
            if outcome != "-":
                assert re.fullmatch(rf"Expected a PyTorch with all that .*{lack}.* \[ZERO-910\]", found), found


def failing(error: Exception) -> Probe:
    def look() -> str:
        raise error

    return Probe("it", look, "fine", "use something else")


def test_a_probe_that_fails_is_a_finding_and_one_that_cannot_be_made_is_not() -> None:
    broken = failing(AttributeError("no such name")).run()
    unknown = failing(NotTried("no fake group")).run()
    assert (broken.works, broken.means, broken.detail) == (False, "use something else", "AttributeError: no such name")
    assert (unknown.works, unknown.detail) == (None, "no fake group")
    assert "use something else" not in unknown.means


def test_without_the_fake_process_group_probes_of_the_reducer_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    works = {probe.name: probe.run().works for probe in PROBES}
    assert set(works.values()) == {True, None}
    assert {name for name, found in works.items() if not found} == {probe.name for probe in PROBES[:5]}
    assert [probe.name for probe in PROBES[4:6]] == ["native collectives", "returning freed memory"]


def copies_gradients(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{**options, "gradient_as_bucket_view": False})


def refuses(*_: object, **__: object) -> None:
    raise OSError("refused")


def does_nothing(*_: object, **__: object) -> None:
    pass


HERE = "ddp_zero.core.engine.probes."
BREAKS = {
    "callbacks at the end of backward": (f"{HERE}after_the_reducer", lambda callback: callback()),
    "gradients as views of buckets": (f"{HERE}DistributedDataParallel", copies_gradients),
    "a reducer in the place of DDP's": (f"{HERE}put_reducer", does_nothing),
    "rebuilding buckets on request": (f"{HERE}rebuild_buckets", lambda ddp: []),
    "native collectives": (f"{HERE}all_gather_native", refuses),
    "returning freed memory": (f"{HERE}find_trim", does_nothing),
    "asking another rank": ("ddp_zero.core.comm.requests.dist.ProcessGroupGloo", refuses),
    "findings of torch.amp.GradScaler": (f"{HERE}calling_scaler", does_nothing),
    "a group over several mesh dimensions": (f"{HERE}DeviceMesh", object()),
    "runs of pipeline schedules": (
        "torch.distributed.pipelining.schedules.PipelineScheduleMulti.step",
        lambda self: self._step_microbatches(),
    ),
}
"""For each probe, what to replace so that it finds the opposite."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_probe_of_something_broken_says_that_it_does_not_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (probe,) = (one for one in PROBES if one.name == name)
    assert probe.run().works is True
    monkeypatch.setattr(*BREAKS[name])
    found = probe.run()
    assert (found.works, found.means) == (False, probe.if_not)
    assert found.detail


def test_there_is_a_breakage_for_every_probe() -> None:
    assert set(BREAKS) == {probe.name for probe in PROBES}


def test_an_accelerator_is_counted_and_makes_its_combinations_ones_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    found = check.report("1", ())
    assert found["devices"] == {"cpu": 1, "cuda": 2}
    assert [(one["backend"], one["device"], one["was_run"]) for one in found["combinations"] if one["is_here"]] == [
        ("gloo", "cpu", True),
        ("gloo", "cuda", True),
        ("nccl", "cuda", False),
    ]


def test_versions_are_those_of_the_tests_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "RUN", {"torch": ("2.8.0", "2.13.0"), "Python": ("3.11",), "system": ("Linux",)})
    same: dict[str, str | None] = {"torch": "2.13.0+cpu", "Python": "3.11.4", "system": "Linux 6.1 x86_64"}
    assert check.differences(same) == []
    other: dict[str, str | None] = {"torch": "2.13.01", "Python": "3.1", "system": "Darwin 23 arm64"}
    assert check.differences(other) == [
        "torch 2.13.01 (run: 2.8.0, 2.13.0)",
        "Python 3.1 (run: 3.11)",
        "system Darwin 23 arm64 (run: Linux)",
    ]


def test_an_absent_framework_has_no_version() -> None:
    assert check.version_of("torch") is not None
    assert check.version_of("a-distribution-that-is-not-there") is None


def test_limits_status_and_pyproject_name_the_versions_that_were_run() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert "run with torch 2.13.0 (CPU build) and Python 3.11 only, all with Gloo, on Linux" in limits
    rows = rows_of((ROOT / "docs" / "status.md").read_text())
    assert all(row.works for row in rows), "list what does not work in docs/limits.md, not as run"
    assert {row.torch.partition("+")[0] for row in rows} | {"2.13.0"} == set(check.RUN["torch"])
    assert {".".join(row.python.split(".")[:2]) for row in rows} | {"3.11"} == set(check.RUN["Python"])
    project = (ROOT / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={check.RUN["torch"][0]}"]' in project
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert tuple(classifiers) == check.RUN["Python"]
    was_run = {(backend, device) for backend, device, run in check.COMBINATIONS if run}
    assert was_run == {("gloo", "cpu"), ("gloo", "cuda")}
    assert "Several GPUs have not been run" in limits
