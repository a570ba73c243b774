"""All that several ranks on one GPU can show, within 10 minutes: ``python -m tests.gpu``.

Each part is given so many seconds and does what it can in them. Every line says what was run and what came of it; the
facts for docs/accelerators.md stand at the end. ``--device sim`` runs all of it on the simulated accelerator, where it
has a counterpart there, so that the command is known to run where there is no GPU. ``--scale`` makes all parts longer.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch

from tests.accelerator import simulation
from tests.gpu.modes import faults, modes_of

Result = tuple[str, list[str]]
"""What was run, in figures, and what is wrong."""
_LAST_CASE_SECONDS = 60.0
"""For a fuzzer's start, and for the case that it is in when its time is over."""


@dataclass(frozen=True)
class Part:
    """A part of the whole.

    Attributes:
        name: in the report.
        seconds: that it may take.
        run: given the seconds, what came of it.
    """

    name: str
    seconds: float
    run: Callable[[float], Result]


def _modes(backend: str, ranks: int, has_beside: bool, seconds: float) -> Result:
    names = [mode.name for mode in modes_of(ranks) if not (has_beside and mode.joins)]
    done, found = faults(backend, ranks, names, has_beside, seconds)
    return f"{done} of {len(names)} modes, on time and late", found


def _command(arguments: list[str], seconds: float, shown: str) -> Result:
    """A command of its own; its lines that match are shown."""
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        return "; ".join(_matching(text, shown)), [f"{' '.join(arguments)} has not ended in {seconds:.0f} s"]
    wrong = [f"{' '.join(arguments)}: exit code {done.returncode}", *(done.stdout + done.stderr).splitlines()[-12:]]
    return "; ".join(_matching(done.stdout, shown)), wrong if done.returncode else []


def _matching(text: str, shown: str) -> list[str]:
    return [line.strip("= ") for line in text.splitlines() if re.search(shown, line)]


def _fuzz(kind: list[str], device: str, ranks: int, seconds: float) -> Result:
    limit = ["--device", device, "--ranks", str(ranks), "--cases", "100000", "--seconds", f"{0.6 * seconds:.0f}"]
    shown = r"^passed|^refused|^differences|^hangs|^failed|cases in|--only"
    return _command(["tests.fuzz", *kind, *limit], seconds + _LAST_CASE_SECONDS, shown)


def _frameworks(device: str, ranks: int, seconds: float) -> Result:
    return _command(["tests.gpu.frameworks", str(ranks), device], seconds, r"stage \d: |Error: ")


def parts(device: str) -> Iterator[Part]:
    """All of them, the surest first."""
    backend = "nccl" if device == "cuda" else "simccl"
    yield Part("modes, 2 ranks", 110, partial(_modes, backend, 2, False))
    yield Part("one rank alone, 2 ranks", 70, partial(_modes, backend, 2, True))
    yield Part("modes and one rank alone, 3 ranks", 60, partial(_modes, backend, 3, True))
    yield Part("modes and one rank alone, 4 ranks", 70, partial(_modes, backend, 4, True))
    if device == "cuda":
        files = ["tests/gpu/test_cuda.py", "tests/gpu/test_offload.py"]
        yield Part("other tests", 110, partial(_command, ["pytest", "-q", *files], shown=r"passed|failed"))
    yield Part("frameworks, 2 ranks", 70, partial(_frameworks, device, 2))
    model = ["--model", "launch-bound", "--ranks", "1", "--rounds", "1", "--steps", "10", "--device", device]
    chosen = ["--modes", "stage 2, interleaved", "--modes", "Python hook", "--results", "/tmp"]
    measured = partial(_command, ["benchmarks.gpu", *model, *chosen], shown=r"^\| (DDP|ddp_zero)")
    yield Part("a model bound by launches", 40 if device == "cuda" else 200, measured)  # a simulated launch costs more
    yield Part("loops", 35, partial(_fuzz, ["--loops"], device, 2))
    yield Part("programs", 35, partial(_fuzz, [], device, 2))


def facts(device: str) -> str:
    """For the page."""
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    where = "simulated accelerator"
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"{date.today()}, commit {commit.stdout.strip()}, {where}, torch {torch.__version__}, `python -m tests.gpu`"


def main() -> int:
    """The command; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="times the seconds of each part")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose names have it")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("Expected a GPU, got none that torch can use. --device sim runs on a simulated GPU.")
    if options.device == "sim":
        simulation.compiled()
    lines, is_wrong = list[str](), False
    for part in parts(options.device):
        if options.only not in part.name:
            continue
        started = time.monotonic()
        try:
            shown, wrong = part.run(options.scale * part.seconds)
        except AssertionError as error:  # a rank has failed, or has not ended
            shown, wrong = "", str(error).splitlines()[-12:]
        is_wrong = is_wrong or bool(wrong)
        lines.append(f"{part.name}: {shown}; {'nothing wrong' if not wrong else f'{len(wrong)} lines of faults'}")
        print(f"{lines[-1]} ({time.monotonic() - started:.0f} s)", *wrong[:20], sep="\n  ", flush=True)
    print("", facts(options.device), *lines, sep="\n", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
