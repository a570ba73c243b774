"""One rank of a race, which `launch` starts: ``python -m benchmarks.race.rank FOLDER RANK``.

The folder has the job in ``job.json``.
"""

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.race.measuring import measure_memory, race
from benchmarks.race.recording import measure_recording
from benchmarks.race.wire import measure_wire

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
PHASES = {
    "race": race,
    "memory": measure_memory,
    "wire": measure_wire,
    "recording": measure_recording,
}
TIME_OUT = timedelta(minutes=5)


def main() -> None:
    """Join the job, run it, write the results to a file."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would end a rank whose parent was killed
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=job["ranks"], timeout=TIME_OUT)
    found = PHASES[job["phase"]](job)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads live as long as anything refers to the group; some exits would abort


if __name__ == "__main__":
    main()
