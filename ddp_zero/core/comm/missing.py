"""Names the ranks that are missing from a collective that has failed; the backend's error does not.

Ranks in the collective fail as well, and each notes its failure in the group's store. Ranks that have noted none within
a few seconds are missing; if connections to some of them are closed, only these, unless this rank's own time-out has
closed all connections. With four ranks or more, ranks that still wait for their neighbours may be named, too.
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
_TAG_WITHOUT_SENDER = 0x7EE1  # a receive with it never ends; to post it fails if the connection is closed
_search_lock = threading.Lock()
_missing_ranks: weakref.WeakKeyDictionary[ProcessGroup, list[int]] = weakref.WeakKeyDictionary()
_probes: list[tuple[Tensor, Work]] = []  # kept: on Gloo freeing the buffer of a pending message breaks the connection


def name_missing_ranks(group: ProcessGroup, bucket: int, future: Future[Any]) -> Future[Tensor]:
    """The future of a bucket's reduction, with an error that names the missing ranks; a hook's own error stays."""
    return future.then(partial(_value_or_named_error, weakref.ref(group), bucket))


def _value_or_named_error(reference: Callable[[], ProcessGroup | None], bucket: int, done: Future[Any]) -> Tensor:
    try:
        reduced = done.value()
    except RuntimeError as error:
        if (alive := reference()) is None or _is_of_hook(alive, error):
            raise
        raise lost_collective_error(alive, f"the reduction of bucket {bucket}", error) from error
    bucket_sum: Tensor = reduced[0] if isinstance(reduced, list | tuple) else reduced
    return bucket_sum


def lost_collective_error(group: ProcessGroup, what: str, error: RuntimeError) -> RuntimeError:
    """The error of a failed collective, which names the missing ranks as far as they can be found."""
    with _search_lock:  # threads of several buckets: the first thread waits for the ranks, the others take its answer
        if group not in _missing_ranks:
            _missing_ranks[group] = _find_missing(group, _has_timed_out(error))
        names = ", ".join(f"rank {rank} (global rank {get_global_rank(group, rank)})" for rank in _missing_ranks[group])
    return lost_peer_error(names or "every rank", what, error)


def _has_timed_out(error: RuntimeError) -> bool:
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def _is_of_hook(group: ProcessGroup, error: RuntimeError) -> bool:
    """True if code of a wrapped hook has raised: on Gloo, no time-out has passed and all connections are open."""
    if not _is_gloo(group) or _has_timed_out(error):
        return False
    return not any(_is_closed(group, rank) for rank in range(group.size()) if rank != group.rank())


def forget_failures(group: ProcessGroup) -> None:
    """Forget failures of this rank, also of an earlier attempt that had the same store."""
    _missing_ranks.pop(group, None)
    with suppress(RuntimeError):  # the backend has no store
        store_of(group).set(_failure_key(group.rank()), "")


def _find_missing(group: ProcessGroup, has_timed_out: bool) -> list[int]:
    """Ranks that have not noted a failure; of these the disconnected ranks, if there are any and no time-out passed."""
    silent = [rank for rank in range(group.size()) if rank != group.rank()]
    is_known = False
    with suppress(RuntimeError):  # the store may be gone with the rank that hosts it
        store = store_of(group)
        store.set(_failure_key(group.rank()), "yes")
        deadline = time.monotonic() + GRACE_SECONDS
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            noted = [key for key in map(_failure_key, silent) if store.check([key]) and store.get(key)]
            silent = [rank for rank in silent if _failure_key(rank) not in noted]
        is_known = True
    closed = [] if has_timed_out else [rank for rank in silent if _is_closed(group, rank)]
    return closed or (silent if is_known else [])


def _is_gloo(group: ProcessGroup) -> bool:
    return "cpu:gloo" in str(get_backend_config(group))


def _is_closed(group: ProcessGroup, rank: int) -> bool:
    if not _is_gloo(group):
        return False
    byte = torch.empty(1, dtype=torch.uint8, device="cpu")
    try:
        # posted only where the connection is open
        _probes.append((byte, group.recv([byte], rank, _TAG_WITHOUT_SENDER)))
    except RuntimeError:
        return True
    return False


def _failure_key(rank: int) -> str:
    return f"ddp_zero/failed/{rank}"
