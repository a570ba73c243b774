"""Holds docs/status.md against the outcomes of the tests that it names."""

import pytest

from tests.features import STATUS, render, unshown


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-status", action="store_true", help="write docs/status.md from the outcomes of this run")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one process of pytest-xdist hears of all outcomes
        config.pluginmanager.register(Status(config.getoption("write_status")), "status")


class Status:
    """The outcome of each case, the worst of its phases."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes
        self._outcomes: dict[str, str] = {}
        self._unshown: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        page = STATUS.read_text()
        if self._writes:
            STATUS.write_text(render(self._outcomes, page))
            return
        self._unshown = unshown(page, self._outcomes)
        if self._unshown and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for what in self._unshown:
            terminalreporter.write_line(f"docs/status.md claims what no test of this run has shown: {what}", red=True)
