"""``python -m tests.versions 2.8.0 2.15.0``: the core of the tests under other versions of torch and of Python.

With ``--wheel FILE`` the smoke tests run on that wheel instead, in a copy of the checkout without the package.

Each version gets an environment of its own, with what its package index offers for it: outside of a CPU index that is a
CUDA build, 5 GB and a minute or two. The environment is removed when its tests have ended. ``--write`` records outcomes
and the date in docs/status.md.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests.features import STATUS, VERSIONS

ROOT = Path(__file__).parent.parent
NEEDS = ("pytest>=8", "hypothesis>=6.100", "safetensors>=0.5", "hatchling>=1.27", "numpy")

_HERE = "tests/multiproc/test_"
CORE = (
    _HERE + "ddp_options.py",
    _HERE + "parity.py::test_every_optimizer_equals_ddp_with_the_plain_one[2]",
    _HERE + "overlap_parity.py::test_overlap_parity[stage 1, split, interleaved-2 ranks]",
    _HERE + "overlap_parity.py::test_overlap_parity[stage 2, split, interleaved-2 ranks]",
    _HERE + "overlap.py::test_overlap[compiled-2]",
    *[
        _HERE + f"stage2.py::test_stage_2[{name}-2]"
        for name in (
            *("accumulated_passes_equal_the_sum_of_averages", "three_dtypes_in_one_model_equal_ddp"),
            "local_passes_between_backward_and_step_leave_averages_as_ddp_does",
            *("clip_grad_norm_equals_ddp_for_all_norms", "the_second_step_is_taken_inside_backward"),
        )
    ],
    _HERE + "several_optimizers.py::test_several_optimizers[every_mode_equals_two_plain_optimizers-2]",
    _HERE + "unused.py::test_unused[a_step_inside_backward_leaves_out_what_no_rank_has_used-2]",
    _HERE + "join.py::test_join_with_ddp_equals_the_plain_optimizer[0-4]",
    *[
        _HERE + f"checkpoint.py::test_checkpoint[{name}-2]"
        for name in (
            "masters_and_loss_scale_come_back",
            "checkpoints_are_read_by_torchs_tools",
            "a_checkpoint_of_torch_distributed_checkpoint_resumes_bit_for_bit",
        )
    ],
    _HERE + "elements.py::test_elements[late_syncs_and_waiting_steps_equal_ddp-2]",
    _HERE + "elements.py::test_elements[join_with_uneven_inputs_equals_ddp-2]",
    _HERE + "rings.py::test_rings[every_mode_equals_ddp_with_the_plain_optimizer-2]",
    _HERE + "sync_forward.py::test_sync_forward[every_use_of_a_parameter_in_flight_waits_for_it-2]",
)
"""What is run: each package of the library, and whatever stands on names of torch that are private or new."""


@dataclass(frozen=True)
class Row:
    """What was found under one version.

    Attributes:
        torch: its version, with that of its build.
        python: its version.
        passed: number of tests.
        failed: number of tests.
        skipped: number of tests, for what this version does not have.
        on: the date.
    """

    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    on: str

    @property
    def works(self) -> bool:
        """Whether nothing failed, and something passed."""
        return self.failed == 0 < self.passed

    def __str__(self) -> str:
        counts = f"{self.passed} | {self.failed} | {self.skipped}"
        return f"| {self.torch} | {self.python} | {'yes' if self.works else 'no'} | {counts} | {self.on} |"


def rows_of(page: str) -> list[Row]:
    """The rows of the table in docs/status.md."""
    pattern = r"^\| ([0-9]\S*) \| ([0-9.]+) \| (?:yes|no) \| (\d+) \| (\d+) \| (\d+) \| ([0-9-]+) \|$"
    found = re.findall(pattern, page, re.MULTILINE)
    return [Row(torch, python, int(p), int(f), int(s), on) for torch, python, p, f, s, on in found]


def _order(row: Row) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", f"{row.torch.partition('+')[0]}.{row.python}")]


def render(page: str, new: Sequence[Row]) -> str:
    """The page with rows added, or put in the place of earlier rows of the same versions."""
    kept = {(row.torch, row.python): row for row in [*rows_of(page), *new]}
    lines = "".join(f"{row}\n" for row in sorted(kept.values(), key=_order))
    before, _, present = page.partition(VERSIONS)
    return before + VERSIONS + _HEADER + lines + "".join(present.partition("\n## ")[1:])  # and the sections after it


_HEADER = """
`python -m tests.versions VERSION ...` runs the core of the tests under another torch, in an environment of its own;
`--python` takes another interpreter, `--write` writes this table. *skipped*: features that this torch does not have.

