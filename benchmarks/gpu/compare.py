"""Every mode beside DDP and FSDP2 on accelerators, on a GPT of a chosen size.

    python -m benchmarks.gpu --ranks 8 --model 1b
    python -m benchmarks.gpu --ranks 1 --model 125m --dtype bf16 --timeline
    python -m benchmarks.gpu --ranks 1 --model launch-bound
    python -m benchmarks.gpu --ranks 2 --device sim --model tiny

Correctness comes first, on a small model in several buckets: each mode is compared with what it must equal (DDP
with the plain optimizer; clipped, scaled or with masters by hand where it is) after every step, once as it is and once
with everything on the library's side stream late. Up to two ranks ours must have the bits of DDP. With more, NCCL adds
in an order of its own in every kind of collective: then ours may differ by rounding, and must have the same bits late
as on time. If any mode fails, nothing is timed, and the exit code is 1.

Ranks share GPUs where there are more of them, each as a host of its own to NCCL: times say nothing then.

Then every mode trains in processes of its own, all in turns, as often as there are rounds: tokens per second of all
ranks, until the slowest device is done; the most memory allocated on a rank, from the fifth step on; in two further
steps the places at which the host waited for the device; with ``--timeline`` a trace of two more. A ratio is to DDP in
the same round. A mode that needs more memory than there is is listed as such.

``--device sim`` runs all of it on the simulated accelerator of ``tests/accelerator``, as far as that goes: times mean
nothing there, races are looked for as well.
"""

import hashlib
import json
import os
import shlex
import statistics
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contestants import FSDP, OURS, REFERENCE, modes, select
from benchmarks.gpu.models import CHECKED, MODELS
from benchmarks.gpu.rank import CHECKED_STEPS, DTYPES, OUT_OF_MEMORY, WATCHED_STEPS
from benchmarks.race.launch import run_ranks

PROGRAM = "python -m benchmarks.gpu"
RANK = ("-m", "benchmarks.gpu.rank")
RESULTS = Path(__file__).parent.parent / "results"
EXACT_RANKS = 2
"""Up to so many, a sum does not depend on the order of its terms."""
ROUNDING = {"fp32": 2e-3, "bf16": 0.1}
"""What sums in another order may change in the checked steps, in which AdamW moves a parameter by up to 0.06."""
CHECKED_BATCH = 4
MIB = 2**20

Found = dict[str, Any]


