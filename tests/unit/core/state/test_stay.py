import importlib.util
import threading
import time

import pytest

from ddp_zero.core.state import connections
from tests import HANG


@pytest.mark.parametrize("package", connections.WAITING_IN)
def test_packages_that_wait_for_other_ranks_exist(package: str) -> None:
    assert importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("waits", ["time.sleep(1.0)", "threading.Event().wait(1.0)"])
@pytest.mark.parametrize("package", connections.WAITING_IN)
def test_a_caller_is_let_go_where_the_script_waits_for_other_ranks(
    package: str, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)
    waiter = threading.Thread(target=connections.Stay([], HANG).wait_until_it_leaves, daemon=True)
    waiter.start()
    names = {"__name__": f"{package}.anything", "time": time, "threading": threading, "is_alive": waiter.is_alive}
    exec(f"for _ in range({HANG:g}):\n    if is_alive(): {waits}", names)
    assert not waiter.is_alive()


def test_a_caller_waits_while_the_script_does_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)
    one = connections.Stay([], HANG)
    waiter = threading.Thread(target=one.wait_until_it_leaves, daemon=True)
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive()
    one.leave()
    waiter.join(HANG)
    assert not waiter.is_alive()
