import importlib.util
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest

from ddp_zero.core.comm import stay
from tests import HANG


def staying(pending: Callable[[], int | None] = lambda: None) -> stay.Stay:
    return stay.Stay(mock.Mock(), "mine", [], HANG, pending)


@pytest.mark.parametrize("package", stay.WAITING_IN)
def test_packages_that_wait_for_other_ranks_exist(package: str) -> None:
    assert importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("waits", ["time.sleep(0.1)", "threading.Event().wait(0.1)"])
@pytest.mark.parametrize("package", stay.WAITING_IN)
def test_wait_until_it_leaves_returns_where_the_script_waits_for_other_ranks(
    package: str, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stay, "LOOK_SECONDS", 0.01)
    waiter = threading.Thread(target=staying().wait_until_it_leaves, daemon=True)
    waiter.start()
    names = {"__name__": f"{package}.anything", "time": time, "threading": threading, "is_alive": waiter.is_alive}
    exec(f"for _ in range({10 * HANG:g}):\n    if is_alive(): {waits}", names)
    assert not waiter.is_alive()


def test_a_caller_waits_while_the_script_does_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stay, "LOOK_SECONDS", 0.01)
    one = staying()
    waiter = threading.Thread(target=one.wait_until_it_leaves, daemon=True)
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive()
    one.leave()
    waiter.join(HANG)
    assert not waiter.is_alive()


def test_wait_until_it_leaves_returns_where_the_device_makes_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stay, "LOOK_SECONDS", 0.01)
    pending = iter([*range(20), *[20] * 1000])  # a script at one place while its device gets on is not waiting
    waiter = threading.Thread(target=staying(lambda: next(pending)).wait_until_it_leaves)
    waiter.start()
    while waiter.is_alive():
        waiter.join(HANG)
    assert next(pending) == 20
