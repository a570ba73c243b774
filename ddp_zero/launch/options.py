"""The command line of ``python -m ddp_zero launch`` as a value."""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

PROGRAM = "python -m ddp_zero launch"
LAUNCHERS = ("local", "ssh", "pdsh", "slurm", "mpirun")

_DESCRIPTION = "Start torchrun on every host of a job, and stop it everywhere when it fails anywhere."
_EPILOG = """\
Without --hostfile, and outside a Slurm allocation, the job runs on this machine. The exit code is that of the first
host that failed, 128 and its number after a signal, and 2 if nothing was started."""


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        hostfile: a path, or None.
        include: a filter of hosts and slots, or "".
        exclude: a filter of hosts and slots, or "".
        num_nodes: how many hosts; None: all.
        nproc: how many processes on each; None: one for each slot.
        master_addr: the address of the first host; None: found.
        master_port: a port on it; None: found.
        launcher: one of `LAUNCHERS`; None: found.
        max_restarts: how often torchrun restarts the workers.
        env_files: files of variables.
        ssh_args: options for ssh.
        python: the interpreter, at the same path on every host.
        lost_after: seconds of silence after which host and launcher give each other up.
        grace: seconds between asking processes to end and killing them.
        dry_run: only print the commands.
        script: what torchrun is to run: its own ``--module`` or ``--no-python``, the script, and its arguments.
    """

    hostfile: str | None
    include: str
    exclude: str
    num_nodes: int | None
    nproc: int | None
    master_addr: str | None
    master_port: int | None
    launcher: str | None
    max_restarts: int
    env_files: tuple[str, ...]
    ssh_args: tuple[str, ...]
    python: str
    lost_after: float
    grace: float
    dry_run: bool
    script: tuple[str, ...]


def parse(arguments: Sequence[str], python: str) -> Options:
    """The options in a command line; wrong ones end the process with a message and exit code 2.

    Args:
        arguments: without the program's name.
        python: the interpreter unless one is named.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    _add_hosts(parser)
    _add_torchrun(parser)
    _add_reach(parser, python)
    found = vars(parser.parse_args(arguments))
    kind = [option for option in ("--module", "--no-python") if found.pop(option[2:].replace("-", "_"))]
    if len(kind) > 1:
        parser.error("Expected --module or --no-python, got both.")
    script = (*kind, found.pop("script"), *found.pop("args"))
    try:
        ssh_args = tuple(shlex.split(found.pop("ssh_args")))
    except ValueError as error:
        parser.error(f"Expected options for ssh in --ssh-args, got text that no shell takes apart: {error}.")
    return Options(**{**found, "env_files": tuple(found["env_files"])}, ssh_args=ssh_args, script=script)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hosts").add_argument
    add("--hostfile", metavar="FILE", help="a line 'name slots=8' for each host")
    add("--include", default="", metavar="FILTER", help="use only these hosts and slots: host1@host2:0,2")
    add("--exclude", default="", metavar="FILTER", help="use all but these hosts and slots: host1@host2:0,2")
    add("--num-nodes", "--num_nodes", "--nnodes", type=int, metavar="N", help="use the first N hosts")
    nproc = "processes on each host, instead of one for each slot"
    add("--nproc", "--num-gpus", "--num_gpus", "--nproc-per-node", type=int, metavar="N", help=nproc)


def _add_torchrun(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("torchrun").add_argument
    add("--master-addr", "--master_addr", metavar="ADDRESS", help="the first host's, instead of asking it")
    add("--master-port", "--master_port", type=_port, metavar="PORT", help="a free port on it, instead of asking it")
    add("--max-restarts", "--max_restarts", type=_count, default=0, metavar="N", help="restarts after a failure")
    add("--module", "-m", action="store_true", help="the script is the name of a module")
    add("--no-python", "--no_python", action="store_true", help="the script is a program of its own")
    add("script", metavar="SCRIPT", help="what every process runs")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_reach(parser: argparse.ArgumentParser, python: str) -> None:
    add = parser.add_argument_group("reaching hosts").add_argument
    add("--launcher", choices=LAUNCHERS, help="how to reach them; default: slurm in an allocation, ssh for others")
    files = "variables for all hosts, a line NAME=value or NAME for each; may be repeated"
    add("--env-file", "--env_file", dest="env_files", action="append", default=[], metavar="FILE", help=files)
    add("--ssh-args", "--ssh_args", default="", metavar="TEXT", help="such as '-p 2222 -i key', for ssh and pdsh")
    add("--python", default=python, metavar="PATH", help="the interpreter on the hosts; default: this one")
    lost = "how long a host may be silent, or a host may hear nothing from here, before it stops; default: 120"
    add("--lost-after", type=_seconds, default=120.0, metavar="SECONDS", help=lost)
    grace = "how long processes may take to end before they are killed; default: 15"
    add("--grace", type=_seconds, default=15.0, metavar="SECONDS", help=grace)
    add("--dry-run", "--dry_run", action="store_true", help="print the commands, start nothing, ask no host")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"Expected at least 0, got {text}.")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"Expected a port from 1 to 65535, got {text}.")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"Expected a number of seconds above 0, got {text}.")
    return number
