import importlib.util
import threading
import time

import pytest

from ddp_zero.core.state import connections


@pytest.mark.parametrize("package", connections.WAITING_IN)
def test_packages_that_wait_for_other_ranks_exist(package: str) -> None:
    assert importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("package", connections.WAITING_IN)
def test_a_caller_is_let_go_where_the_script_waits_for_other_ranks(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)
    waiter = threading.Thread(target=connections.Stay([], 60.0).wait_until_it_leaves, daemon=True)
    waiter.start()
    exec("time.sleep(1.0)", {"__name__": f"{package}.anything", "time": time})
    assert not waiter.is_alive()


def test_a_caller_waits_while_the_script_does_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)
    one = connections.Stay([], 60.0)
    waiter = threading.Thread(target=one.wait_until_it_leaves, daemon=True)
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive()
    one.leave()
    waiter.join(5.0)
    assert not waiter.is_alive()
