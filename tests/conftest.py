"""Sorts tests into tiers, and holds docs/status.md and docs/frameworks.md against the outcomes of their tests."""

import gc
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import pytest

from tests import TIERS, features
from tests.frameworks import table

SMOKE = {Path(__file__).parent / "multiproc" / "test_main_modes.py"}
"""Files of the smoke tier, a part of the quick one. ``-m smoke`` collects no others, which would take longer."""

with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    for name, examples in (("busy machine", 40), ("thorough", 1000)):
        settings.register_profile(
            name, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("busy machine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = config.option.markexpr == "smoke" and collection_path.is_file() and collection_path not in SMOKE
    return True if is_left_out else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need not look at it, now or in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in SMOKE:
            item.add_marker("smoke")
            item.add_marker("quick")
        tier = TIERS.get(item.path.relative_to(Path(__file__).parent).parts[0])
        if tier is not None and not any(item.get_closest_marker(mark) for mark in ("nightly", "middle")):
            item.add_marker(tier)
    for item in _further_sizes(items):
        item.add_marker("nightly")


_SIZES = ("run", "world_size", "ranks")
"""Parameters of tests that are a number of ranks, or a case of `Cases.each`, whose id ends with one."""


def _further_sizes(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each case of jobs of several sizes, those at other sizes than one: the smallest, or in a fourth the next.

    The job of one rank is a further one in three of four cases. What a page names is none.
    """
    cases: dict[tuple[str, ...], list[tuple[int, pytest.Item]]] = {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = next((name for name in _SIZES if name in params), "")
        size = re.search(r"\d+$", item.name.rstrip("]") if name == "run" else str(params.get(name)))
        if size is None or item.path in SMOKE or item.get_closest_marker("nightly"):
            continue
        others = [str(id(value)) for key, value in params.items() if key != name]
        case = item.nodeid.rpartition("-")[0] if name == "run" else item.nodeid.partition("[")[0]
        cases.setdefault((case, *others), []).append((int(size.group()), item))
    shown = {feature.test for feature in features.features_of(features.STATUS.read_text())}
    seen = Counter[str]()
    for (case, *_), several in cases.items():
        sized = sorted((one for one in several if one[0] > 1), key=itemgetter(0))
        turn = zlib.crc32(case.encode()) + seen[case]  # the names alone decide: a new case moves no other one
        seen[case] += 1
        chosen = int(turn % 4 == 3 and len(sized) > 1)
        further = [item for place, (_, item) in enumerate(sized) if place != chosen]
        if sized and turn // 2 % 4:
            further += [item for size, item in several if size == 1]
        yield from (item for item in further if item.nodeid not in shown)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-status", action="store_true", help="write docs/status.md from the outcomes of this run")
    parser.addoption("--write-frameworks", action="store_true", help="write the table of docs/frameworks.md likewise")


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is not pytest.Config.ArgsSource.ARGS and not config.option.markexpr:
        config.option.markexpr = "not nightly"
    if not hasattr(config, "workerinput"):  # one process of pytest-xdist hears of all outcomes
        writes = [config.getoption(name) for name in ("write_status", "write_frameworks")]
        config.pluginmanager.register(Status(*writes), "status")


class Status:
    """The outcome of each case, the worst of its phases."""

    def __init__(self, writes_status: bool, writes_frameworks: bool) -> None:
        self._writes_status = writes_status
        self._writes_frameworks = writes_frameworks
        self._outcomes: dict[str, str] = {}
        self._unshown: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        page, frameworks = features.STATUS.read_text(), table.PAGE.read_text()
        if self._writes_frameworks:
            table.PAGE.write_text(table.render(self._outcomes, frameworks))
        else:
            self._unshown = [f"docs/frameworks.md: {what}" for what in table.unshown(frameworks, self._outcomes)]
        if self._writes_status:
            features.STATUS.write_text(features.render(self._outcomes, page))
        else:
            self._unshown += [f"docs/status.md: {what}" for what in features.unshown(page, self._outcomes)]
        if self._unshown and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for what in self._unshown:
            terminalreporter.write_line(f"Claimed, but not shown by a test of this run, in {what}", red=True)
