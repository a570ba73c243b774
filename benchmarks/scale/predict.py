"""Predicted step time and memory per rank at 2 to 4,096 ranks: a model, and its error against measurements.

    python -m benchmarks.scale
    python -m benchmarks.scale --model 87m --gbit 10 100
    python -m benchmarks.scale --measured benchmarks/results/compare-26m-2ranks.json
    python -m benchmarks.scale --check

Each mode is simulated bucket by bucket with the plans that the library would make, see `schedule` and `wire`. Times of
forward, backward and the step are given or taken from a measurement and stay constant at any number of ranks: each rank
has its own batch. ``--check`` predicts every result of ``benchmarks.race`` over a shaped link from that result's own
phases and the link's rate, and prints both. Nothing is fitted to a mode; latency and cost of a message were measured
once.
"""

import json
import platform
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import partition
from benchmarks.scale.check import check
from benchmarks.scale.modes import DDP, MANY, MODELS, MODES, Shape, Sizes, built_in, ideal, measured_shape, plan_job
from benchmarks.scale.plot import draw
from benchmarks.scale.schedule import Forecast, Phases, forecast
from benchmarks.scale.wire import Link, Transport

PROGRAM = "python -m benchmarks.scale"
RESULTS = Path(__file__).parent.parent / "results"
RANKS = tuple(2**power for power in range(1, 13))
MIB = 2**20
IDEAL = "(ideal: state cut evenly by elements)"
LATENCY_US = MESSAGE_US = 65.0  # measured: Gloo over a veth pair, both ends on one machine of two cores, the best cases
SECONDS_PER_BYTE = Phases(forward=1.67e-9, backward=3.25e-9, adamw=0.39e-9)  # measured: 26m, two ranks on two cores
EXPOSED = SLOWER = 0.05  # of a step: thresholds for "not hidden" and "slower"
LIMIT_MS = 100.0  # for planning 10,000 parameters for 1,024 ranks


@dataclass(frozen=True)
class Outlook:
    """The predictions.

    Attributes:
        steps: step times by Gbit/s, transport, mode and number of ranks.
        memory: bytes of the rank that needs most, by mode and number of ranks.
        owned: bytes of parameters that the rank with most of them owns, by number of ranks.
    """

    steps: dict[float, dict[Transport, dict[str, dict[int, Forecast]]]]
    memory: dict[str, dict[int, float]]
    owned: dict[int, int]


def look_out(shape: Shape, phases: Phases, options: Namespace) -> Outlook:
    """Simulate every mode on every link at every number of ranks."""
    outlook = Outlook(
        {gbit: {transport: {name: {} for name in MODES} for transport in Transport} for gbit in options.gbit},
        {name: {} for name in (*MODES, IDEAL)},
        {},
    )
    for ranks in options.ranks:
        job, shards = plan_job(shape, ranks, phases)
        sizes = Sizes(ranks, sum(shape.sizes), shards, shape.largest_bucket)
        activations = options.activation_mib * MIB
        outlook.owned[ranks] = shards.overlapped
        outlook.memory[IDEAL][ranks] = ideal(sizes) + activations
        for name, mode in MODES.items():
            outlook.memory[name][ranks] = mode.memory(sizes) + activations
            for gbit in options.gbit:
                link = Link(gbit, options.latency_us / 1e6, options.message_us / 1e6)
                for transport in Transport:
                    outlook.steps[gbit][transport][name][ranks] = forecast(mode.step, job, link, transport)
    return outlook


# Tables


