"""A host whose guard is gone, while something there holds the connection's output open, ends the job."""

import sys

import pytest

from ddp_zero.launch import launcher
from ddp_zero.launch.job import HostCommand
from ddp_zero.launch.launcher import run

_DEAF = "import os, time; os.close(0); time.sleep(600)"
"""As ssh does when what it has started is killed, and a daemon of that still has the output."""
_WAITS = "import sys; sys.stdin.read()"


def test_a_host_that_no_longer_listens_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MARGIN_SECONDS", 0.5)
    commands = [
        HostCommand(name, (sys.executable, "-c", program)) for name, program in (("one", _WAITS), ("two", _DEAF))
    ]
    told: list[str] = []
    code = run(commands, grace=0.5, lost_after=0.8, say=told.append)
    assert code == 255
    assert "two no longer listens: its guard has ended" in told[0]
    assert told[0].endswith("stopping two, one")


def test_a_host_that_listens_is_left_alone() -> None:
    quiet = "import sys, time; time.sleep(2.5)"
    told: list[str] = []
    assert run([HostCommand("one", (sys.executable, "-c", quiet))], 0.5, 0.8, told.append) == 0
    assert told == []
