"""Names the ranks that are missing from a collective that has failed; the backend's error does not.

Ranks in the collective fail as well, and each notes that in the group's store. Those that have not within a few seconds
are missing; of these, only those whose connection is closed, unless this rank's own time-out has closed all of them.
With four ranks or more, ranks that still wait for their neighbours may be named, too.
"""

import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work, get_backend_config, get_global_rank
from torch.futures import Future

from ddp_zero.core.comm.exchange import lost_peer_error
from ddp_zero.core.comm.groups import store_of

GRACE_SECONDS = 2.0
_PROBE_TAG = 0x7EE1
_one_asks = threading.Lock()
_found: weakref.WeakKeyDictionary[ProcessGroup, list[int]] = weakref.WeakKeyDictionary()
_probes: list[tuple[Tensor, Work]] = []  # kept: on Gloo freeing the buffer of a pending message breaks the connection


def name_missing_ranks(group: ProcessGroup, bucket: int, future: Future[Any]) -> Future[Tensor]:
    """The reduction of a bucket, with an error that names the missing ranks."""
    return future.then(partial(_checked, weakref.ref(group), bucket))


def _checked(reference: Callable[[], ProcessGroup | None], bucket: int, done: Future[Any]) -> Tensor:
    try:
        reduced = done.value()
    except RuntimeError as error:
        if (alive := reference()) is None:
            raise
        raise lost_collective_error(alive, f"the reduction of bucket {bucket}", error) from error
    found: Tensor = reduced[0] if isinstance(reduced, list | tuple) else reduced
    return found


def lost_collective_error(group: ProcessGroup, what: str, error: RuntimeError) -> RuntimeError:
    """The error of a failed collective, which names the missing ranks as far as they can be found."""
    with _one_asks:  # threads of several buckets: the first one waits for all
        if group not in _found:
            _found[group] = _find_missing(group, re.search("timed out|timeout", str(error), re.IGNORECASE) is not None)
        names = ", ".join(f"rank {rank} (global rank {get_global_rank(group, rank)})" for rank in _found[group])
    return lost_peer_error(names or "every rank", what, error)


def forget_failures(group: ProcessGroup) -> None:
    """Forget failures of this rank, also of an earlier attempt that had the same store."""
    _found.pop(group, None)
    with suppress(RuntimeError):  # of a backend without a store
        store_of(group).set(_failure_key(group.rank()), "")


def _find_missing(group: ProcessGroup, has_timed_out: bool) -> list[int]:
    silent = [rank for rank in range(group.size()) if rank != group.rank()]
    is_known = False
    with suppress(RuntimeError):  # the store may be gone with the rank that hosts it
        store = store_of(group)
        store.set(_failure_key(group.rank()), "yes")
        deadline = time.monotonic() + GRACE_SECONDS
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            have_noted = [key for key in map(_failure_key, silent) if store.check([key]) and store.get(key)]
            silent = [rank for rank in silent if _failure_key(rank) not in have_noted]
        is_known = True
    closed = [] if has_timed_out else [rank for rank in silent if _is_closed(group, rank)]
    return closed or (silent if is_known else [])


def _is_closed(group: ProcessGroup, rank: int) -> bool:
    if "cpu:gloo" not in str(get_backend_config(group)):
        return False
    byte = torch.empty(1, dtype=torch.uint8, device="cpu")
    try:
        _probes.append((byte, group.recv([byte], rank, _PROBE_TAG)))  # posted only where the connection is open
    except RuntimeError:
        return True
    return False


def _failure_key(rank: int) -> str:
    return f"ddp_zero/failed/{rank}"
