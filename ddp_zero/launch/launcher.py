"""``python -m ddp_zero launch``: choose hosts, ask whether they are ready, start torchrun on each, stop together."""

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ddp_zero.launch import guard, slurm
from ddp_zero.launch.check import Answer, ask
from ddp_zero.launch.commands import Meeting, check_command, commands
from ddp_zero.launch.environment import exported, parse_environment
from ddp_zero.launch.hosts import Host, filtered, limited, parse_hostfile
from ddp_zero.launch.options import Options, parse
from ddp_zero.launch.processes import run

LOCAL = "localhost"
DEFAULT_PORT = 29500
_ANSWER_SECONDS = 60.0
_FAILED_TO_START = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit code, see `ddp_zero.launch.processes.run`, or 2 if nothing was started."""
    options = parse(sys.argv[1:] if arguments is None else arguments, sys.executable)
    try:
        hosts = hosts_of(options, os.environ)
        launcher = launcher_of(options, hosts, os.environ)
        variables = variables_of(options, launcher, os.environ)
        folder, own = Path.cwd(), Path(guard.__file__).resolve()
        answers: dict[str, Answer] = {}
        if launcher in ("ssh", "pdsh") and not options.dry_run:
            names = [host.name for host in hosts]
            toward = {name: names[0] for name in names} | {names[0]: names[1] if len(names) > 1 else ""}
            answers = ask(
                names, lambda name: check_command(launcher, name, toward[name], options, own, folder), _ANSWER_SECONDS
            )
        meeting = meeting_of(options, launcher, hosts, answers, os.environ)
        started = commands(launcher, hosts, meeting, options, own, folder, variables)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"error: {error}")
        return _FAILED_TO_START
    except KeyboardInterrupt:  # while hosts are asked; nothing runs yet
        return _INTERRUPTED
    if options.dry_run:
        for command in started:
            print(f"{command.host}: {command.shown()}")
        return 0
    return run(started, options.grace, options.lost_after, say)


def say(text: str) -> None:
    """Report a line to the user."""
    print(f"ddp_zero.launch: {text}", file=sys.stderr, flush=True)


def hosts_of(options: Options, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of the job: those of the hostfile, of the Slurm allocation, or this machine.

    Raises:
        ValueError: if the hostfile, a filter or a number does not fit.
        OSError: if the hostfile cannot be read.
    """
    nproc = options.nproc
    if options.hostfile is not None:
        hosts = parse_hostfile(Path(options.hostfile).read_text(encoding="utf-8"), options.hostfile)
    elif options.launcher == "slurm" or (options.launcher is None and slurm.is_allocation(environment)):
        hosts = slurm.hosts_of_allocation(environment, nproc)
    elif options.launcher in (None, "local"):
        hosts = (Host(LOCAL, tuple(range(nproc or torch.accelerator.device_count() or 1))),)
    else:
        raise ValueError(f"Expected --hostfile with --launcher {options.launcher}, got none.")
    return limited(filtered(hosts, options.include, options.exclude), options.num_nodes, nproc)


def launcher_of(options: Options, hosts: Sequence[Host], environment: Mapping[str, str]) -> str:
    """How the hosts are reached.

    Raises:
        ValueError: if that is ``local``, and they are not this machine alone.
    """
    is_here = len(hosts) == 1 and hosts[0].name in (LOCAL, "127.0.0.1", socket.gethostname(), socket.getfqdn())
    if options.launcher == "local" and not is_here:
        shown = ", ".join(host.name for host in hosts)
        raise ValueError(f"Expected this machine alone with --launcher local, {LOCAL}, got {shown}. Use ssh.")
    if options.launcher is not None:
        return options.launcher
    if options.hostfile is None and slurm.is_allocation(environment):
        return "slurm"
    return "local" if is_here else "ssh"


def variables_of(options: Options, launcher: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the processes get: those of files and, on other hosts, those of this process that matter."""
    found = {} if launcher == "local" else exported(environment)
    for file in options.env_files:
        found.update(parse_environment(Path(file).read_text(encoding="utf-8"), file, environment))
    return found


def meeting_of(
    options: Options,
    launcher: str,
    hosts: Sequence[Host],
    answers: Mapping[str, Answer],
    environment: Mapping[str, str],
) -> Meeting:
    """Where torchrun's agents meet: on the first host.

    Raises:
        RuntimeError: if no address of the first host was found.
    """
    first, job = hosts[0].name, f"ddp_zero-{secrets.token_hex(4)}"
    if len(hosts) == 1:
        return Meeting(None, options.master_port, job)
    own = {name: answer.addresses[0] for name, answer in answers.items() if answer.addresses}
    address = options.master_addr or own.get(first) or (None if answers else first)
    if address is None:
        raise RuntimeError(f"Expected an address of {first} that other hosts can reach, got none. Say --master-addr.")
    port = answers[first].port if answers else DEFAULT_PORT
    if launcher == "slurm":
        port = slurm.port_of_allocation(environment)
        own = {host.name: host.name for host in hosts}
    return Meeting(address, options.master_port or port, job, own)
