"""The arithmetic of `opt.stats()` and of `opt.check_agreement()`, on plain numbers."""

import math

import pytest
import torch

from ddp_zero.core.comm.recorder import Interval
from ddp_zero.insight.agreement import find_diverging
from ddp_zero.insight.stats import EXPOSED, OnDevice, ReadLater, difference, seconds


def test_seconds_are_those_of_the_phases_and_exposed_communication_is_the_sum_of_waits() -> None:
    found = seconds({"wait_reduce": 2_000_000_000, "wait_sync": 500_000_000, "wait_errors": 1_000_000, "step": 7})
    assert found["wait_reduce_s"] == 2.0
    assert found["wait_sync_s"] == 0.5
    assert found["local_step_s"] == 0.0
    assert found["exposed_communication_s"] == pytest.approx(2.501)
    assert "step" not in EXPOSED


def test_difference_takes_a_missing_number_as_zero() -> None:
    assert difference({"sent": 5, "sync": 7}, {"sent": 3}) == {"sent": 2, "sync": 7}


def test_the_last_step_of_a_device_is_the_last_that_is_complete() -> None:
    device = OnDevice()
    device.add([Interval("wait_sync", 1, 0.5), Interval("local_step", 1, 1.0)])
    assert device.last["local_step_s"] == 0.0, "step 1 may go on"
    device.add([Interval("local_step", 2, 4.0)])
    assert (device.last["local_step_s"], device.last["wait_sync_s"]) == (1.0, 0.5)
    assert device.total()["local_step_s"] == 5.0
    device.add([Interval("local_step", 3, 4.0)])
    assert (device.last["local_step_s"], device.last["wait_sync_s"]) == (4.0, 0.0)


def test_waits_beside_the_training_loop_are_not_exposed() -> None:
    device = OnDevice()
    waits = [Interval("wait_reduce", 1, 3.0, is_on_side_stream=True), Interval("wait_sync", 1, 2.0)]
    device.add([*waits, Interval("join_streams", 1, 0.25), Interval("local_step", 1, 9.0, is_on_side_stream=True)])
    assert device.total()["wait_reduce_s"] == 3.0
    assert device.total()["exposed_communication_s"] == 2.25


def test_a_number_on_the_host_is_read_at_once() -> None:
    later = ReadLater()
    assert math.isnan(later.read(None))
    assert later.read(2.5) == 2.5
    assert later.read(torch.tensor(1.5)) == 1.5


def test_ranks_in_a_minority_have_diverged() -> None:
    assert find_diverging([[1, 2, 3]] * 3) == {}
    assert find_diverging([[1, 2, 3], [1, 9, 3], [1, 2, 3], [8, 2, 3]]) == {0: [3], 1: [1]}
    assert find_diverging([[5], [4], [4]]) == {0: [0]}, "the lowest rank is not always right"
    assert find_diverging([[5], [4]]) == {0: [1]}, "of two the lower one counts as usual"
    assert find_diverging([[5], [4], [3]]) == {0: [1, 2]}
    assert find_diverging([[7, 7]]) == {}
