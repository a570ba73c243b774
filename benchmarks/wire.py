"""A bucket's way to its owners and back, directly and around rings, next to Gloo's all-reduce of as many bytes.

    python -m benchmarks.wire --ranks 8 --link 200mbit

Nothing is computed and nothing but gradients and parameters is sent. Ways take turns in one run. ``--link`` gives every
rank a network namespace behind a link of that rate, see `benchmarks.race.link`; it needs root, and Linux.
"""

import json
import os
import statistics
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.race.launch import run_ranks
from benchmarks.race.link import ENVIRONMENT, RATES, Link, Unavailable, run

RESULTS = Path(__file__).parent / "results"
KIB, MIB = 1 << 10, 1 << 20


def parse_options() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", choices=RATES, help="rate of each rank's network link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096, 25 * 1024], metavar="KIB")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    return parser.parse_args()


def table(seconds: dict[str, list[list[float]]], sizes: list[int]) -> str:
    """Medians of all-reduce in ms, and of the ratios of each round to it."""
    ways = [name for name in seconds if name != "all-reduce"]
    lines = ["| KiB | all-reduce, ms | " + " | ".join(f"{name} / all-reduce" for name in ways) + " |"]
    lines.append("| ---: " * (2 + len(ways)) + "|")
    for place, size in enumerate(sizes):
        base = seconds["all-reduce"][place]
        ratios = [
            statistics.median(mine / its for mine, its in zip(seconds[name][place], base, strict=True)) for name in ways
        ]
        cells = [f"{size}", f"{1e3 * statistics.median(base):.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, store."""
    options = parse_options()
    job = {
        "phase": "wire",
        "sizes": [size * KIB for size in options.sizes],
        "rounds": options.rounds,
        "turn_bytes": MIB,
    }
    try:
        with Link(options.ranks, options.link, run, os.getpid()) if options.link else nullcontext() as link:
            prefixes = [link.prefix(rank) if link else [] for rank in range(options.ranks)]
            (seconds, *_) = run_ranks(job, prefixes, ENVIRONMENT if link else {})
    except Unavailable as error:
        print(f"skipped: {error}")
        return
    where = f"links of {options.link}" if options.link else "loopback"
    text = f"- {options.ranks} ranks, {where}, {options.rounds} rounds, torch {torch.__version__}\n\n"
    text += table(seconds, options.sizes) + "\n"
    print(text)
    stem = options.results / f"wire-{options.ranks}ranks{f'-{options.link}' if options.link else ''}"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps({"ranks": options.ranks, "link": options.link, **seconds}) + "\n")


if __name__ == "__main__":
    main()
