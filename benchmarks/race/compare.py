"""Step time, bytes on the wire and peak memory of DDP, torch's and other sharded optimizers, and ours, in one run.

    python -m benchmarks.race
    python -m benchmarks.race --model 87m --link 1gbit --rounds 5
    python -m benchmarks.race --model many --modes DDP --modes "stage 2" --no-memory
    python -m benchmarks.race --modes clipped --modes nonfinite

All modes train the same model on the same data from the same seed, on Gloo ranks of one thread each on this machine.
They take turns: each round times some steps of every mode in a row, in a random order that is the same on all ranks,
from a barrier until the slowest rank has taken them and all of their messages have arrived. A ratio is between steps of
two modes in the same round. Parts of a step are timed alone in every round. Afterwards a few more steps of every mode
count the bytes that ranks really send (the kernel's counters, not the library's).

Memory is measured in separate processes for each mode: the kernel's high-water mark of resident memory, above resident
memory before there was a model. Freed memory goes back to the kernel at once (glibc's ``MALLOC_MMAP_THRESHOLD_`` is 1
MiB), except with ``--keep-malloc``. The formula beside it adds up the mode's parameters, the rank's own optimizer
state, its gradients and buckets, and activations. Those are the same peak of the model alone, in forward and backward
without DDP and optimizer, into gradients that stay, less parameters and gradients; they include the needs of the
libraries of matrix products and of the threads of a first backward, some 40 MiB here. In stage 2 and FSDP activations
and gradients do not peak together, as the formula assumes.

``--link`` gives every rank a network namespace behind a link of that rate, see `link`; it needs root, and Linux. With
``--nodes 2`` as well, the ranks are spread over nodes that are joined by links of a tenth of the rate, and bytes
between nodes are counted too. If namespaces are not available the run is skipped. ``--modes`` takes parts of names; the
reference always runs. Modes that clip or skip run only if a filter finds no other; files of a filtered run have the
filters in their names, long ones as a hash. DeepSpeed and FairScale compete if they are installed.
"""

import hashlib
import json
import os
import re
import signal
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.race.contestants import ALONE_NAME, MODES, NODES, Sizes, select
from benchmarks.race.launch import run_ranks
from benchmarks.race.link import ENVIRONMENT, RATES, SLOWER, Link, Unavailable, run
from benchmarks.race.models import MODELS
from benchmarks.race.plots import draw
from benchmarks.race.report import MIB, PROGRAM, Found, table, tell_facts

RESULTS = Path(__file__).parent.parent / "results"
LONGEST_STEM = 43  # with .json, names of 48 characters
LARGE = ("87m",)
FREES_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}

Launcher = Callable[..., list[Any]]
"""`run_ranks` on the network of this run."""


def parse_options() -> Namespace:
    """Read the command line, or leave with a message."""
    parser = ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="26m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--batch-size", type=int, default=4, help="per rank")
    parser.add_argument("--modes", action="append", default=[], metavar="TEXT", help="part of a name; repeatable")
    parser.add_argument("--link", choices=RATES, help="rate of each rank's network link")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are spread over, with --link")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave the memory phase out")
    parser.add_argument("--keep-malloc", action="store_true", help="measure memory with glibc's default settings")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    if options.rounds < 2 or options.ranks < 2 or options.steps < 1:
        parser.error("Expected at least 2 rounds, 2 ranks and 1 step.")
    if options.nodes > 1 and (options.link is None or options.ranks % options.nodes):
        parser.error("Expected --link with --nodes, and as many ranks on each node.")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("Expected Linux, whose /proc counts bytes and resets the peak of resident memory.")
    try:
        options.names = select(options.modes, is_large=options.model in LARGE)
    except ValueError as error:
        parser.error(str(error))
    needed, free = estimate(options.names, parameter_bytes(options.model), options.ranks), available()
    if needed > free:
        parser.error(
            f"Expected {needed / MIB:.0f} MiB of free memory for {len(options.names)} modes of {options.model} on "
            f"{options.ranks} ranks, got {free / MIB:.0f}. Choose fewer --modes."
        )
    return options


def parameter_bytes(model: str) -> int:
    """Of a model that need not be built for it."""
    import torch

    with torch.device("meta"):
        return sum(param.nbytes for param in MODELS[model].build().parameters())


