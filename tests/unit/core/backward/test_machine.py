"""The state machine of the step inside backward.

What is due is written as text: ``1 2 finish`` is to step buckets 1 and 2 and to end the step; ``all`` is a step of all
buckets after backward.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddp_zero.core.backward import overlap_machine as machine
from ddp_zero.core.backward.overlap_machine import OverlapMachine, Phase, Regime, turns

REST, RUNNING, REDUCED, WAITING, STEPPED = Phase
OVERLAPPED, DEFERRED, REDUCE_ONLY = Regime


def new_machine(lag: int | None = 1) -> OverlapMachine:
    return OverlapMachine(lag, "rank 7")


def bucket_arrives(machine: OverlapMachine, bucket: int, buckets: int, regime: Regime = OVERLAPPED) -> str:
    due = turns(regime, machine.lag, buckets)[bucket]
    if bucket == buckets - 1:
        machine.last_bucket_arrived()
    elif due and due.start == 0:
        machine.step_began()
    return " ".join([*map(str, due), *["finish"] * (machine.phase is STEPPED)])


def finish_backward(machine: OverlapMachine) -> str:
    return "all" if machine.backward_finished() else ""


def arrive(machine: OverlapMachine, buckets: int, regime: Regime = OVERLAPPED, count: int | None = None) -> list[str]:
    """A backward pass over so many buckets: all of them arrive, or the first ``count``."""
    machine.pass_began(regime)
    return [bucket_arrives(machine, bucket, buckets, regime) for bucket in range(buckets)[:count]]


def machine_in(phase: Phase, lag: int | None = 1) -> OverlapMachine:
    """A machine in a phase: RUNNING has seen two buckets of four, the others are between iterations or at an end."""
    machine = new_machine(lag)
    if phase is not REST:
        regime = {REDUCED: DEFERRED, WAITING: REDUCE_ONLY}.get(phase, OVERLAPPED)
        arrive(machine, 4, regime, count=2 if phase is RUNNING else None)
    if phase is WAITING:
        machine.backward_finished()
    assert machine.phase is phase
    return machine


# The table in the docstring


def begin(machine: OverlapMachine) -> str:
    machine.pass_began(OVERLAPPED)
    return ""


def last_bucket(machine: OverlapMachine) -> str:
    return f"{bucket_arrives(machine, 2, 4)} {bucket_arrives(machine, 3, 4)}"


def first_step() -> tuple[str, Phase]:
    machine = new_machine()
    return " ".join(arrive(machine, 4, count=2)).strip(), machine.phase


def last_bucket_deferred() -> tuple[str, Phase]:
    machine = new_machine()
    return " ".join(arrive(machine, 2, DEFERRED)).strip(), machine.phase


def reduced_only() -> tuple[str, Phase]:
    machine = new_machine()
    arrive(machine, 2, REDUCE_ONLY)
    return finish_backward(machine), machine.phase


def after(phase: Phase, event: Callable[[OverlapMachine], str | None]) -> tuple[str, Phase]:
    machine = machine_in(phase)
    return event(machine) or "", machine.phase


ROWS: list[tuple[str, str, str, Callable[[], tuple[str, Phase]], str]] = [
    ("REST", "pass_began", "RUNNING", lambda: after(REST, begin), ""),
    ("STEPPED", "pass_began", "RUNNING", lambda: after(STEPPED, begin), ""),
    ("RUNNING", "step_began", "RUNNING", first_step, "0"),
    ("RUNNING", "last_bucket_arrived", "STEPPED", lambda: after(RUNNING, last_bucket), "1 2 3 finish"),
    ("RUNNING", "last_bucket_arrived, deferred", "REDUCED", last_bucket_deferred, ""),
    ("REDUCED", "backward_finished", "STEPPED", lambda: after(REDUCED, finish_backward), "all"),
    ("REDUCED", "backward_finished, reduce only", "WAITING", reduced_only, ""),
    ("WAITING", "pass_began", "RUNNING", lambda: after(WAITING, begin), ""),
    ("WAITING", "step_taken", "REST", lambda: after(WAITING, OverlapMachine.step_taken), ""),
    ("WAITING", "due_step_taken", "STEPPED", lambda: after(WAITING, OverlapMachine.due_step_taken), ""),
    ("WAITING", "gradients_dropped", "REST", lambda: after(WAITING, OverlapMachine.gradients_dropped), ""),
    ("STEPPED", "step_called", "REST", lambda: after(STEPPED, OverlapMachine.step_called), ""),
    *(("any", "reset", "REST", lambda phase=phase: after(phase, OverlapMachine.reset), "") for phase in Phase),
]


@pytest.mark.parametrize(
    ("phase_after", "play", "actions"), [row[2:] for row in ROWS], ids=[f"{row[0]} {row[1]}" for row in ROWS]
)
def test_each_event_acts_as_its_row(phase_after: str, play: Callable[[], tuple[str, Phase]], actions: str) -> None:
    assert play() == (actions, Phase[phase_after])


def test_the_table_in_the_docstring_has_these_rows() -> None:
    lines = [line for line in (machine.__doc__ or "").splitlines() if line.startswith("    ")]
    rows = [tuple(re.split(r" {2,}", line.strip())[:3]) for line in lines]
    assert rows == [("phase", "event", "next phase"), *dict.fromkeys(row[:3] for row in ROWS)]


# What is stepped when


@pytest.mark.parametrize("regime", Regime)
@pytest.mark.parametrize("lag", [1, 2, None])
def test_a_pass_is_torn_from_the_first_bucket_that_is_due_to_the_last(lag: int | None, regime: Regime) -> None:
    machine = new_machine(lag)
    machine.pass_began(regime)
    due = turns(regime, lag, 5)
    for one in range(4):
        bucket_arrives(machine, one, 5, regime)
        assert machine.is_torn == any(due[: one + 1])
    bucket_arrives(machine, 4, 5, regime)
    assert not machine.is_torn


# What is refused


ILLEGAL: list[tuple[Phase, str, Callable[[OverlapMachine], object], str]] = [
    (REST, "last bucket", OverlapMachine.last_bucket_arrived, r"RUNNING at the last bucket, got REST \(rank 7\)"),
    (REST, "finished", OverlapMachine.backward_finished, r"phase REDUCED at the end of backward, got REST \(rank 7\)"),
    (REST, "step", OverlapMachine.step_called, r"STEPPED at opt\.step\(\), got REST \(rank 7\).*register_comm_hook"),
    (RUNNING, "finished", OverlapMachine.backward_finished, r"REDUCED at the end of backward, got RUNNING \(rank 7\)"),
    (RUNNING, "step", OverlapMachine.step_called, r"opt\.step\(\), got RUNNING \(rank 7\).*opt\.reset\(\)"),
    (REDUCED, "last bucket", OverlapMachine.last_bucket_arrived, r"RUNNING at the last bucket, got REDUCED \(rank 7\)"),
    (REDUCED, "step", OverlapMachine.step_called, r"opt\.step\(\), got REDUCED \(rank 7\).*opt\.reset\(\)"),
    (WAITING, "finished", OverlapMachine.backward_finished, r"REDUCED at the end of backward, got WAITING \(rank 7\)"),
    (STEPPED, "due step", OverlapMachine.due_step_taken, r"WAITING at a step that is due, got STEPPED \(rank 7\)"),
    (STEPPED, "last bucket", OverlapMachine.last_bucket_arrived, r"RUNNING at the last bucket, got STEPPED \(rank 7\)"),
    (STEPPED, "finished", OverlapMachine.backward_finished, r"REDUCED at the end of backward, got STEPPED \(rank 7\)"),
]


@pytest.mark.parametrize(
    ("phase", "event", "message"),
    [(phase, event, message) for phase, _, event, message in ILLEGAL],
    ids=[f"{phase.name}, {name}" for phase, name, _, _ in ILLEGAL],
)
def test_an_event_out_of_turn_is_refused_by_name_and_changes_nothing(
    phase: Phase, event: Callable[[OverlapMachine], object], message: str
) -> None:
    machine = machine_in(phase)
    with pytest.raises(RuntimeError, match=message):
        event(machine)
    assert machine.phase is phase


@pytest.mark.parametrize(
    ("phase", "turn"),
    [
        *((REST, "bucket 0"), (WAITING, "bucket 0"), (STEPPED, "bucket 0")),
        *((RUNNING, "bucket 2"), (REDUCED, "the end of backward")),
    ],
)
def test_the_error_for_a_bucket_out_of_turn_says_whose_turn_it_is(phase: Phase, turn: str) -> None:
    message = str(machine_in(phase).out_of_order(3, 2))
    assert message.startswith(f"Expected {turn} next, got bucket 3 (rank 7, phase {phase.name}).")
    assert "opt.reset()" in message


@pytest.mark.parametrize("regime", Regime)
def test_a_second_backward_is_refused_at_its_first_bucket_where_the_user_joins(regime: Regime) -> None:
    machine = machine_in(STEPPED)
    machine.step_called()
    arrive(machine, 2)
    with pytest.raises(
        RuntimeError, match=r"opt\.step\(\).*got a second backward pass \(rank 7\).*overlap=False.*ddp\.no_sync\(\)"
    ):
        arrive(machine, 2, regime)
    assert machine.phase is STEPPED
    machine.step_called()
    assert arrive(machine, 2) == ["", "0 1 finish"]


@pytest.mark.parametrize("backwards", [2, 5])
def test_opt_step_after_several_backwards_is_refused_once_and_required_after_each_from_then_on(backwards: int) -> None:
    machine = new_machine()
    for _ in range(backwards):
        arrive(machine, 2)
    with pytest.raises(
        RuntimeError,
        match=rf"called once for {backwards} backward passes that .*\(rank 7\).*ddp\.no_sync\(\).*overlap=False",
    ):
        machine.step_called()
    assert machine.phase is REST
    for _ in range(2):
        assert arrive(machine, 2) == ["", "0 1 finish"]
        machine.step_called()
    arrive(machine, 2)
    with pytest.raises(RuntimeError, match=r"got a second backward pass"):
        arrive(machine, 2)


# Steps of the other ranks, shadowed by a rank that has no inputs left under torch's Join


@pytest.mark.parametrize("calls_step", [False, True])
def test_a_shadowed_step_ends_its_pass_and_is_no_missing_call_of_opt_step(calls_step: bool) -> None:
    machine = new_machine()
    if calls_step:
        arrive(machine, 2)
        machine.step_called()
    for _ in range(3):
        assert arrive(machine, 2) == ["", "0 1 finish"]
        machine.step_shadowed()
        assert machine.phase is REST
    arrive(machine, 2)
    assert machine.backwards_since_step == 1, "the shadowed passes are not counted: opt.step() would raise ZERO-307"
    machine.step_called()
    assert machine.phase is REST


def test_a_shadowed_step_does_not_make_calls_of_opt_step_required() -> None:
    machine = machine_in(STEPPED)
    machine.step_shadowed()
    for _ in range(2):
        arrive(machine, 2)
    assert machine.phase is STEPPED


# Dropping an iteration


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("lag", [None, 1])
def test_after_a_reset_in_any_phase_the_next_iteration_is_a_whole_one(phase: Phase, lag: int | None) -> None:
    machine = machine_in(phase, lag)
    machine.reset()
    assert machine.phase is REST
    assert arrive(machine, 3) == (["", "", "0 1 2 finish"] if lag is None else ["", "0", "1 2 finish"])
    with pytest.raises(RuntimeError, match=r"once for 2 .*\[ZERO-307\]$") if phase is STEPPED else nullcontext():
        machine.step_called()


def test_a_due_step_after_a_reset_is_refused_once_for_the_pass_that_had_stepped() -> None:
    machine = machine_in(STEPPED)
    machine.reset()
    with pytest.raises(RuntimeError, match=r"once for 2 .*\[ZERO-307\]$"):
        machine.check_due_step()
    machine.check_due_step()


def test_a_reset_keeps_calls_of_opt_step_required() -> None:
    machine = machine_in(STEPPED)
    machine.step_called()
    arrive(machine, 2)
    machine.reset()
    arrive(machine, 2)
    with pytest.raises(RuntimeError, match=r"got a second backward pass"):
        arrive(machine, 2)


# Any sequence of events


class Loop(RuleBasedStateMachine):
    """A training loop that does what is legal in any order, and now and then something that is not."""

    @initialize(lag=st.none() | st.integers(1, 4))
    def build(self, lag: int | None) -> None:
        self.lag = lag
        self.machine = new_machine(lag)
        self.phase = REST
        self.calls_step = False
        self.uncalled = 0
        self.arrived = 0

    @precondition(lambda self: self.may_begin())
    @rule(buckets=st.integers(1, 6), regime=st.sampled_from(Regime))
    def backward(self, buckets: int, regime: Regime) -> None:
        self.buckets, self.regime, self.arrived = buckets, regime, 0
        self.stepped: list[int] = []
        self.uncalled += regime is not REDUCE_ONLY
        self.machine.pass_began(regime)
        self.phase = RUNNING

    def may_begin(self) -> bool:
        return self.phase in (REST, WAITING) or (self.phase is STEPPED and not self.calls_step)

    @precondition(lambda self: self.phase is RUNNING)
    @rule()
    def bucket(self) -> None:
        index, is_last = self.arrived, self.arrived == self.buckets - 1
        due = turns(self.regime, self.lag, self.buckets)[index]
        bucket_arrives(self.machine, index, self.buckets, self.regime)
        self.arrived += 1
        if self.regime is not OVERLAPPED:
            assert not due
            self.phase = REDUCED if is_last else RUNNING
            return
        for stepped in due:
            assert stepped == len(self.stepped)
            assert stepped < self.arrived
            newer = self.arrived - 1 - stepped
            assert is_last or (self.lag is not None and newer >= self.lag)
            self.stepped.append(stepped)
        assert (self.machine.phase is STEPPED) == is_last
        if is_last:
            assert self.stepped == list(range(self.buckets))
            self.phase = STEPPED
        elif self.lag is not None:
            assert self.stepped == list(range(max(0, self.arrived - self.lag))), "the step fell behind"

    @precondition(lambda self: self.phase is REDUCED)
    @rule()
    def reducer_is_done(self) -> None:
        assert self.machine.backward_finished() == (self.regime is DEFERRED)
        self.phase = STEPPED if self.regime is DEFERRED else WAITING

    @precondition(lambda self: self.phase is WAITING)
    @rule()
    def take_due_step(self) -> None:
        self.machine.due_step_taken()
        self.phase, self.uncalled = STEPPED, self.uncalled + 1

    @precondition(lambda self: self.phase in (WAITING, REST))
    @rule(used=st.booleans())
    def use_or_drop(self, used: bool) -> None:
        if used:
            self.machine.step_taken()
        else:
            self.machine.gradients_dropped()
        self.phase, self.calls_step = REST, self.calls_step or used

    @precondition(lambda self: self.phase is STEPPED)
    @rule()
    def step(self) -> None:
        if self.uncalled > 1:
            with pytest.raises(RuntimeError, match=f"for {self.uncalled} backward"):
                self.machine.step_called()
        else:
            self.machine.step_called()
        self.phase, self.calls_step, self.uncalled = REST, True, 0

    @precondition(lambda self: self.phase is STEPPED)
    @rule()
    def shadow(self) -> None:
        self.machine.step_shadowed()
        self.phase, self.uncalled = REST, 0

    @rule()
    def reset(self) -> None:
        self.machine.reset()
        if self.calls_step:
            self.uncalled = 0
        elif self.phase not in (REST, STEPPED):
            self.uncalled -= self.regime is not REDUCE_ONLY
        self.phase = REST

    @precondition(lambda self: self.phase is not RUNNING)
    @rule()
    def last_bucket_out_of_turn(self) -> None:
        with pytest.raises(RuntimeError, match=f"got {self.phase.name}"):
            self.machine.last_bucket_arrived()

    @precondition(lambda self: self.phase is not STEPPED)
    @rule()
    def step_out_of_turn(self) -> None:
        with pytest.raises(RuntimeError, match=f"got {self.phase.name}"):
            self.machine.step_called()

    @precondition(lambda self: self.phase is not REDUCED)
    @rule()
    def reducer_out_of_turn(self) -> None:
        with pytest.raises(RuntimeError, match=f"got {self.phase.name}"):
            self.machine.backward_finished()

    @invariant()
    def the_phase_is_the_models(self) -> None:
        assert self.machine.phase is self.phase


Loop.TestCase.settings = settings(stateful_step_count=40)
TestAnySequenceOfEvents = Loop.TestCase
