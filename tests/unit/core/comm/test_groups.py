"""Time-outs of groups, in a job of one process."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup, constants

from ddp_zero.core.comm.groups import inherit_job_time_out, message_time_out, time_out_of

JOB = timedelta(seconds=40)


@pytest.fixture
def job() -> Iterator[ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=JOB)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def test_a_group_with_torchs_default_takes_the_jobs_for_collectives_and_messages(job: ProcessGroup) -> None:
    group = dist.new_group([0], timeout=constants.default_pg_timeout)
    assert message_time_out(group) is None
    inherit_job_time_out(group)
    assert time_out_of(group) == JOB
    assert message_time_out(group) == JOB, "messages of Gloo do not follow the time-out of their group"


def test_a_time_out_that_somebody_has_chosen_is_kept(job: ProcessGroup) -> None:
    for chosen in (timedelta(minutes=7), timedelta(seconds=3)):
        group = dist.new_group([0], timeout=chosen)
        inherit_job_time_out(group)
        assert (time_out_of(group), message_time_out(group)) == (chosen, None)


def test_the_group_of_the_job_is_left_alone(job: ProcessGroup) -> None:
    inherit_job_time_out(job)
    assert (time_out_of(job), message_time_out(job)) == (JOB, None)
