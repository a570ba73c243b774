"""``python -m ddp_zero timeline trace.json``: draw one step of a trace of `torch.profiler`."""

import argparse
import sys
from pathlib import Path

from ddp_zero.tools.timeline.iteration import Iteration, iterations_in
from ddp_zero.tools.timeline.trace import read_trace


def main(arguments: list[str] | None = None) -> int:
    """Write the picture, and print what it shows in numbers. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_zero timeline", description=__doc__)
    parser.add_argument("trace", help="what export_chrome_trace of torch.profiler has written, .json or .json.gz")
    parser.add_argument("-o", "--output", help="a .png, .svg or .pdf; by default the trace's name with .png")
    parser.add_argument("--step", type=int, default=-1, help="which step of the trace, from 0; -1 (default): the last")
    parser.add_argument("--title", default="", help="put above the picture")
    given = parser.parse_args(arguments)
    try:
        found = iterations_in(read_trace(given.trace))
        chosen = _choose(found, given.step)
        from ddp_zero.tools.timeline.drawing import draw

        path = Path(given.output or given.trace.removesuffix(".gz").removesuffix(".json") + ".png")
        draw(chosen, path, given.title)
    except ImportError as error:
        print(f"Expected matplotlib, got {error}. Run pip install 'ddp_zero[plot]'.", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {chosen.summary()}")
    return 0


def _choose(found: list[Iteration], step: int) -> Iteration:
    if not -len(found) <= step < len(found):
        raise ValueError(f"Expected a step from 0 to {len(found) - 1}, or -1 for the last, got {step}.")
    return found[step]