def table(corner: str, columns: Sequence[object], rows: Mapping[str, Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {corner} | {' | '.join(map(str, columns))} |", "| --- " * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def step_table(steps: Mapping[str, Mapping[int, Forecast]], ranks: Sequence[int]) -> str:
    """Milliseconds of a step."""
    rows = {name: [f"{1000 * of_mode[n].seconds:,.0f}" for n in ranks] for name, of_mode in steps.items()}
    return table("ms per step at N =", ranks, rows)


def first(ranks: Sequence[int], holds: Sequence[bool]) -> str:
    """The first number of ranks from which on something holds at every one."""
    from_here = [n for position, n in enumerate(ranks) if all(holds[position:])]
    return f"{from_here[0]:,}" if from_here else "never"


def turning_points(outlook: Outlook, ranks: Sequence[int]) -> str:
    """Numbers of ranks from which syncs are no longer hidden, or a mode falls behind DDP."""
    columns = [f"{gbit:g} Gbit/s, {transport.value}" for gbit, by in outlook.steps.items() for transport in by]
    rows: dict[str, list[str]] = {name: [] for name in MODES if name != DDP}
    for by_transport in outlook.steps.values():
        for steps in by_transport.values():
            for name, cells in rows.items():
                mine = [steps[name][n] for n in ranks]
                shown = [step.exposed > EXPOSED * step.seconds for step in mine]
                behind = [
                    step.seconds > (1 + SLOWER) * steps[DDP][n].seconds for n, step in zip(ranks, mine, strict=True)
                ]
                cells.append(f"{first(ranks, shown)} / {first(ranks, behind)}")
    return table("sync not hidden / slower than DDP, from N =", columns, rows)


def memory_table(outlook: Outlook, ranks: Sequence[int]) -> str:
    """MiB of the rank that needs most."""
    rows = {name: [f"{by_ranks[n] / MIB:,.0f}" for n in ranks] for name, by_ranks in outlook.memory.items()}
    return table("MiB at N =", ranks, rows)


def ownership(outlook: Outlook, shape: Shape, ranks: Sequence[int]) -> str:
    """In words: the limit that whole tensors set to sharding."""
    total, last = sum(shape.sizes), outlook.owned[ranks[-1]]
    stops = first(ranks, [outlook.owned[n] == last for n in ranks])
    uneven = first(ranks, [outlook.owned[n] > 1.1 * total / n for n in ranks])
    return (
        f"{len(shape.sizes)} tensors, {total:,} bytes, the largest {max(shape.sizes):,}. The largest share is over 1.1 "
        f"times the mean from N = {uneven}; it shrinks no further from N = {stops}, where it is {last:,} bytes, and an "
        f"even share at N = {ranks[-1]:,} would be {total / ranks[-1]:,.0f}."
    )


def formulas() -> str:
    """In words: the counted memory."""
    modes_of: dict[str, list[str]] = {}
    for name, mode in MODES.items():
        modes_of.setdefault(mode.formula, []).append(name)
    return "\n".join(f"- {formula}: {'; '.join(names)}" for formula, names in modes_of.items())


def planning() -> str:
    """In words: the cost of a plan."""
    timing = partition.measure(partition.PARAMETERS, 1024)
    took = timing.partition + timing.plan
    verdict = "under" if took < LIMIT_MS else "NOT under"
    planned = f"planning {partition.PARAMETERS:,} parameters for 1,024 ranks"
    return f"{planned}: {took:.0f} ms of CPU time, {verdict} {LIMIT_MS:.0f}"


def report(outlook: Outlook, shape: Shape, ranks: Sequence[int], activation_mib: float) -> str:
    """All tables."""
    parts = []
    for gbit, by_transport in outlook.steps.items():
        for transport, steps in by_transport.items():
            parts += [f"## Step time at {gbit:g} Gbit/s, {transport.value}", step_table(steps, ranks)]
    parts += [
        f"## Turning points ({EXPOSED:.0%} of a step, from there on at every N)",
        turning_points(outlook, ranks),
        f"## Memory of the rank that needs most, {activation_mib:g} MiB of activations included",
        memory_table(outlook, ranks),
        ownership(outlook, shape, ranks),
        formulas(),
    ]
    return "\n\n".join(parts)


# Main


def parse_options() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=[*MODELS, MANY], default="26m")
    add("--measured", type=Path, help="a result of benchmarks.race: its model and its phases")
    add("--gbit", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="of each rank's link, in each direction")
    add("--latency-us", type=float, default=LATENCY_US, help="of each round")
    add("--message-us", type=float, default=MESSAGE_US, help="of each message besides its bytes")
    add("--ranks", type=int, nargs="+", default=list(RANKS))
    add("--forward-ms", type=float, help="by default in proportion to bytes of parameters, as are the next two")
    add("--backward-ms", type=float)
    add("--adamw-ms", type=float, help="of the unsharded step")
    add("--activation-mib", type=float, default=0.0, help="per rank, in every mode alike")
    add("--check", action="store_true", help="compare predictions with results of benchmarks.race over shaped links")
    options = parser.parse_args()
    options.ranks = sorted(set(options.ranks))
    if options.ranks[0] < 2:
        parser.error(f"Expected --ranks of at least 2, got {options.ranks[0]}.")
    if min(options.gbit) <= 0:
        parser.error(f"Expected --gbit above 0, got {min(options.gbit)}.")
    if not options.check and find_spec("matplotlib") is None:
        parser.error("Expected matplotlib for the plots, got none. Run: pip install -e '.[plot]'")
    return options


def inputs(options: Namespace) -> tuple[Shape, Phases, str]:
    """The model, its phases, and where those are from."""
    if options.measured is not None:
        found: dict[str, Any] = json.loads(options.measured.read_text())
        model = found["model"]
        shape = measured_shape(model["name"], model["tensors"], model["bucket_bytes"])
        phases, source = Phases(**found["phases"]), f"{options.measured.name}, at {found['ranks']} ranks"
    else:
        shape = built_in(options.model)
        phases = Phases(**{name: value * sum(shape.sizes) for name, value in asdict(SECONDS_PER_BYTE).items()})
        source = "26m on two ranks on two cores, rounded, in proportion to bytes of parameters"
    given = {name: getattr(options, f"{name}_ms") for name in asdict(phases)}
    given = {name: value / 1000 for name, value in given.items() if value is not None}
    return shape, Phases(**{**asdict(phases), **given}), f"{source}{'; the command line' if given else ''}"


def main() -> None:
    """Check, or predict, print and store."""
    options = parse_options()
    link = Link(options.gbit[0], options.latency_us / 1e6, options.message_us / 1e6)
    if options.check:
        text = f"- date: {date.today()}\n- command: {PROGRAM} --check\n\n{check(RESULTS, link)}\n"
        print(text)
        (RESULTS / "scale-check.md").write_text(text)
        return
    shape, phases, source = inputs(options)
    outlook = look_out(shape, phases, options)
    facts = [
        f"date: {date.today()}; torch {torch.__version__}, Python {platform.python_version()}",
        f"command: {PROGRAM} {' '.join(sys.argv[1:])}".rstrip(),
        f"predicted by a model, not measured; {PROGRAM} --check compares it with what was measured",
        f"model: {shape.name}, {len(shape.layout)} DDP buckets, the largest {shape.largest_bucket / MIB:.1f} MiB; "
        f"{'tensors of equal size are assumed; ' if shape.is_guessed else ''}AdamW in fp32",
        f"computing per step and rank: forward {1000 * phases.forward:.0f} ms, backward {1000 * phases.backward:.0f}, "
        f"unsharded AdamW {1000 * phases.adamw:.0f} (from: {source})",
        f"link: full duplex, {options.latency_us:g} us per round, {options.message_us:g} us per message",
        "Gloo: ring all-reduce; direct exchange (N - 1 messages or more per bucket and rank; who owns much of a bucket "
        "sends it N - 1 times); torch's broadcasts one after the other; FSDP2's collectives block, its reduce-scatter "
        "sends as much as an all-reduce",
        "rings: for everything, of unequal parts; nothing blocks but where a step needs it",
        planning(),
    ]
    text = "\n".join(
        [*(f"- {fact}" for fact in facts), "", report(outlook, shape, options.ranks, options.activation_mib), ""]
    )
    print(text)
    store(f"scale-{shape.name}", text, facts, outlook)


def store(stem: str, text: str, facts: Sequence[str], outlook: Outlook) -> None:
    """Markdown, JSON, PNG."""
    steps = {
        f"{gbit:g}": {
            transport.value: {
                name: {ranks: asdict(step) for ranks, step in of_mode.items()} for name, of_mode in steps.items()
            }
            for transport, steps in by_transport.items()
        }
        for gbit, by_transport in outlook.steps.items()
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.md").write_text(text)
    found = {"facts": facts, "steps": steps, "memory": outlook.memory, "owned": outlook.owned}
    (RESULTS / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(RESULTS / f"{stem}.png", outlook.steps, outlook.memory)
