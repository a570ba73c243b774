"""The example, run as its users run it."""

import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiproc.example_scripts import kill_script, run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
TINY = ("--batch-size=2", "--context=8", "--layers=1", "--width=16", "--heads=2")
TIMEOUT = 120.0


@dataclass(frozen=True)
class Row:
    """A line of the table at the end."""

    rank: int
    parameters: int
    elements: int
    state: int
    unsharded: int
    gradients: int
    peak: int


@dataclass(frozen=True)
class Finished:
    """How a run ended and what it printed."""

    code: int
    output: str
    errors: str

    def rows(self) -> list[Row]:
        lines = re.findall(r"^ *\d+(?: +[\d,]+){6}$", self.output, re.MULTILINE)
        return [Row(*(int(number.replace(",", "")) for number in line.split())) for line in lines]

    def numbers(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.output, re.MULTILINE)


@dataclass(frozen=True)
class Comparison:
    """The one run of both modes on two ranks, and where its picture would be."""

    run: Finished
    picture: Path


def train(*arguments: str, ranks: int | None = 2, warnings_are_errors: bool = False) -> Finished:
    """Run the example on forked ranks, or in one process for None."""
    ended = run_script(
        Path(EXAMPLE), [*TINY, *arguments], ranks, warnings_are_errors=warnings_are_errors, timeout=TIMEOUT
    )
    return Finished(ended.code, ended.output, ended.errors)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    picture = tmp_path_factory.mktemp("picture") / "run.png"
    plot = [f"--plot={picture}"] if find_spec("matplotlib") else []
    run = train("--steps=6", "--eval-every=3", "--compare", *plot)
    assert run.code == 0, f"{run.output}\n{run.errors}"
    return Comparison(run, picture)


def test_sharded_training_equals_ddp_with_adamw(comparison: Comparison) -> None:
    run = comparison.run
    assert run.numbers(r"^largest parameter difference to DDP \+ AdamW: (.*)$") == ["0.0"]
    ((moved, parameters),) = re.findall(r"^parameters that moved from .*: (\d+) of (\d+)$", run.output, re.MULTILINE)
    assert moved == parameters != "0"
    ddp, zero1 = (lines.split("training with ")[0] for lines in run.output.split("training with ")[1:])
    losses = re.findall(r"step +(\d+)/6  (train|validation) loss ([\d.]+)", ddp)
    assert [(step, kind) for step, kind, _ in losses if kind == "validation"] == [
        ("3", "validation"),
        ("6", "validation"),
    ]
    assert losses == re.findall(r"step +(\d+)/6  (train|validation) loss ([\d.]+)", zero1)
    assert "sample, after b'The ':\nThe " in zero1


def test_stepping_inside_backward_equals_ddp_with_adamw() -> None:
    run = train("--steps=6", "--optimizer=zero1-overlap", "--compare")
    assert run.code == 0, f"{run.output}\n{run.errors}"
    assert run.numbers(r"^largest parameter difference to DDP \+ AdamW: (.*)$") == ["0.0"]
    assert run.numbers(r"^regime: (\w+)") == ["overlapped"]
    assert "Warning" not in run.output + run.errors
    whole, _, *sharded = run.rows()
    assert sum(row.elements for row in sharded) == whole.elements
    assert all(0 < row.elements < whole.elements for row in sharded)


def test_stage_2_equals_ddp_with_adamw_and_keeps_no_gradients() -> None:
    run = train("--steps=6", "--optimizer=zero2", "--compare")
    assert run.code == 0, f"{run.output}\n{run.errors}"
    assert run.numbers(r"^largest parameter difference to DDP \+ AdamW: (.*)$") == ["0.0"]
    assert run.numbers(r"^regime: (\w+)") == ["overlapped"]
    assert run.numbers(r"^gradients: at most (\d scratch buffers) shared by .* buckets") == ["2 scratch buffers"]
    assert run.numbers(r"^gradients: .* buckets, (\d) to receive into") == ["1"]
    assert "Warning" not in run.output + run.errors
    whole, _, *sharded = run.rows()
    assert sum(row.elements for row in sharded) == whole.elements
    assert whole.gradients == 4 * whole.elements
    assert all(row.gradients <= 8 * whole.parameters for row in sharded), "an element each, to say where they are"


