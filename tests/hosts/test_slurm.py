"""A job in an allocation of a Slurm of one node."""

import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hosts.job import SCRIPT, assert_nobody_left, finish, launched, wait_for_lines
from tests.hosts.network import needs

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={next}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def allocation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What to put in front of a command so that it runs in an allocation of one node and two tasks."""
    needs("slurmctld", "slurmd", "munged", "salloc", "srun")
    folder = Path("/tmp") / f"ddp_zero-slurm-{secrets.token_hex(4)}"  # munge wants a folder whose parents others trust
    folder.mkdir(mode=0o755)
    cpus = max(2, os.cpu_count() or 1)
    port = 20000 + os.getpid() % 10000
    values = {"host": socket.gethostname(), "folder": folder, "port": port, "next": port + 1, "cpus": cpus}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(**values))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    files = {"key": "key", "socket": "sock", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={folder}/munge.{end}" for name, end in files.items()]
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        for command in (f"/usr/sbin/munged --force {shlex.join(options)}", "/usr/sbin/slurmctld", "/usr/sbin/slurmd"):
            subprocess.run(shlex.split(command), check=True, timeout=60)
        _wait_until_idle()
        yield ("salloc", "--quiet", "--nodes=1", "--ntasks=2")
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)
        time.sleep(1)
        del os.environ["SLURM_CONF"]
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_idle() -> None:
    for _ in range(100):
        shown = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False).stdout.split()
        if shown == ["idle"]:
            return
        time.sleep(0.2)
    pytest.skip(f"Slurm does not come up here: {shown}")


@pytest.fixture
def token() -> str:
    return f"token-{secrets.token_hex(8)}"


def in_allocation(folder: Path) -> list[str]:
    (folder / "variables").write_text("GREETING=a node\n")
    (folder / "wait.py").write_text(SCRIPT)
    return [f"--env-file={folder / 'variables'}", "--grace=5"]


def test_the_nodes_and_tasks_are_those_of_the_allocation(
    allocation: tuple[str, ...], tmp_path: Path, token: str
) -> None:
    with launched(tmp_path, *in_allocation(tmp_path), "wait.py", token, "none", prefix=allocation) as process:
        code, out, err = finish(process)
    host = socket.gethostname()
    assert (code, sorted(out.splitlines())) == (0, [f"{host}: rank {rank} of 2 on a node" for rank in range(2)]), err
    assert_nobody_left(token, within=0)


def test_a_rank_that_fails_gives_its_exit_code(allocation: tuple[str, ...], tmp_path: Path, token: str) -> None:
    with launched(tmp_path, *in_allocation(tmp_path), "wait.py", token, "1", prefix=allocation) as process:
        code, _, err = finish(process)
    assert (code, "ended with exit code 1" in err) == (1, True)
    assert_nobody_left(token, within=5)


@pytest.mark.parametrize("ends", ["interrupted", "killed", "cancelled"])
def test_the_end_of_the_launcher_or_of_the_allocation_leaves_nobody(
    allocation: tuple[str, ...], tmp_path: Path, token: str, ends: str
) -> None:
    with launched(tmp_path, *in_allocation(tmp_path), "wait.py", token, "never", prefix=allocation) as process:
        wait_for_lines(process, 2, "rank")
        if ends == "cancelled":
            subprocess.run(["scancel", "--state=RUNNING", f"--user={os.getuid()}"], check=True)
        for path in Path("/proc").glob("[0-9]*/cmdline") if ends != "cancelled" else ():
            with suppress(OSError):
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.search(rf"^\S+ -m ddp_zero\.launch .*{token}", line):
                    os.kill(int(path.parent.name), signal.SIGINT if ends == "interrupted" else signal.SIGKILL)
        if ends == "interrupted":
            code, _, err = finish(process)
            assert (code, "got SIGINT; stopping" in err) == (130, True)
        assert_nobody_left(token, within=30)