def parse_options() -> Namespace:
    """Read the command line, or leave with a message."""
    parser = ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="125m")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the parameters")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl", help="between ranks, which share GPUs if there are more"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="per rank")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--modes", action="append", default=[], metavar="TEXT", help="part of a name; repeatable")
    parser.add_argument("--check-only", action="store_true", help="leave out time and memory")
    parser.add_argument("--timeline", action="store_true", help="leave a trace of each mode")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    if min(options.ranks, options.rounds, options.steps) < 1 or options.batch_size < 2:
        parser.error("Expected at least one rank, round and step, and two samples per rank.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("Expected a GPU, got none that torch can use. --device sim runs on a simulated GPU.")
    try:
        options.names = select(modes(DTYPES[options.dtype], None), options.modes)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cuda" and options.backend == "gloo":
        say("Without FSDP2: its functional collectives end with a segmentation fault on Gloo with a GPU (torch 2.11).")
        options.names = [name for name in options.names if not name.startswith(FSDP)]
    return options


def launch(options: Namespace, job: dict[str, Any]) -> list[Any]:
    """The results of each rank."""
    whole = {"device": options.device, "backend": options.backend, "dtype": options.dtype, "late": False, **job}
    return run_ranks(whole, [()] * options.ranks, {}, RANK)


# Correctness


def check(options: Namespace) -> tuple[Found, str]:
    """Results of each mode, on time and late; and the name of the device."""
    job = {"phase": "check", "model": CHECKED, "batch_size": CHECKED_BATCH, "modes": options.names}
    on_time, late = (launch(options, {**job, "late": is_late}) for is_late in (False, True))
    found = {
        name: {
            "difference": max(on_time[0][name]["difference"], late[0][name]["difference"]),
            "same_when_late": [one[name]["digest"] for one in on_time] == [one[name]["digest"] for one in late],
            "still": max(one[name]["still"] for one in on_time + late),
            "races": [race for one in on_time + late for race in one[name]["races"]],
        }
        for name in options.names
    }
    return found, on_time[0]["device"]


def faults(name: str, shown: Found, ranks: int, dtype: str) -> list[str]:
    """Faults of our modes, and of the device's other modes only parameters that have not moved."""
    found = [f"{shown['still']} parameters have not moved"] if shown["still"] else []
    found += [f"{len(shown['races'])} races: {shown['races'][0]}"] if shown["races"] else []
    if name.startswith(OURS):
        allowed = 0.0 if ranks <= EXACT_RANKS else ROUNDING[dtype]
        if not shown["difference"] <= allowed:
            found.append(f"differs from DDP by {shown['difference']:.2g}, allowed are {allowed:.2g}")
        if not shown["same_when_late"]:
            found.append("other numbers when the side stream is late")
    return found


# Time and memory


def measure(options: Namespace) -> Found:
    """Each mode of each round; None where it has not enough memory."""
    rounds: dict[str, list[Found | None]] = {name: [] for name in options.names}
    for number in range(options.rounds):
        for name in options.names:
            say(f"round {number + 1} of {options.rounds}: {name}")
            rounds[name].append(measure_one(options, name, is_first=number == 0))
    return rounds


def measure_one(options: Namespace, name: str, is_first: bool) -> Found | None:
    """The largest results of a mode over its ranks."""
    timeline = str(options.results / f"{stem(options)}-{_file_name(name)}.json.gz")
    job = {
        "phase": "measure",
        "model": options.model,
        "batch_size": options.batch_size,
        "steps": options.steps,
        "mode": name,
        "timeline": timeline if options.timeline and is_first else None,
    }
    try:
        ranks = launch(options, job)
    except RuntimeError as error:
        if f"exit code {OUT_OF_MEMORY}" not in str(error):
            raise
        return None
    largest = {key: max(one[key] for one in ranks) for key in ("seconds", "peak_bytes", "state_bytes", "parameters")}
    return {**largest, "syncs": ranks[0]["syncs"]}


# The page


def page(options: Namespace, device: str, checked: Found, measured: Found) -> str:
    """Markdown."""
    samples = f"{options.batch_size} x {MODELS[options.model].sample} per rank"
    facts = [
        f"date: {date.today()}",
        f"command: {PROGRAM} {shlex.join(sys.argv[1:])}".rstrip(),
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {options.ranks} ranks, {device}, "
        f"{os.cpu_count()} cores, backend {'simccl' if options.device == 'sim' else options.backend}",
    ]
    if measured:
        facts.append(
            f"model: {options.model}, {parameters(measured):,} parameters, {options.dtype}, {samples}, "
            f"{options.rounds} rounds of {options.steps} steps"
        )
    sections = ["\n".join(f"- {fact}" for fact in facts), "## Correctness", correctness(options, checked)]
    if measured:
        sections += ["## Speed, memory, waits of the host", speed(options, measured)]
        sections += ["Waits of the host outside this library are named by torch's or the benchmark's file."]
    return "\n\n".join(sections) + "\n"


def parameters(measured: Found) -> int:
    """Of the model, by the reference."""
    return next((one["parameters"] for one in measured[REFERENCE] if one), 0)


def correctness(options: Namespace, checked: Found) -> str:
    """The first table."""
    rows = [
        f"| mode | difference to DDP in {CHECKED_STEPS} steps | bits when late | faults |",
        "| --- |" + " --- |" * 3,
    ]
    for name, shown in checked.items():
        wrong = "; ".join(faults(name, shown, options.ranks, options.dtype)) or "none"
        difference = f"{shown['difference']:.2g}" if shown["difference"] else "none, bit for bit"
        rows.append(f"| {name} | {difference} | {'the same' if shown['same_when_late'] else 'others'} | {wrong} |")
    return "\n".join(rows)


def speed(options: Namespace, measured: Found) -> str:
    """The second table."""
    tokens = options.batch_size * options.ranks * _context(options.model)
    rows = [
        f"| mode | tokens/s | time, ratio to {REFERENCE} | peak MiB | state MiB | waits of the host in "
        f"{WATCHED_STEPS} steps |",
        "| --- |" + " --- |" * 5,
    ]
    for name, rounds in measured.items():
        if None in rounds:
            rows.append(f"| {name} | out of memory | - | - | - | - |")
            continue
        waits = Counter(rounds[-1]["syncs"])
        cells = [
            name,
            f"{tokens / statistics.median(one['seconds'] for one in rounds):,.0f}",
            ratio(rounds, measured[REFERENCE]),
            f"{max(one['peak_bytes'] for one in rounds) / MIB:,.0f}",
            f"{rounds[-1]['state_bytes'] / MIB:,.0f}",
            ", ".join(f"{count} x {where}" for where, count in sorted(waits.items())) or "none",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def ratio(rounds: list[Found], base: list[Found | None]) -> str:
    """Median, least and most of the rounds."""
    ratios = [mine["seconds"] / other["seconds"] for mine, other in zip(rounds, base, strict=True) if other]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def _context(model: str) -> int:
    return int(MODELS[model].sample.split()[0])


def stem(options: Namespace) -> str:
    """Of the files."""
    parts = ["gpu", options.device, options.model, options.dtype, f"{options.ranks}ranks"]
    filters = hashlib.sha256(" ".join(options.modes).encode()).hexdigest()[:8]
    return "-".join([*parts, *([f"modes-{filters}"] if options.modes else [])])


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)


def say(line: str) -> None:
    """Report progress."""
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """Check, measure, print, store."""
    options = parse_options()
    options.results.mkdir(parents=True, exist_ok=True)
    say(f"correctness of {len(options.names)} modes")
    checked, device = check(options)
    is_wrong = any(faults(name, shown, options.ranks, options.dtype) for name, shown in checked.items())
    measured = {} if is_wrong or options.check_only else measure(options)
    text = page(options, device, checked, measured)
    sys.stdout.write(text)
    (options.results / f"{stem(options)}.md").write_text(text)
    content = json.dumps({"checked": checked, "measured": measured}, indent=1)
    (options.results / f"{stem(options)}.json").write_text(f"{content}\n")
    sys.exit(1 if is_wrong else 0)
