"""A job of one process, for tests with DDP or with collectives."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def job() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
