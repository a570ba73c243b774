"""Ranks that find each other in a store that has been used before; under torchrun in multiproc/test_restart.py."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from ddp_zero import launch
from ddp_zero.core.comm.control_group import MissingRanksError, store_of_this_attempt
from tests import HANG


def _attempt(store: Store, world_size: int, late: int | None = None) -> list[Store]:
    """What each rank gets, of which one may start later."""

    def one(rank: int) -> Store:
        time.sleep(0.3 if rank == late else 0.0)
        return store_of_this_attempt(store, rank, world_size, timedelta(seconds=HANG))

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_attempt_has_a_part_of_its_own(world_size: int, late: int | None) -> None:
    store = HashStore()
    for attempt in range(3):
        parts = _attempt(store, world_size, late if attempt else None)
        assert not parts[0].check(["address"]), "of an earlier attempt"
        parts[0].set("address", str(attempt))
        assert {part.get("address") for part in parts} == {str(attempt).encode()}


def test_a_rank_that_died_while_it_asked_is_not_taken_for_one_that_has_come() -> None:
    store = HashStore()
    with pytest.raises(MissingRanksError, match=r"Expected 2 ranks within .* got all but rank 0"):
        store_of_this_attempt(store, 1, 2, timedelta(seconds=0.1))
    with pytest.raises(MissingRanksError, match=r"Expected 2 ranks within .* got all but rank 1"):
        store_of_this_attempt(store, 0, 2, timedelta(seconds=0.3))
    assert len(_attempt(store, 2)) == 2


def _names_those_that_have_not_come(missing: set[int]) -> bool:
    store = HashStore()
    _attempt(store, 4)  # an attempt in which all came

    def one(rank: int) -> list[int]:
        with pytest.raises(MissingRanksError) as caught:
            store_of_this_attempt(store, rank, 4, timedelta(seconds=3.0))
        return list(caught.value.ranks)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, set(range(4)) - missing)) == [sorted(missing)] * (4 - len(missing))


def test_every_rank_that_has_come_names_those_that_have_not() -> None:
    with ThreadPoolExecutor(4) as jobs:  # they wait for time-outs
        assert all(jobs.map(_names_those_that_have_not_come, [{1}, {2}, {1, 3}, {0}]))


def test_missing_variables_of_the_environment_are_refused_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    missing = r"missing from the environment: WORLD_SIZE, MASTER_ADDR, MASTER_PORT of .* Start the script with torchrun"
    with pytest.raises(RuntimeError, match=missing):
        launch.init_process_group("gloo")
