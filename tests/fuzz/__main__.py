"""``python -m tests.fuzz``: many cases, or one again."""

import argparse
import ast
import importlib.metadata
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tests.accelerator import simulation
from tests.fuzz.before.case import BeforeCase
from tests.fuzz.before.draw import draw_before
from tests.fuzz.case import Case
from tests.fuzz.draw import draw
from tests.fuzz.loops.case import LoopCase
from tests.fuzz.loops.draw import draw_loop
from tests.fuzz.mesh.case import MeshCase
from tests.fuzz.mesh.draw import draw_mesh
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
        """All of it, with the commands that replay failures."""
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
            command = f"python -m tests.fuzz {_flag_of(outcome.case)}--ranks {ranks} --only {outcome.case.seed}"
            lines.append(f"  {command}  # {outcome.kind} at {outcome.op}: {last[:150]}")
        return "\n".join(lines)

    def numbers(self) -> dict[str, Any]:
        """All of it as raw numbers; failures by seed, kind and operation."""
        return {
            "cases": self.cases,
            "passed": self.passed,
            "steps compared": self.compared,
            "refused": dict(self.expected),
            "raised by both": dict(self.both),
            "failed": sorted((outcome.case.seed, outcome.kind, outcome.op) for outcome in self.failures),
            "seconds": round(self.seconds, 1),
        }


def _flag_of(case: Case | BeforeCase | LoopCase | MeshCase) -> str:
    kinds = {BeforeCase: "--before ", LoopCase: "--loops ", MeshCase: "--mesh "}
    return kinds.get(type(case), "")


def fuzz(
    seeds: Iterable[int],
    ranks: int,
    jobs: int = 1,
    timeout: float = 60.0,
    injects: str | None = None,
    out: TextIO | None = None,
    seconds: float | None = None,
    draws: Callable[[int, int], Case | BeforeCase | LoopCase | MeshCase] = draw,
    device: str = "cpu",
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
        draws: the case of a seed and a number of ranks.
        device: see `Pool`.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        left.put(seed)
    tally, lock, started = Tally(), threading.Lock(), time.monotonic()
    printed = started

    def work() -> None:
        nonlocal printed
        with Pool(ranks, timeout, injects, device) as pool:
            while seconds is None or time.monotonic() - started < seconds:
                try:
                    seed = left.get_nowait()
                except queue.Empty:
                    return
                outcome = pool.run(draws(seed, ranks))
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


def _replay(case: Case | BeforeCase | LoopCase | MeshCase, timeout: float, injects: str | None, device: str) -> int:
    print(case)
    with Pool(case.ranks, timeout, injects, device) as pool:
        outcome = pool.run(case)
    print(f"{outcome.verdict} {outcome.kind} at {outcome.op} after {outcome.seconds:.1f} s, {outcome.compared} steps")
    print(outcome.text)
    return int(outcome.verdict == "failed")


def _changed(case: Any, changes: list[str]) -> Any:
    """A case with other values, such as ``mode.views=False``, or with ``program=3,5-8`` only some operations."""
    for change in changes:
        where, _, value = change.partition("=")
        part, _, name = where.partition(".")
        if where == "program":
            case = replace(case, program=tuple(case.program[number] for number in _numbers(value)))
        else:
            values, is_loop = {name: ast.literal_eval(value)}, isinstance(case, LoopCase)
            units = case.units if is_loop else (case,)
            units = tuple(replace(unit, **{part: replace(getattr(unit, part), **values)}) for unit in units)
            case = replace(case, units=units) if is_loop else units[0]
    return case


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


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
    parser.add_argument(
        "--inject", default=None, help="a mistake on purpose: 'lr'; 'norm' on meshes; 'hang N' at operation N"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="with --only: mode.views=False, how.stage=1, program=0-3,7"
    )
    parser.add_argument("--mesh", action="store_true", help="programs whose ranks hold different parameters")
    parser.add_argument("--loops", action="store_true", help="training loops as people write them")
    parser.add_argument("--device", choices=("cpu", "cuda", "sim"), default="cpu", help="of the models; not of meshes")
    parser.add_argument("--before", action="store_true", help="all that existed before the optimizer")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="add the numbers to those of a file")
    options = parser.parse_args()
    draws: Callable[[int, int], Case | BeforeCase | LoopCase | MeshCase] = (
        draw_mesh if options.mesh else draw_loop if options.loops else draw_before if options.before else draw
    )
    if options.device == "sim":
        simulation.compiled()  # here, not by all ranks while the parent waits for them
    if options.only is not None:
        case = _changed(draws(options.only, options.ranks), options.set)
        return _replay(case, options.timeout, options.inject, options.device)
    seeds = range(options.seed, options.seed + options.cases)
    shown: dict[str, Any] = {"out": sys.stdout, "seconds": options.seconds, "draws": draws, "device": options.device}
    tally = fuzz(seeds, options.ranks, options.jobs, options.timeout, options.inject, **shown)
    print(tally.report(options.ranks))
    if options.json is not None:
        runs = json.loads(options.json.read_text()) if options.json.exists() else []
        about = {
            "kind": "mesh"
            if options.mesh
            else "loops"
            if options.loops
            else "before"
            if options.before
            else "one group",
            "ranks": options.ranks,
            "first seed": options.seed,
        }
        runs.append({**about, "torch": importlib.metadata.version("torch"), **tally.numbers()})
        options.json.write_text(json.dumps(runs, indent=1) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
