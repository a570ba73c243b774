"""Starts the ranks of a benchmark, and leaves none behind."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANK: Sequence[str] = ("-m", "benchmarks.race.rank")
POLL_SECONDS = 0.05


def run_ranks(
    job: Mapping[str, Any],
    prefixes: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    program: Sequence[str] = RANK,
) -> list[Any]:
    """The results of each rank, in rank order; output of ranks goes to standard error.

    Args:
        job: passed to every rank.
        prefixes: prefix of each rank's command line.
        environment: variables of all ranks, added to this process's.
        program: Python's arguments for a rank, before the folder and its number.

    Raises:
        RuntimeError: if a rank fails. All other ranks are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps({**job, "ranks": len(prefixes)}))
        # ranks find the package, and this process's further paths, from any folder
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, prefix in enumerate(prefixes):
                command = [*prefix, sys.executable, *program, folder, str(rank)]
                # in sessions of their own: Ctrl-C is for this process, which then ends them
                processes.append(subprocess.Popen(command, env=variables, stdout=2, start_new_session=True))
            wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"found-{rank}.json").read_text()) for rank in range(len(prefixes))]


def wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Until all have ended, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"Expected rank {rank} to end well, got exit code {code}.")
        if None not in codes:
            return
        time.sleep(POLL_SECONDS)
