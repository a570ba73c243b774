"""Kills processes and whole hosts of a training at random moments, and compares what goes on with an unbroken training.

    python -m tests.snapshots
    python -m tests.snapshots --kills 5 --host-losses 2

Three jobs: ranks of one host, of which a random rank is killed; two hosts of two ranks, and four hosts of one, of which
a random host is lost: its processes are killed, and its snapshots deleted. Hosts are network namespaces, so this needs
root. After every crash all ranks are started again. Each rank writes down every step with a digest of its parameters,
and every digest must be the unbroken training's.
"""

import json
import os
import random
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.snapshots.jobs import Job, crash_often, namespaces, starts_of, wrong_steps


def main() -> int:
    """Run all jobs; 1 if more steps were lost than allowed, or a bit differs."""
    parser = ArgumentParser(
        prog="python -m tests.snapshots",
        description=__doc__.splitlines()[0],
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=50, help="of single ranks on one host")
    parser.add_argument("--host-losses", type=int, default=20, help="of hosts, half of them of two, half of four")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every crash to this file")
    options = parser.parse_args()
    order = random.Random(options.seed)
    half = options.host_losses // 2
    found, failed = {}, False
    for hosts, ranks, times in ((1, 2, options.kills), (2, 2, half), (4, 1, options.host_losses - half)):
        if not times:
            continue
        name = f"{hosts} host{'s' if hosts > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        with ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            spaces = stack.enter_context(namespaces(hosts)) if hosts > 1 else None
            arguments = ["--steps=1000000", f"--every={options.every}", f"--pause={options.pause}"]
            job = Job(memory / "broken", log / "broken", ranks, spaces, *arguments)
            stack.callback(job.stop)
            crashes = crash_often(job, times, hosts > 1, order)
            last = max(step.number for starts in job.starts() for start in starts for step in start.steps)
            unbroken = Job(memory / "unbroken", log / "unbroken", ranks, spaces, f"--steps={last}", "--every=1000000")
            unbroken.start()
            codes = unbroken.wait_for_the_end(600)
            assert set(codes) == {0}, (log / "unbroken" / "errors-0").read_text()
            wrong = wrong_steps(job, starts_of(unbroken.log / "rank-0")[0].steps)
        lost = [crash.lost_steps for crash in crashes]
        counts = ", ".join(f"{steps}: {number}" for steps, number in sorted(Counter(lost).items()))
        took = median(crash.seconds for crash in crashes)
        print(f"{name}: {times} crashes over {last} steps, a snapshot every {options.every}")
        print(f"  steps lost, and how often: {counts}; at most {max(lost)}")
        print(f"  steps with other parameters than the unbroken training: {len(wrong)}")
        print(f"  seconds from the kill to the first new step, median: {took:.1f}", flush=True)
        failed = failed or max(lost) > options.every or bool(wrong) or min(lost) < 0
        found[name] = {"crashes": [vars(crash) for crash in crashes], "wrong": wrong, "steps": last}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    if os.name != "posix":
        sys.exit("Expected Linux.")
    sys.exit(main())