def estimate(names: Sequence[str], parameters: int, ranks: int) -> int:
    """Bytes that all ranks need for all modes at once, activations aside."""
    fallback = 4 * parameters  # where there is no formula
    total = 0
    for name in names:
        sizes = Sizes(parameters, 2 * parameters // (ranks if is_sharded(name) else 1), 0, 0, 0)
        total += MODES[name].formula(sizes) or fallback
    return ranks * total


def is_sharded(name: str) -> bool:
    """True if ranks keep a part of the optimizer state."""
    return not name.startswith("DDP")


def available() -> int:
    """Bytes of memory that this machine has free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def measure(
    options: Namespace, launch: Launcher, nodes: Sequence[str], tell: Callable[[Found, float | None], None]
) -> None:
    """Race, then memory; tell all that is known after each, with the measured rate of the link.

    Args:
        options: the command line's.
        launch: starts ranks.
        nodes: the namespace of each node's bridge; empty without nodes.
        tell: takes everything but the facts. What was timed is told before memory is measured, which may fail.
    """
    job = {
        "model": options.model,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "steps": options.steps,
        "modes": options.names,
        "gbit": RATES[options.link] / (SLOWER if options.nodes > 1 else 1) if options.link else None,
        "nodes": nodes,
    }
    say(f"{len(options.names)} modes in turns")
    raced = launch({**job, "phase": "race"}, {})[0]
    found = {
        "model": {"name": options.model, **raced["model"]},
        "ranks": options.ranks,
        "link": {"gbit": RATES[options.link]} if options.link else None,
        "nodes": options.nodes,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "steps": options.steps,
        "phases": raced["phases"],
        "modes": raced["modes"],
    }
    add_memory(found, {})
    tell(found, raced["rate"])
    if not options.memory:
        return
    memory = {}
    for name in [ALONE_NAME, *options.names]:
        say(f"memory of {name}")
        memory[name] = launch({**job, "phase": "memory", "mode": name}, {} if options.keep_malloc else FREES_AT_ONCE)
    add_memory(found, memory)
    tell(found, raced["rate"])


def add_memory(found: Found, memory: dict[str, list[dict[str, int]]]) -> None:
    """Peaks of every mode, and the formula."""
    model = found["model"]
    whole = model["parameter_bytes"]
    found["activation_bytes"] = [rank["peak"] - 2 * whole for rank in memory.get(ALONE_NAME, [])]
    for name, mode in found["modes"].items():
        ranks = memory.get(name, [])
        mode["peak_bytes"] = [rank["peak"] for rank in ranks]
        mode["peak_bytes_whole_run"] = [rank["peak_whole_run"] for rank in ranks]
        largest = max(model["bucket_bytes"]), max(model["block_bytes"])
        sizes = [
            Sizes(whole, rank["state"], *largest, activations)
            for rank, activations in zip(ranks, found["activation_bytes"], strict=bool(ranks))
        ]
        formulas = [MODES[name].formula(one) for one in sizes]
        mode["formula_bytes"] = [one for one in formulas if one is not None]


def write(options: Namespace, found: Found) -> None:
    """Print the table, store it with its raw numbers, and draw."""
    text = "\n".join([*(f"- {fact}" for fact in found["facts"]), "", table(found), ""])
    print(text)
    options.results.mkdir(exist_ok=True)
    stem = options.results / stem_of(options)
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    if find_spec("matplotlib") is None:
        say("plots were left out: no matplotlib. Run: pip install -e '.[plot]'")
        return
    draw(stem.with_suffix(".png"), found)


def stem_of(options: Namespace) -> str:
    """The files' name; runs of some of the modes have one of their own, with a hash where filters are too long."""
    more = [
        *([f"{options.nodes}nodes"] if options.nodes > 1 else []),
        *([options.link] if options.link else []),
        *(["malloc"] if options.keep_malloc else []),
    ]
    whole = "-".join([f"compare-{options.model}-{options.ranks}ranks", *more])
    filters = "-".join(re.sub("[^a-z0-9]+", "-", text.lower()).strip("-") for text in options.modes)
    if len(whole) + 1 + len(filters) > LONGEST_STEM:
        filters = f"modes-{hashlib.sha256(filters.encode()).hexdigest()[:8]}"
    return f"{whole}-{filters}" if options.modes else whole


def say(text: str) -> None:
    """Progress."""
    print(f"race: {text}", file=sys.stderr, flush=True)


def end(number: int, _: object) -> NoReturn:
    """On SIGTERM leave as on Ctrl-C, through every ``finally``."""
    sys.exit(128 + number)


def main() -> None:
    """Everything from the command line to the files."""
    options = parse_options()
    signal.signal(signal.SIGTERM, end)
    load = os.getloadavg()[0]
    try:
        network_of = partial(Link, options.ranks, options.link, run, os.getpid(), options.nodes)
        with network_of() if options.link else nullcontext() as link:
            prefixes = [link.prefix(rank) if link else [] for rank in range(options.ranks)]
            network = {**(ENVIRONMENT if link else {}), NODES: str(options.nodes)}
            nodes = link.nodes if link else []
            measure(
                options,
                lambda job, more: run_ranks(job, prefixes, {**network, **more}),
                nodes,
                lambda found, rate: write(options, {"facts": tell_facts(options, found, load, rate), **found}),
            )
    except Unavailable as error:
        print(f"skipped: {error}")
