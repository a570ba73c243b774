"""``python -m tests.fuzz``: many cases, or one again."""

import argparse
import queue
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from tests.fuzz.draw import draw
from tests.fuzz.pool import Outcome, Pool

_PROGRESS_SECONDS = 20.0


@dataclass
class Tally:
    """What has come of the cases so far."""

    cases: int = 0
    compared: int = 0
    passed: int = 0
    expected: Counter[str] = field(default_factory=Counter)
    both: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a case."""
        self.cases += 1
        self.compared += outcome.compared
        self.passed += outcome.verdict == "passed"
        if outcome.verdict == "refused":
            self.expected[outcome.kind] += 1
        elif outcome.verdict == "both raised":
            self.both[outcome.kind] += 1
        elif outcome.verdict == "failed":
            self.failures.append(outcome)

    def line(self) -> str:
        """Where it stands."""
        return (
            f"{self.cases} cases in {self.seconds:.0f} s ({self.cases / max(self.seconds, 1e-9):.2f} a second), "
            f"{self.compared} steps compared, {sum(self.expected.values())} refused, "
            f"{sum(self.both.values())} raised by both, {len(self.failures)} failed"
        )

    def report(self, ranks: int) -> str:
        """All of it."""
        kinds = Counter(outcome.kind for outcome in self.failures)
        differences = sum(count for kind, count in kinds.items() if kind.startswith("difference"))
        hangs = kinds["hang"] + kinds["by the time-out only"] + kinds["late"]
        lines = [self.line(), f"passed: {self.passed}"]
        lines += [f"refused, {kind}: {count}" for kind, count in sorted(self.expected.items())]
        lines += [f"both raised, {kind}: {count}" for kind, count in sorted(self.both.items())]
        lines += [f"differences: {differences}", f"hangs: {hangs}"]
        lines += [f"failed, {kind}: {count}" for kind, count in sorted(kinds.items())]
        for outcome in sorted(self.failures, key=lambda one: one.case.seed):
            last = next((line for line in reversed(outcome.text.splitlines()) if line.strip()), "")
            command = f"python -m tests.fuzz --ranks {ranks} --only {outcome.case.seed}"
            lines.append(f"  {command}  # {outcome.kind} at {outcome.op}: {last[:150]}")
        return "\n".join(lines)


def fuzz(
    seeds: range,
    ranks: int,
    jobs: int = 1,
    timeout: float = 60.0,
    injects: str | None = None,
    out: TextIO | None = None,
    seconds: float | None = None,
) -> Tally:
    """Run cases in pools side by side.

    Args:
        seeds: one per case.
        ranks: of each.
        jobs: how many pools.
        timeout: seconds after which a case without progress is a hang.
        injects: a mistake to make on purpose; see `tests.fuzz.sides.Place`.
        out: where progress is printed.
        seconds: start no case after so long.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        left.put(seed)
    tally, lock, started = Tally(), threading.Lock(), time.monotonic()
    printed = started

    def work() -> None:
        nonlocal printed
        with Pool(ranks, timeout, injects) as pool:
            while seconds is None or time.monotonic() - started < seconds:
                try:
                    seed = left.get_nowait()
                except queue.Empty:
                    return
                outcome = pool.run(seed)
                with lock:
                    tally.add(outcome)
                    tally.seconds = time.monotonic() - started
                    if outcome.verdict == "failed" and out is not None:
                        print(f"seed {seed}: {outcome.kind} at {outcome.op}", file=out, flush=True)
                    if out is not None and time.monotonic() - printed > _PROGRESS_SECONDS:
                        printed = time.monotonic()
                        print(tally.line(), file=out, flush=True)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _replay(seed: int, ranks: int, timeout: float, injects: str | None) -> int:
    print(draw(seed, ranks))
    with Pool(ranks, timeout, injects) as pool:
        outcome = pool.run(seed)
    print(f"{outcome.verdict} {outcome.kind} at {outcome.op} after {outcome.seconds:.1f} s, {outcome.compared} steps")
    print(outcome.text)
    return int(outcome.verdict == "failed")


def main() -> int:
    """The command; 1 if anything has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="pools of ranks side by side")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without progress that are a hang")
    parser.add_argument("--seconds", type=float, default=None, help="start no case after so long")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="print and run one case")
    parser.add_argument("--inject", default=None, help="a mistake on purpose: 'lr', or 'hang N' at operation N")
    options = parser.parse_args()
    if options.only is not None:
        return _replay(options.only, options.ranks, options.timeout, options.inject)
    seeds = range(options.seed, options.seed + options.cases)
    tally = fuzz(
        seeds, options.ranks, options.jobs, options.timeout, options.inject, out=sys.stdout, seconds=options.seconds
    )
    print(tally.report(options.ranks))
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
