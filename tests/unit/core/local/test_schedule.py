"""Which bucket is copied, stepped and copied back when, in plain ints.

Actions are written as text: ``2>A`` copies bucket 2 into buffer A, ``2?`` waits for it, ``2!`` steps it and starts its
copy back, ``A?`` waits until buffer A is back.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.core.local.copy_pipeline import Action, AwaitCopyBack, AwaitHost, CopyToHost, Schedule


def written(actions: Sequence[Action]) -> str:
    words = []
    for action in actions:
        buffer = "ABCDEFGH"[action.buffer]
        if isinstance(action, AwaitCopyBack):
            words.append(f"{buffer}?")
        elif isinstance(action, CopyToHost):
            words.append(f"{action.bucket}>{buffer}")
        else:
            words.append(f"{action.bucket}{'?' if isinstance(action, AwaitHost) else '!'}")
    return " ".join(words)


def steps(buffers: int, buckets: int, count: int = 1) -> list[str]:
    schedule, found = Schedule(buffers), []
    for _ in range(count):
        found += [written(schedule.submit(bucket)) for bucket in range(buckets)]
        found.append(written(schedule.drain()))
    return found


def test_with_one_buffer_every_copy_is_awaited_before_the_next() -> None:
    assert steps(1, 3) == ["0>A 0? 0!", "A? 1>A 1? 1!", "A? 2>A 2? 2!", ""]


def test_with_two_a_bucket_is_stepped_while_the_next_one_is_copied() -> None:
    assert steps(2, 4) == ["0>A", "1>B 0? 0!", "A? 2>A 1? 1!", "B? 3>B 2? 2!", "3? 3!"]


def test_with_three_a_buffer_has_a_whole_bucket_of_time_to_come_back() -> None:
    assert steps(3, 5) == ["0>A", "1>B 0? 0!", "2>C 1? 1!", "A? 3>A 2? 2!", "B? 4>B 3? 3!", "4? 4!"]


def test_a_copy_back_is_awaited_when_its_buffer_is_used_again() -> None:
    assert steps(3, 1, count=4) == ["0>A", "0? 0!", "0>B", "0? 0!", "0>C", "0? 0!", "A? 0>A", "0? 0!"]


def test_abandon_awaits_all_copies_and_steps_no_bucket() -> None:
    schedule = Schedule(3)
    for bucket in range(3):
        schedule.submit(bucket)
    assert written(schedule.abandon()) == "2? A? B?"
    assert written(schedule.abandon()) == ""
    assert written(schedule.submit(7)) == "7>A"


def test_a_schedule_without_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 buffer, got 0"):
        Schedule(0)


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_any_schedule_steps_buckets_once_in_order_in_free_buffers(buffers: int, counts: list[int]) -> None:
    """Buckets are stepped once and in order; no buffer is written to before it is back, or read before it is full."""
    schedule = Schedule(buffers)
    state: dict[int, str] = {}
    for count in counts:
        stepped: list[int] = []
        for actions in (*map(schedule.submit, range(count)), schedule.drain()):
            for action in actions:
                before = state.get(action.buffer, "free")
                if isinstance(action, AwaitCopyBack):
                    assert before == "going"
                    state[action.buffer] = "free"
                elif isinstance(action, CopyToHost):
                    assert before == "free"
                    state[action.buffer] = f"coming {action.bucket}"
                elif isinstance(action, AwaitHost):
                    assert before == f"coming {action.bucket}"
                    state[action.buffer] = f"full {action.bucket}"
                else:
                    assert before == f"full {action.bucket}"
                    state[action.buffer] = "going"
                    stepped.append(action.bucket)
        assert stepped == list(range(count))
        assert len(state) <= buffers