@pytest.mark.parametrize("mode", ["zero1-overlap", "zero2"])
def test_masters_clipping_and_accumulation_equal_those_of_torchs_own_parts(mode: str) -> None:
    recipe = ("--dtype=bf16", "--master-weights", "--clip=0.5", "--accumulate=2")
    run = train(*recipe, "--steps=6", f"--optimizer={mode}", "--compare")
    assert run.code == 0, f"{run.output}\n{run.errors}"
    assert run.numbers(r"^largest parameter difference to DDP \+ AdamW: (.*)$") == ["0.0"]
    assert run.numbers(r"^parameters that moved from their initial values: (.*)$") == ["16 of 16"]
    lines = run.numbers(r"^step +(\d+/6  train loss [\d.]+  grad norm [\d.]+, stepped)  ")
    assert len(lines) == 12
    assert lines[:6] == lines[6:], "the reference's and ours"
    assert all(float(norm) > 0.5 for norm in run.numbers(r"grad norm ([\d.]+)")), "there was something to clip"
    assert run.numbers(r"^regime: (\w+)") == ["deferred"]
    assert "Warning" not in run.output + run.errors
    whole, _, *sharded = run.rows()
    assert sum(row.elements for row in sharded) == whole.elements
    assert all(row.state == 12 * row.elements + 4 * row.parameters for row in (whole, *sharded)), "masters are state"


def test_a_step_that_is_skipped_says_so() -> None:
    run = train("--steps=60", "--clip=0.5", "--lr=1e30", "--compare", ranks=None, warnings_are_errors=True)
    assert run.code == 0, f"{run.output}\n{run.errors}"
    ddp, zero1 = (lines.split("training with ")[0] for lines in run.output.split("training with ")[1:])
    for output in (ddp, zero1):
        skipped = re.findall(r"^step +(\d+)/60  not stepped: .* not finite(?:, nor was .*)?$", output, re.MULTILINE)
        assert skipped == [str(step) for step in range(2, 61)], "each of them, where a log shows some steps"
    assert "grad norm nan, not stepped" in zero1
    assert "the gradient of module.tokens.weight is not finite" in zero1
    assert run.errors == ""


def test_masters_of_fp32_parameters_are_refused() -> None:
    run = train("--master-weights", ranks=None)
    assert run.code == 2
    assert "Expected --dtype bf16 with --master-weights, got fp32" in run.errors


def test_the_printed_table_has_the_bytes_of_each_rank(comparison: Comparison) -> None:
    rows = comparison.run.rows()
    assert [row.rank for row in rows] == [0, 1, 0, 1]
    whole, also_whole, *sharded = rows
    assert (whole.parameters, whole.elements, whole.state) == (
        also_whole.parameters,
        also_whole.elements,
        also_whole.state,
    )
    assert sum(row.parameters for row in sharded) == whole.parameters
    assert sum(row.elements for row in sharded) == whole.elements
    assert all(0 < row.elements < whole.elements for row in sharded)
    for row in rows:
        assert row.state == 8 * row.elements + 4 * row.parameters
        assert row.unsharded == whole.state
        assert row.peak > row.state


def test_the_picture_of_losses_is_written(comparison: Comparison) -> None:
    pytest.importorskip("matplotlib")
    assert comparison.picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_training_prints_no_warning(comparison: Comparison) -> None:
    assert "Warning" not in comparison.run.output + comparison.run.errors


def test_unsharded_training_runs_in_one_process() -> None:
    run = train("--steps=2", "--optimizer=ddp", ranks=None, warnings_are_errors=True)
    assert run.code == 0, f"{run.output}\n{run.errors}"
    (row,) = run.rows()
    assert row.state == row.unsharded == 8 * row.elements + 4 * row.parameters
    assert run.errors == ""


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"too short.")
    run = train(f"--text={text}", ranks=None)
    assert run.code == 2
    assert f"Expected at least 90 bytes of text for --context 8, got 10 from --text {text}." in run.errors
    assert run.output == ""


