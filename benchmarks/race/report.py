"""The results of `compare`, as text: facts, ratios, and the table."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.contestants import MODES, REFERENCE, TORCHS
from benchmarks.race.link import RATES, SLOWER
from benchmarks.race.models import MODELS

ROOT = Path(__file__).parents[2]
PROGRAM = "python -m benchmarks.race"
MIB = 2**20
NOTHING = "-"  # was not measured

Found = dict[str, Any]
"""The content of the JSON file."""


def quartiles_of_ratio(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Of one mode's steps to another's, round by round."""
    return statistics.quantiles(
        [mine / other for mine, other in zip(seconds, base, strict=True)], n=4, method="inclusive"
    )


def lower_bound(ranks: int, parameter_bytes: int) -> float:
    """Bytes that a rank has to send in a step: gradients reduced to their owners, and parameters back."""
    return 2 * (ranks - 1) / ranks * parameter_bytes


def table(found: Found) -> str:
    """Markdown: one row per mode."""
    columns = [
        "mode",
        "median ms",
        f"ratio to {REFERENCE} (quartiles)",
        "ratio to torch's, bucket views (quartiles)",
        "MB sent per rank and step",
        "ratio to the bound",
        "peak MiB from the third step",
        "peak MiB, whole run",
        "MiB by formula",
        "largest difference",
    ]
    if found.get("nodes", 1) > 1:
        columns.append("MB from a node to others (ratio)")
    rows = [columns, ["---"] * len(columns), *(row(name, found) for name in found["modes"])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(name: str, found: Found) -> list[str]:
    """The cells of a mode."""
    modes: dict[str, Any] = found["modes"]
    mode = modes[name]
    sent = max(mode["sent_bytes"])
    bound = lower_bound(found["ranks"], found["model"]["parameter_bytes"])
    return [
        name,
        rounded(1000 * statistics.median(mode["seconds"])),
        *(ratio(mode["seconds"], modes[base]["seconds"]) if base in modes else NOTHING for base in (REFERENCE, TORCHS)),
        rounded(sent / 1e6),
        f"{sent / bound:.2f}",
        *memory_cells(mode),
        f"{mode['difference']:.2g}" if mode["difference"] else "0.0",
        *([crossed(mode, modes[REFERENCE])] if found.get("nodes", 1) > 1 else []),
    ]


def crossed(mode: dict[str, Any], reference: dict[str, Any]) -> str:
    """Bytes per step from the node that sends most, and as a ratio to the reference."""
    mine, base = (max(one["bytes_between_nodes"]) for one in (mode, reference))
    return f"{rounded(mine / 1e6)} ({mine / base:.2f})"


def rounded(number: float) -> str:
    """To three digits, of a large number to the whole."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Its median and quartiles."""
    low, middle, high = quartiles_of_ratio(seconds, base)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def memory_cells(mode: dict[str, Any]) -> list[str]:
    """Of the rank that needs most."""
    kinds = ("peak_bytes", "peak_bytes_whole_run", "formula_bytes")
    return [f"{max(mode[kind]) / MIB:.0f}" if mode[kind] else NOTHING for kind in kinds]


def tell_facts(options: Namespace, found: Found, load: float, rate: float | None) -> list[str]:
    """Subject, place and method of the measurement, for the list above the table."""
    model, phases = found["model"], {name: rounded(1000 * value) for name, value in found["phases"].items()}
    buckets = ", ".join(f"{size / MIB:.1f}" for size in model["bucket_bytes"])
    facts = [
        f"date: {date.today()}",
        f"commit: {commit()}",
        f"command: {PROGRAM} {shlex.join(sys.argv[1:])}".rstrip(),
        f"versions: torch {torch.__version__}, Python {platform.python_version()}{others(found)}",
        f"machine: {processor()}, {os.cpu_count()} cores; load average {load:.1f} before the run",
        f"model: {options.model}, {model['parameters']:,} parameters in {model['tensors']} tensors, {options.ranks} "
        f"Gloo ranks of one thread each, {options.batch_size} x {MODELS[options.model].sample} per rank, "
        f"{options.rounds} rounds of {options.steps} steps",
        f"DDP's buckets in the order of reduction, MiB: {buckets}",
        f"median ms of DDP's parts, sending nothing, all ranks at once: forward {phases['forward']}, backward "
        f"{phases['backward']}, fused AdamW {phases['adamw']}",
        f"network: {network(options.link, rate, options.nodes)}",
        f"lower bound of what a rank sends in a step: "
        f"{lower_bound(options.ranks, model['parameter_bytes']) / 1e6:.1f} MB",
        "largest difference: of any parameter on any rank, at the end, to DDP + fused AdamW, or among clipped modes to "
        "the clipped one; every parameter had moved",
    ]
    if found["activation_bytes"]:
        facts.append(
            f"memory: resident{'' if options.keep_malloc else ', freed at once'}, above a rank's own before there was "
            "a model, of the rank that needs most; by formula: parameters, own state, gradients and buckets as the "
            "mode needs them, and "
            f"{max(found['activation_bytes']) / MIB:.0f} MiB of activations"
        )
    return facts


def commit() -> str:
    """The checkout's, with a mark if the library has changed since; empty outside of a checkout."""
    head, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for command in (("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain", "ddp_zero"))
    )
    return f"{head}{' and changes' if changed else ''}"


def others(found: Found) -> str:
    """Versions of the modes' packages."""
    packages = sorted({MODES[name].needs for name in found["modes"]} - {"torch"})
    return "".join(f", {package} {version(package)}" for package in packages)


def network(link: str | None, rate: float | None, nodes: int = 1) -> str:
    """Transport of bytes, and method of counting them."""
    if link is None:
        return "none, ranks talk inside the machine; bytes sent are those that the process writes"
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    shared = f", {nodes} nodes joined by links of {RATES[link] / SLOWER:g} Gbit/s that their ranks share"
    return (
        f"every rank in a network namespace of its own behind a link of {link}{shared if nodes > 1 else ''}, "
        f"{rate:.3f} Gbit/s measured with "
        f"all ranks sending and receiving at once, TCP's congestion control is {control}; bytes sent are those of the "
        "rank's interface, headers included"
    )


def processor() -> str:
    """Its name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