| torch | Python | works | passed | failed | skipped | on |
| --- | --- | --- | --- | --- | --- | --- |
"""


def without_package(folder: Path) -> Path:
    """A copy of the checkout in which ``import ddp_zero`` finds what is installed."""
    copy = folder / "checkout"
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", "ddp_zero")
    return Path(shutil.copytree(ROOT, copy, ignore=left_out, dirs_exist_ok=True))


def run(version: str, interpreter: str, folder: Path, wheel: Path | None = None) -> Row:
    """Build an environment for a version of torch, run the tests in it, and remove it.

    Args:
        version: of torch.
        interpreter: of Python.
        folder: where the environment is built, and where the output stays.
        wheel: of this library, whose smoke tests are run; None: the core of the tests, on the checkout.

    Raises:
        subprocess.CalledProcessError: if the environment cannot be built, or the library not be imported in it.
    """
    home = folder / f"torch-{version}"
    python = home / "bin" / "python"
    checkout, installed, tests = ROOT, list(NEEDS), list(CORE)
    if wheel is not None:
        checkout, installed, tests = without_package(folder), [*NEEDS, str(wheel)], ["-m", "smoke"]
    try:
        if not python.exists():
            _call(interpreter, "-m", "venv", home, cwd=checkout)
        _call(python, "-m", "pip", "install", "-q", "--no-cache-dir", f"torch=={version}", *installed, cwd=checkout)
        said = _call(python, "-m", "ddp_zero", "--json", cwd=checkout)
        found = json.loads(said[said.index("{") :])  # Gloo of torch 2.8 tells of its peers on stdout, before
        for one in found["findings"]:
            if not one["works"]:
                print(f"{version}: {one['name']}: {one['means']} [{one['detail']}]", flush=True)
        report, log = folder / f"{version}.xml", folder / f"{version}.log"
        command: list[str | Path] = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--junitxml",
            report,
            *tests,
        ]
        with log.open("w") as output:
            ended = subprocess.run(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT, check=False)
        if ended.returncode:
            print(log.read_text()[-20_000:], flush=True)
        counts = dict(next(ElementTree.parse(report).iter("testsuite")).items())
        failed = int(counts["failures"]) + int(counts["errors"])
        skipped = int(counts["skipped"])
        passed = int(counts["tests"]) - failed - skipped
        if not failed and ended.returncode:
            failed = 1  # pytest itself says that something is wrong
        versions = found["versions"]
        return Row(versions["torch"], versions["Python"], passed, failed, skipped, str(date.today()))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _call(*command: str | Path, cwd: Path) -> str:
    """What a command prints; what it says on stderr is shown if it fails."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stdout[-5000:], ended.stderr[-5000:], flush=True)
        ended.check_returncode()
    return ended.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the versions that are named; 0 if all work."""
    parser = ArgumentParser(prog="python -m tests.versions", description="The core of the tests under other versions.")
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.8.0")
    parser.add_argument("--python", default=sys.executable, help="the interpreter, such as python3.12")
    parser.add_argument("--folder", type=Path, help="where environments are built; needs 7 GB")
    parser.add_argument("--write", action="store_true", help="write the table in docs/status.md")
    parser.add_argument("--wheel", type=Path, help="run the smoke tests on this wheel, and write nothing")
    options = parser.parse_args(arguments)
    wheel = options.wheel.resolve(strict=True) if options.wheel else None
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row | None] = []
    for version in options.versions:
        try:
            row = run(version, options.python, folder.resolve(), wheel)
        except subprocess.CalledProcessError as error:
            print(f"torch {version}: {error}", flush=True)
            rows.append(None)
            continue
        rows.append(row)
        print(row, flush=True)
        if options.write and wheel is None:
            STATUS.write_text(render(STATUS.read_text(), [row]))
    return 0 if all(row is not None and row.works for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
