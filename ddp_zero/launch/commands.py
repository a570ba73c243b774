"""The command that starts torchrun on each host, for each way to reach a host. Values in, values out.

A host runs the guard (`ddp_zero/launch/guard.py`), and under it torchrun. Each host has a command of its own, so that
its output, its exit code and its end are its own, whichever program carries the command there.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from ddp_zero.launch.hosts import Host
from ddp_zero.launch.options import Options

TORCHRUN = ("-m", "torch.distributed.run")
_CONNECT_SECONDS = 10
_MARGIN_SECONDS = 10


@dataclass(frozen=True)
class Meeting:
    """Where torchrun's agents meet.

    Attributes:
        address: of the first host; None: this machine alone.
        port: on it; None: torchrun finds one.
        job: a name that no other job at this address has.
        own: the address of each host, by name, where it is known.
    """

    address: str | None
    port: int | None
    job: str
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostCommand:
    """What this machine runs for one host.

    Attributes:
        host: its name.
        argv: the program and its arguments.
        environment: variables that this program gets in addition.
        has_prefix: whether lines of output get the host's name.
    """

    host: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    has_prefix: bool = True

    def shown(self) -> str:
        """As a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def commands(
    launcher: str,
    hosts: Sequence[Host],
    meeting: Meeting,
    options: Options,
    guard: PurePath,
    folder: PurePath,
    variables: Mapping[str, str],
) -> tuple[HostCommand, ...]:
    """The command for each host, in their order.

    Args:
        launcher: how hosts are reached, one of `LAUNCHERS`.
        hosts: in the order of their ranks.
        meeting: where they meet.
        options: of the command line.
        guard: the guard's file.
        folder: the working directory.
        variables: what every host's processes get in their environment.
    """
    found = []
    for rank, host in enumerate(hosts):
        torchrun = torchrun_command(host, rank, len(hosts), meeting, options)
        devices = {} if host.is_first_slots else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
        lost_after = options.lost_after if launcher != "pdsh" else None
        guarded = guard_command(options, guard, folder, {**variables, **devices}, lost_after)
        if launcher == "mpirun":  # kills what it has started, where nobody reads its output any more
            patient = replace(options, grace=options.grace + _MARGIN_SECONDS)
            outer = guard_command(patient, guard, folder, {}, lost_after)
            inner = guard_command(options, guard, folder, {**variables, **devices}, None)
            guarded = [*outer, *inner[:-1], "--inner", "--"]
        found.append(reach(launcher, host.name, [*guarded, *torchrun], options, guard))
    return tuple(found)


def torchrun_command(host: Host, rank: int, count: int, meeting: Meeting, options: Options) -> list[str]:
    """The command that runs torchrun on one host.

    Agents with fixed ranks keep the order of the hosts but do not meet again after a failure; so where restarts are
    wanted, they meet by rendezvous, and torchrun ranks them by address.
    """
    argv = [options.python, *TORCHRUN, f"--nproc-per-node={len(host.slots)}"]
    if meeting.address is None:
        argv += ["--standalone"] if meeting.port is None else [f"--master-port={meeting.port}"]
    elif not options.max_restarts:
        argv += [f"--nnodes={count}", f"--node-rank={rank}"]
        argv += [f"--master-addr={meeting.address}", f"--master-port={meeting.port}"]
    else:
        argv += [f"--nnodes={count}", "--rdzv-backend=c10d", f"--rdzv-id={meeting.job}"]
        argv += [f"--rdzv-endpoint={meeting.address}:{meeting.port}", f"--rdzv-conf=is_host={int(rank == 0)}"]
        own = meeting.own.get(host.name) or (meeting.address if rank == 0 else None)
        argv += [f"--local-addr={own}"] if own else []
    argv += [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    return [*argv, *options.script]


def guard_command(
    options: Options, guard: PurePath, folder: PurePath, variables: Mapping[str, str], lost_after: float | None
) -> list[str]:
    """The guard and its options; a command follows."""
    argv = [options.python, str(guard), f"--chdir={folder}", f"--grace={options.grace:g}"]
    argv += [] if lost_after is None else [f"--lost-after={lost_after:g}"]
    return [*argv, *(f"--env={name}={value}" for name, value in variables.items()), "--"]


def check_command(
    launcher: str, host: str, toward: str, options: Options, guard: PurePath, folder: PurePath
) -> HostCommand:
    """What asks a host whether it is ready, and for its address and a free port.

    Args:
        launcher: "ssh" or "pdsh".
        host: its name.
        toward: a different host that its address has to be reachable from, or "".
        options: of the command line.
        guard: the guard's file.
        folder: the working directory.
    """
    is_file = not options.script[0].startswith("--")
    script = [f"--script={options.script[0]}"] if is_file else []
    argv = [options.python, str(guard), "--check", f"--chdir={folder}", *script, f"--toward={toward}"]
    return reach(launcher, host, argv, options, None)


def reach(launcher: str, host: str, argv: Sequence[str], options: Options, guard: PurePath | None) -> HostCommand:
    """A command that runs ``argv`` on a host, and ends there when its standard input ends here.

    pdsh passes no input on, but ends its connections when it ends; so it has a guard of its own on this machine, which
    then leaves the connections time to end with what runs behind them. None: what runs is short and needs no guard.
    """
    alive = [f"-oConnectTimeout={_CONNECT_SECONDS}", f"-oServerAliveInterval={max(1, int(options.lost_after / 4))}"]
    ssh = ["-oBatchMode=yes", *alive, "-oServerAliveCountMax=3", *options.ssh_args]
    if launcher == "local":
        return HostCommand(host, tuple(argv), has_prefix=False)
    if launcher == "ssh":
        return HostCommand(host, ("ssh", "-x", *ssh, host, shlex.join(argv)))
    if launcher == "pdsh":
        line = shlex.join(argv).replace("%", "%%")  # pdsh replaces %h, %u and %n
        linger = f"--linger={options.grace + _MARGIN_SECONDS:g}"
        own = (sys.executable, str(guard), "--chdir=.", linger, f"--grace={options.grace:g}", "--") if guard else ()
        argv = (*own, "pdsh", "-R", "ssh", "-S", "-N", "-b", "-w", host, line)
        return HostCommand(host, argv, {"PDSH_SSH_ARGS_APPEND": shlex.join(ssh)})
    if launcher == "slurm":
        placed = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--kill-on-bad-exit=1")
        return HostCommand(host, ("srun", *placed, *argv))
    if launcher == "mpirun":
        return HostCommand(host, ("mpirun", "-n", "1", "-host", host, *argv))
    raise ValueError(f"Expected a launcher that is known here, got {launcher!r}.")