def losses(run: Finished, steps: int) -> list[tuple[str, ...]]:
    """Step, kind and value of every loss that was printed."""
    assert run.code == 0, f"{run.output}\n{run.errors}"
    return re.findall(rf"^step +(\d+)/{steps}  (train|validation) loss ([\d.]+)", run.output, re.MULTILINE)


def test_a_killed_run_ends_as_the_unbroken_one_at_any_number_of_ranks(tmp_path: Path) -> None:
    steps = 24
    arguments = (f"--steps={steps}", "--eval-every=12", "--save-every=2")
    whole = train(*arguments, f"--resume={tmp_path / 'whole'}")
    unbroken = losses(whole, steps)
    assert [loss[:2] for loss in unbroken[-2:]] == [("24", "train"), ("24", "validation")]
    assert f"no checkpoint in {tmp_path / 'whole'} yet: training from the beginning" in whole.output
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["step-00000022", "step-00000024"]

    at_two, at_one = tmp_path / "two", tmp_path / "one"
    killed = [*TINY, *arguments, f"--resume={at_two}"]
    kill_script(Path(EXAMPLE), killed, 2, once=lambda: len(list(at_two.glob("step-*"))) >= 2, timeout=TIMEOUT)
    done = max(int(path.name.removeprefix("step-")) for path in at_two.glob("step-*"))
    assert 4 <= done < steps, "it was killed in the middle"
    shutil.copytree(at_two, at_one)
    two = train(*arguments, f"--resume={at_two}")
    assert losses(two, steps) == [loss for loss in unbroken if int(loss[0]) > done]
    assert f"resumed after step {done} with 2 windows per rank" in two.output
    one = train(*arguments, f"--resume={at_one}", ranks=None)
    assert losses(one, steps)[-2:] == unbroken[-2:], "before, rounding may show"
    assert f"resumed after step {done} with 4 windows per rank" in one.output
    assert "Warning" not in two.output + two.errors + one.output + one.errors


def test_a_run_of_other_data_or_an_uneven_share_of_it_is_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    arguments = ("--steps=2", f"--resume={folder}")
    saved = train(*arguments, "--batch-size=3", "--save-every=1", ranks=None)
    assert saved.code == 0, f"{saved.output}\n{saved.errors}"
    newest = folder / "step-00000002"
    other = train(*arguments, "--batch-size=1", "--seed=1", ranks=None)
    assert (other.code, other.errors) == (
        2,
        f"train_gpt.py: error: Expected --seed 0 as in {newest}, got 1. Give what the run began with.\n",
    )
    uneven = train(*arguments)
    assert uneven.code != 0
    told = f"Expected a number of ranks that divides the 3 windows per backward pass in {newest}, got 2."
    assert uneven.errors.count(told) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--save-every=1", "Expected --resume DIR with --save-every, got none"),
        ("--resume=new --compare", "Expected --resume or --compare, got both"),
        ("--resume=new --optimizer=ddp --dtype=bf16 --master-weights", "Expected a sharded --optimizer with --resume"),
        (f"--resume={EXAMPLE}", "Expected --resume to name a folder"),
    ],
)
def test_options_that_cannot_be_resumed_with_are_refused(
    arguments: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments.split()])
    monkeypatch.syspath_prepend(Path(EXAMPLE).parent)  # as for a script
    example = runpy.run_path(EXAMPLE)
    with pytest.raises(SystemExit, match="2"):
        example["parse_options"](example["MODES"])
    assert told in capsys.readouterr().err


@pytest.mark.nightly
def test_progress_is_one_updating_line_on_a_terminal() -> None:
    terminal, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLE, *TINY, "--steps=45", "--eval-every=45"]
    process = subprocess.Popen(command, env=environment, stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
    except OSError:  # Linux says so when the other side has closed
        pass
    finally:
        assert process.wait(timeout=TIMEOUT) == 0
        os.close(terminal)
    updates = re.findall(rb"\rstep +(\d+)/45  train loss", written)
    assert [int(step) for step in updates] == list(range(1, 46)), "every step, where a log shows some"
    assert rb"train loss" not in b"".join(re.findall(rb"train loss[^\r]*\n", written)), "none of them ends its line"
