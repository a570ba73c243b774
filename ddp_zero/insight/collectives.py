"""This process's collectives as recorded by torch's flight recorder, including DDP's and the script's."""

import json
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_LAST = 64


def last_collectives() -> list[list[Any]] | None:
    """The newest collectives, oldest first: process group, number in it, operation, sizes, begin (ns), unfinished.

    Gloo and NCCL record them unless ``TORCH_FR_BUFFER_SIZE`` is 0; Gloo records no messages between two ranks. None if
    this torch, this backend or the environment records none.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return None
    entries = json.loads(dump()).get("entries", [])
    collectives = [entry for entry in entries if not entry["is_p2p"]]
    return [_row(entry) for entry in collectives[-_LAST:]] or None


def _row(entry: dict[str, Any]) -> list[Any]:
    operation = entry["profiling_name"].rpartition(":")[2]
    goes_on = not entry["retired"] and entry["state"] != "completed"
    sizes = json.dumps(entry["input_sizes"])
    return [
        *(str(entry["process_group"][0]), entry["collective_seq_id"], operation, sizes, entry["time_created_ns"]),
        goes_on,
    ]
