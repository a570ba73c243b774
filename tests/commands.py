"""The commands in the documentation that call the examples or the library, and where each is run.

    python -m tests.commands

runs those that take long; `tests/multiproc/test_commands.py` runs the others, and holds this table against the pages.
"""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHORT = {
    "python -m ddp_zero": "ddp_zero can work here",
    "torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --steps 10 --save-every 5 --resume runs/1": (
        "validation loss"
    ),
    "python -m ddp_zero checkpoint info runs/1": "step-00000010",
    "python -m ddp_zero checkpoint export runs/1 plain/": "",
    "python -m ddp_zero checkpoint export runs/1 theirs/ --format deepspeed-universal": "",
    "torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --optimizer zero2 --dtype bf16 --master-weights "
    "--clip 1 --accumulate 4 --steps 4 --compare": "largest parameter difference to DDP + AdamW: 0.0",
    "python -m ddp_zero estimate docs.images.models:gpt_1b --ranks 8": "392.6 | 472.7 | 7,139.2 |",
    "python -m ddp_zero estimate docs.images.models:gpt_1b --ranks 8 --dtype bfloat16 --master-weights --offload cpu "
    "--memory 16GiB": "fewest ranks at which 16GiB suffice",
    "python -m ddp_zero explain ZERO-203": "The optimizer's hook is missing",
    "python -m ddp_zero config check ds_config.json": "samples a step",
    "python -m ddp_zero config keys": "zero_optimization",
}
"""Commands that the test runs in this order in one folder, and what they print."""

LONG = {
    "torchrun --standalone --nproc-per-node=4 examples/train_moe.py --expert-ranks 2": "mixture",
    "torchrun --standalone --nproc-per-node=8 examples/train_3d.py": "on one device",
    "torchrun --standalone --nproc-per-node=2 examples/train_transformers.py": "loss",
}
"""Commands that this file runs, and what they print."""

ELSEWHERE = {
    "python examples/quickstart.py": "tests/multiproc/test_quickstart.py::"
    "test_both_trainings_learn_and_end_with_equal_parameters",
    **{
        f"torchrun --standalone --nproc-per-node=2 examples/quickstart/{file.name}": (
            "tests/multiproc/test_quickstart.py::test_each_step_of_the_quickstart_prints_the_losses_of_ddp"
        )
        for file in (ROOT / "examples" / "quickstart").glob("*.py")
    },
    "torchrun --standalone --nproc-per-node=2 examples/minimal.py": "tests/multiproc/test_readme.py::"
    "test_the_minimal_example_learns_and_continues_from_its_checkpoint",
    "torchrun --standalone --nproc-per-node=2 examples/train_gan.py --steps 60 --compare": (
        "tests/multiproc/test_train_gan.py::test_two_sharded_optimizers_equal_plain_ones"
    ),
    "python examples/train_ray.py --workers 2": (
        "tests/frameworks/test_ray.py::test_the_example_continues_with_another_number_of_workers"
    ),
    "python -m ddp_zero postmortem /shared/records": (
        "tests/multiproc/test_insight.py::test_the_records_name_the_rank_that_was_lost"
    ),
    "python -m ddp_zero launch --hostfile hosts --include node1@node2:0,2 train.py --lr 1e-3": (
        "tests/hosts/test_hosts.py::test_every_host_runs_its_ranks_and_its_lines_begin_with_its_name"
    ),
    "python -m ddp_zero launch train.py": (
        "tests/multiproc/test_launch.py::test_a_job_on_this_machine_gives_its_exit_code_and_leaves_nobody"
    ),
    "python -m ddp_zero checkpoint export --format deepspeed-universal": (
        "tests/unit/checkpoint/foreign/test_deepspeed.py::test_export_and_info_read_deepspeed_folders"
    ),
    "python -m ddp_zero checkpoint export": (
        "tests/unit/checkpoint/test_export.py::test_the_command_prints_the_files_and_their_sizes"
    ),
}
"""Commands, or beginnings of commands, that other tests run."""


def shown(text: str) -> set[str]:
    """The commands of a page in Markdown; mentions of a subcommand alone, or with a placeholder, are none."""
    spans, is_block = [], False
    outside = []
    for line in text.splitlines():
        if line.startswith("```"):
            is_block = not is_block
        elif is_block:
            spans.append(line)
        else:
            outside.append(line)
    spans += re.findall(r"`([^`]+)`", "\n".join(outside))
    parts = [part for span in spans for part in span.split("  #")[0].split("&&")]
    commands = {" ".join(part.split()).replace(".venv/bin/", "") for part in parts}
    ours = {one for one in commands if re.match(r"(torchrun|python) .*(\bexamples/|-m ddp_zero)", one)}
    return {one for one in ours if not re.fullmatch(r"python -m ddp_zero [a-z]+(| .*--help|( [a-z]+)? [A-Z]+)", one)}


def run(command: str, folder: Path) -> str:
    """Run a command in a folder, and return what it prints.

    Raises:
        AssertionError: with all that it has printed, if it fails.
    """
    program, *rest = shlex.split(command)
    start = [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else [])]
    arguments = [str(ROOT / one) if one.startswith("examples/") else one for one in rest]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*start, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=540, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def main() -> None:
    """Run the long ones, and say what each has printed last."""
    for command, expected in LONG.items():
        if "transformers" in command and find_spec("transformers") is None:
            print(f"{command}: not run, transformers is not installed")
            continue
        with TemporaryDirectory() as folder:
            output = run(command, Path(folder))
        assert expected in output, output
        print(f"{command}: {output.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
