"""A pytest plugin that adds up the CPU seconds of each test: ``pytest -p tests.cpu_time --cpu-time FILE``.

Wall-clock durations (``--durations``) depend on what else the machine does, and on waits. This counts user and system
time of the test's process and all processes below it, those that stay in a pool included, and appends one JSON line
``[test, cpu seconds, wall seconds]`` per test. Run it without ``-n``. ``python -m tests.cpu_time FILE`` sums by file.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-time", type=Path, metavar="FILE", help="append the CPU and wall seconds of each test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    file = item.config.getoption("cpu_time")
    cpu, wall = _cpu_seconds_below(os.getpid()), time.monotonic()
    result = yield
    if file is not None:
        row = [item.nodeid, round(_cpu_seconds_below(os.getpid()) - cpu, 2), round(time.monotonic() - wall, 2)]
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    return result


def _cpu_seconds_below(root: int) -> float:
    """User and system time of a process, of its children that have ended, and of all processes below it."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    total, waiting = 0.0, [root]
    while waiting:
        process = waiting.pop()
        total += seconds.get(process, 0.0)
        waiting += children.get(process, [])
    return total


def main(file: Path) -> None:
    """Print CPU seconds, wall seconds and tests per file, the largest first."""
    cpu, wall, tests = Counter[str](), Counter[str](), Counter[str]()
    for line in file.read_text().splitlines():
        test, cpu_seconds, wall_seconds = json.loads(line)
        name = test.partition("::")[0]
        cpu[name] += cpu_seconds
        wall[name] += wall_seconds
        tests[name] += 1
    print(f"{sum(cpu.values()):8.1f} {sum(wall.values()):8.1f} {sum(tests.values()):6} all")
    for name, seconds in cpu.most_common():
        print(f"{seconds:8.1f} {wall[name]:8.1f} {tests[name]:6} {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
