"""Waiting for messages, with works that end as a test says: order, errors that name the peer, and limits."""

import gc
import itertools
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from ddp_zero.core.comm.exchange import ROUND, ROUND_BITS, Exchange, FailedWork, LocalWork, base_tag_of, tag_of

CLOSED = "Connection closed by peer [127.0.0.1]:1234"


class Ends:
    """A message that is complete, raises, or is interrupted by a signal handler before or after its completion."""

    def __init__(self, log: list[Any], name: str, *raised: BaseException, completes: bool = False) -> None:
        self.log, self.name, self.raised, self.completes = log, name, list(raised), completes

    def wait(self, *limit: timedelta) -> None:
        self.log.append((self.name, *limit))
        if self.raised:
            raise self.raised.pop(0)

    def is_completed(self) -> bool:
        return self.completes


def _exchange(*works: Any, limit: timedelta | None = None) -> Exchange:
    names = [(lambda rank=rank: f"rank {rank}") for rank, _ in enumerate(works)]
    return Exchange(works, names, [torch.zeros(1)], limit)


def test_messages_are_waited_for_once_and_in_order() -> None:
    log: list[Any] = []
    both = _exchange(*(Ends(log, name) for name in "abc"))
    both.wait("a test")
    both.wait("a test")
    assert log == [("a",), ("b",), ("c",)]


def test_each_wait_gets_the_limit_where_there_is_one() -> None:
    log: list[Any] = []
    limit = timedelta(seconds=5)
    _exchange(Ends(log, "a"), Ends(log, "b"), limit=limit).wait("a test")
    assert log == [("a", limit), ("b", limit)]


@pytest.mark.parametrize(("completes", "waits"), [(False, ["a", "a", "b"]), (True, ["a", "b"])])
def test_an_interrupted_wait_goes_on_where_it_was(completes: bool, waits: list[str]) -> None:
    """Gloo would wait for a second message if a completed message were waited for again."""
    log: list[Any] = []
    both = _exchange(Ends(log, "a", KeyboardInterrupt(), completes=completes), Ends(log, "b"))
    with pytest.raises(KeyboardInterrupt):
        both.wait("a test")
    both.wait("a test")
    assert [name for (name,) in log] == waits


@pytest.mark.parametrize(
    ("error", "hint"), [(CLOSED, True), ("Connection reset by peer", True), ("Timed out waiting 5000ms", False)]
)
def test_an_error_names_the_peer_the_exchange_and_whether_the_peer_has_ended(error: str, hint: bool) -> None:
    lost = _exchange(Ends([], "a"), Ends([], "b", RuntimeError(error)))
    with pytest.raises(RuntimeError, match=r"^Expected rank 1 to take part in the sync of bucket 3, got: ") as caught:
        lost.wait("the sync of bucket 3")
    assert error in str(caught.value)
    assert ("it names the rank that was lost first" in str(caught.value)) is hint
    assert "[ZERO-503]" in str(caught.value)


def test_a_message_that_could_not_be_posted_raises_when_it_is_waited_for() -> None:
    lost = _exchange(Ends([], "a"), FailedWork(RuntimeError(CLOSED)), limit=timedelta(seconds=5))
    with pytest.raises(RuntimeError, match=r"Expected rank 1 to take part in a test.*Connection closed"):
        lost.wait("a test")
    assert not FailedWork(RuntimeError(CLOSED)).is_completed()


def test_the_peer_that_is_waited_for_is_named_while_it_is() -> None:
    named: list[str] = []

    class Watched(Ends):
        def wait(self, *limit: timedelta) -> None:
            named.append(messages.awaited())
            super().wait(*limit)
            self.completes = True

    messages = _exchange(Watched([], "a"), Watched([], "b"), Watched([], "c", RuntimeError(CLOSED)))
    with pytest.raises(RuntimeError, match="Expected rank 2"):
        messages.wait("a test")
    assert named == ["rank 0", "rank 1", "rank 2"]
    assert messages.awaited() == "rank 2"
    assert _exchange().awaited() == ""


@pytest.mark.parametrize("completes", [False, True])
def test_an_error_of_a_step_between_messages_is_raised_as_it_is(completes: bool) -> None:
    log: list[Any] = []
    step = Ends(log, "step", RuntimeError("of the step"), completes=completes)
    messages = Exchange([Ends(log, "a"), step, Ends(log, "b")], [lambda: "rank 0", None, lambda: "rank 1"], [])
    with pytest.raises(RuntimeError, match=r"^of the step$"):
        messages.wait("a test")
    messages.wait("a test")
    assert [name for (name,) in log] == (["a", "step", "b"] if completes else ["a", "step", "step", "b"])
    assert not messages.is_in_flight


def test_a_step_that_was_interrupted_is_not_repeated() -> None:
    log: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    step = LocalWork(
        [partial(log.append, "first"), interrupted, partial(log.append, "last")], RuntimeError("Interrupted.")
    )
    with pytest.raises(KeyboardInterrupt):
        step.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^Interrupted\.$"):
            step.wait()
    assert log == ["first"]
    assert not step.is_completed()


def test_memory_of_an_exchange_that_nobody_waited_for_is_kept() -> None:
    dropped, waited = _exchange(Ends([], "a")), _exchange(Ends([], "a"))
    waited.wait("a test")
    kept, freed = weakref.ref(dropped), weakref.ref(waited)
    del dropped, waited
    gc.collect()
    assert freed() is None
    found = kept()
    assert found is not None
    found.wait("a test")
    del found
    gc.collect()
    assert kept() is None


def test_tags_differ_by_round_subject_and_generation_within_their_range() -> None:
    cases = list(itertools.product(range(3), range(50), [(0,), (1,), (0, 1)]))
    tags = [tag_of(generation, round_, subject) for generation, round_, subject in cases]
    assert len(set(tags)) == len(cases)
    assert all(0x40000000 <= tag < 1 << 31 for tag in tags)
    assert base_tag_of(0, (1, 2)) == base_tag_of(0, (1, 2))


def test_tags_of_rounds_are_computed_of_one_digest() -> None:
    seed = base_tag_of(4, (0, 7))
    tags = [seed ^ round_ * ROUND & ROUND_BITS for round_ in range(5)]
    assert tags == [tag_of(4, round_, (0, 7)) for round_ in range(5)]
    assert len(set(tags)) == 5
