"""A job as a value: the command line, the hosts, their environment, and the command that starts torchrun on each.

Text in, values out: nothing here reads files, opens connections or needs torch. A host runs the guard
(`ddp_zero/launch/guard.py`), and under it torchrun. Each host has a separate command, and so separate output, exit code
and lifetime, whether ssh or srun carries the command there.
"""

import argparse
import difflib
import math
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

LAUNCHERS = ("ssh", "slurm")
_MPI = ("pdsh", "openmpi", "mpich", "impi", "mvapich")
TORCHRUN = ("-m", "torch.distributed.run")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTHON", "OMP_", "UCX_", "MV2_")
"""Prefixes of variables of this process that are passed to other hosts."""

Filter = Mapping[str, tuple[int, ...] | None]
"""Slots by host; None for all slots."""

_EPILOG = """\
Without --hostfile, and outside a Slurm allocation, the job runs on this machine. The exit code is that of the first
host that failed, 128 and its number after a signal, and 2 if nothing was started."""

_CONNECT_SECONDS = 10
_MOST_NODES = 100_000

_HOST_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SLOT = re.compile(r"[0-9]{1,6}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGES = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


# The command line


def check_options(options: Namespace) -> Namespace:
    """A command line that `add_arguments` describes; ValueError if two of its options do not fit.

    ``script`` becomes torchrun's own ``--module`` or ``--no-python``, the script, and its arguments.
    """
    rank = options.node_rank
    if options.no_ssh != (rank is not None):
        given = "--no-ssh alone" if options.no_ssh else f"--node-rank {rank} alone"
        raise ValueError(f"Expected both --no-ssh and --node-rank, or neither, got {given}. [ZERO-901]")
    script = (*([options.kind] if options.kind else []), options.script, *options.args)
    return Namespace(**{**vars(options), "script": script})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.allow_abbrev = _EPILOG, False
    add = parser.add_argument_group("hosts").add_argument
    add("--hostfile", "-H", metavar="FILE", help="a line 'name slots=8' for each host")
    add("--include", "-i", default="", metavar="FILTER", help="use only these hosts and slots: host1@host2:0,2")
    add("--exclude", "-e", default="", metavar="FILTER", help="use all but these hosts and slots: host1@host2:0,2")
    add("--num-nodes", "--num_nodes", type=int, metavar="N", help="use the first N hosts")
    nproc = "processes on each host, instead of one for each slot"
    add("--nproc", "--num-gpus", "--num_gpus", "--num_accelerators", type=int, metavar="N", help=nproc)

    group = parser.add_argument_group("torchrun")
    add, kind = group.add_argument, group.add_mutually_exclusive_group()
    add("--master-addr", "--master_addr", metavar="ADDRESS", help="the first host's, instead of asking it")
    add("--master-port", "--master_port", type=_port, metavar="PORT", help="a free port on it, instead of asking it")
    add("--max-restarts", "--max_restarts", type=_count, default=0, metavar="N", help="restarts after a failure")
    for names, what in ((("--module", "-m"), "the name of a module"), (("--no-python", "--no_python"), "a program")):
        kind.add_argument(*names, dest="kind", action="store_const", const=names[0], help=f"the script is {what}")
    logs = "write what each rank prints to files below this folder"
    add("--enable-each-rank-log", "--enable_each_rank_log", dest="rank_logs", metavar="FOLDER", help=logs)
    add("--no-local-rank", "--no_local_rank", action="store_true", help="no effect: scripts read LOCAL_RANK")
    add("script", metavar="SCRIPT", help="script that every process runs")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")

    add = parser.add_argument_group("reaching hosts").add_argument
    add(
        "--launcher",
        type=_launcher,
        choices=LAUNCHERS,
        help="way to reach them; default: slurm in an allocation, ssh for others",
    )
    by_hand = "start this host's part alone, the one of --node-rank; run the same command on each host"
    add("--no-ssh", "--no_ssh", action="store_true", help=by_hand)
    add("--node-rank", "--node_rank", type=_count, metavar="N", help="place of this host among the hosts, from 0")
    files = "variables for all hosts, a line NAME=value or NAME for each; may be repeated"
    add("--env-file", "--env_file", dest="env_files", action="append", default=[], metavar="FILE", help=files)
    add("--ssh-args", "--ssh_args", type=_words, default=(), metavar="TEXT", help="such as '-p 2222 -i key'")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter on the hosts; default: this one")
    lost = "how long a host may be silent, or a host may hear nothing from here, before it stops; default: 120"
    add("--lost-after", type=_seconds, default=120.0, metavar="SECONDS", help=lost)
    grace = "how long processes may take to end before they are killed; default: 15"
    add("--grace", type=_seconds, default=15.0, metavar="SECONDS", help=grace)
    add("--dry-run", "--dry_run", action="store_true", help="print the commands, start nothing, ask no host")
    for options, way in WAYS_HERE.items():
        add(*options.split(), action=_Elsewhere, const=way, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


WAYS_HERE = {
    "--force_multi --force-multi": "say --launcher ssh",
    "--launcher_args --launcher-args": "say --ssh-args; Slurm reads variables of its own, --env-file",
    "--venv_script --venv-script": "say --python with the interpreter of the environment",
    "--save_pid --save-pid": "the shell that starts this launcher knows its id: $!",
    "--log_level --log-level": "the launcher itself prints only what goes wrong",
    "-q --quiet": "the launcher itself prints only what goes wrong",
    "--ssh_port --ssh-port": "say --ssh-args '-p PORT'",
    "--no_ssh_check --no-ssh-check": "say --launcher slurm, which asks no host beforehand",
    "--elastic_training --elastic-training": "say --max-restarts; checkpoints load at any number of ranks",
    "--bind_cores_to_rank --bind-cores-to-rank": "let the script call os.sched_setaffinity() by LOCAL_RANK",
    "--bind_core_list --bind-core-list": "let the script call os.sched_setaffinity() by LOCAL_RANK",
    "--autotuning": "set sizes by hand; python -m ddp_zero estimate tells memory",
}
"""Options of ``deepspeed`` that the launcher does not have, and the way here."""


class _Elsewhere(argparse.Action):
    """An option that ends the process with the way here, its ``const``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        option = self.option_strings[0]
        parser.error(f"{option} is an option of deepspeed's launcher; here {self.const}. See docs/launch.md.")


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"Expected options for ssh, got text that no shell takes apart: {error}."
        ) from error


def _launcher(text: str) -> str:
    if text in _MPI:
        raise argparse.ArgumentTypeError(
            f"Expected {' or '.join(LAUNCHERS)}, got {text!r}, of deepspeed: say --launcher ssh, slurm in an "
            "allocation, or --no-ssh --node-rank N on each host. See docs/launch.md. [ZERO-901]"
        )
    return text


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


# Hosts: a hostfile as DeepSpeed has it, and filters


@dataclass(frozen=True)
class Host:
    """A host by its name for ssh, and the indices of its devices, one for each process to start."""

    name: str
    slots: tuple[int, ...]

    @property
    def is_first_slots(self) -> bool:
        """True if the slots are 0, 1, 2 and so on, so that processes find their devices without a variable."""
        return self.slots == tuple(range(len(self.slots)))


def parse_hostfile(text: str, shown: object) -> tuple[Host, ...]:
    """The hosts of a hostfile: a line ``name slots=8`` for each; ``#`` begins a comment.

    Raises ValueError naming the file ``shown``, with every malformed line or repeated host; or if there is no host.
    """
    hosts: dict[str, tuple[int, Host]] = {}
    wrong = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOST_LINE.fullmatch(content)
        if match is None or not int(match[2]):
            wrong.append(f"line {number}: Expected 'name slots=count' with a count of at least 1, got {content!r}.")
        elif not _HOST_NAME.fullmatch(match[1]):
            wrong.append(f"line {number}: Expected a host name of letters, digits, '.', '-' and '_', got {match[1]!r}.")
        elif match[1] in hosts:
            wrong.append(f"line {number}: Expected each host once, got {match[1]!r}, as in line {hosts[match[1]][0]}.")
        else:
            hosts[match[1]] = number, Host(match[1], tuple(range(int(match[2]))))
    if wrong:
        raise ValueError("\n  ".join([f"Expected a hostfile in {shown}, got", *wrong]) + " [ZERO-901]")
    if not hosts:
        raise ValueError(f"Expected a line 'name slots=count' for each host in {shown}, got none. [ZERO-901]")
    return tuple(host for _, host in hosts.values())


def parse_filter(text: str, option: str) -> Filter:
    """A filter such as ``host1@host2:0,2``: hosts separated by ``@``, each with slots after ``:`` or with all.

    A host may come several times, with slots that add up. Raises ValueError naming the option, and the part that is
    malformed, or that names a host once more of which all slots are named.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, listed = part.strip().partition(":")
        slots = [slot.strip() for slot in listed.split(",")] if colon else []
        if not _HOST_NAME.fullmatch(name) or not all(map(_SLOT.fullmatch, slots)):
            raise ValueError(f"Expected {option} host1@host2:0,2, got {part!r} in {text!r}. [ZERO-901]")
        before = found.get(name, ())
        if before is None or (before and not colon):
            raise ValueError(
                f"Expected all of a host once or slots of it in {option}, got {part!r} in {text!r}. [ZERO-901]"
            )
        found[name] = tuple(sorted({*before, *map(int, slots)})) if colon else None
    return found


def filter_hosts(hosts: Sequence[Host], include: str, exclude: str) -> tuple[Host, ...]:
    """The hosts and slots that remain after the filters, in the order of the hosts; ValueError if nothing remains."""
    if include and exclude:
        raise ValueError(f"Expected --include or --exclude, got both: {include!r} and {exclude!r}. [ZERO-901]")
    if not include and not exclude:
        return tuple(hosts)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    chosen = parse_filter(text, option)
    _check_exist(chosen, hosts, option)
    left = []
    for host in hosts:
        slots = chosen.get(host.name, ())
        named = set(host.slots if slots is None else slots)
        kept = tuple(slot for slot in host.slots if (slot in named) == bool(include))
        if kept:
            left.append(replace(host, slots=kept))
    if not left:
        raise ValueError(f"{option} {text!r} leaves no slot. [ZERO-901]")
    return tuple(left)


def _check_exist(chosen: Filter, hosts: Sequence[Host], option: str) -> None:
    slots_of = {host.name: host.slots for host in hosts}
    for name, slots in chosen.items():
        if name not in slots_of:
            near = difflib.get_close_matches(name, slots_of, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(slots_of)}."
            raise ValueError(f"Expected hosts of the job in {option}, got {name!r}.{hint} [ZERO-901]")
        missing = [slot for slot in slots or () if slot not in slots_of[name]]
        if missing:
            raise ValueError(f"Expected slots of {name} in {option}, {list(slots_of[name])}, got {missing}. [ZERO-901]")


def limit_hosts(hosts: Sequence[Host], num_nodes: int | None, nproc: int | None) -> tuple[Host, ...]:
    """The first ``num_nodes`` hosts, and first ``nproc`` slots of each; None for all. ValueError if there are fewer."""
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise ValueError(
            f"Expected --num-nodes from 1 to {len(hosts)}, the number of hosts, got {num_nodes}. [ZERO-901]"
        )
    used = tuple(hosts[:num_nodes])
    if nproc is None:
        return used
    for host in used:
        if not 1 <= nproc <= len(host.slots):
            raise ValueError(
                f"Expected --nproc from 1 to {len(host.slots)}, the slots of {host.name}, got {nproc}. [ZERO-901]"
            )
    return tuple(replace(host, slots=host.slots[:nproc]) for host in used)


# The nodes of a Slurm allocation


def is_allocation(environment: Mapping[str, str]) -> bool:
    """True if a process with these variables runs in a Slurm allocation."""
    return bool(environment.get("SLURM_JOB_ID") and _nodelist(environment))


def hosts_of_allocation(environment: Mapping[str, str], nproc: int | None) -> tuple[Host, ...]:
    """The allocated nodes, with ``nproc`` slots, or one per GPU that Slurm grants, or else per task.

    Raises ValueError outside an allocation, or if a variable does not have Slurm's form.
    """
    if not is_allocation(environment):
        raise ValueError(
            "SLURM_JOB_ID and SLURM_JOB_NODELIST are not set. Start this within salloc or sbatch. [ZERO-902]"
        )
    names = expand_nodelist(_nodelist(environment))
    counts = [nproc] * len(names) if nproc is not None else _slots(environment, len(names))
    return tuple(Host(name, tuple(range(count))) for name, count in zip(names, counts, strict=True))


def port_of_allocation(environment: Mapping[str, str]) -> int:
    """A port, 20000 to 29999, that differs between jobs with nearby numbers."""
    return 20000 + int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0) % 10000


def expand_nodelist(text: str) -> list[str]:
    """The names in a list such as ``gpu[01-03,7],login``; ValueError if it is malformed, or repeats a name."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise ValueError(f"Expected a list of nodes such as 'gpu[01-03,7],login', got {text!r}. [ZERO-902]")
    names = [name for item in items for name in _expand(item, text)]
    if len(set(names)) < len(names):
        raise ValueError(f"Expected each node once, got {text!r}. [ZERO-902]")
    return names


def _expand(item: str, text: str) -> Iterator[str]:
    match = _RANGES.search(item)
    if match is None:
        yield item
        return
    for one in match[1].split(","):
        bounds = _RANGE.fullmatch(one)
        if bounds is None:
            raise ValueError(f"Expected numbers and ranges in brackets, got {one!r} in {text!r}. [ZERO-902]")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not first <= last < first + _MOST_NODES:
            raise ValueError(f"Expected a range that goes up, got {one!r} in {text!r}. [ZERO-902]")
        for number in range(first, last + 1):
            yield from _expand(f"{item[: match.start()]}{number:0{len(bounds[1])}d}{item[match.end() :]}", text)


def _slots(environment: Mapping[str, str], nodes: int) -> list[int]:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = environment.get(name, "").rpartition(":")[2]
        if count.isdecimal() and int(count):
            return [int(count)] * nodes
    text = environment.get("SLURM_TASKS_PER_NODE", "1")
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [count for match in matches if match for count in [int(match[1])] * int(match[2] or 1)]
    if not all(matches) or len(counts) != nodes or not all(counts):
        raise ValueError(f"Expected SLURM_TASKS_PER_NODE for {nodes} nodes, got {text!r}. Say --nproc. [ZERO-902]")
    return counts


def _nodelist(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")


# The environment of the hosts


def parse_environment(text: str, shown: object, here: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file: ``NAME=value``, or ``NAME`` for its value in this process; ``#`` begins a comment line.

    A value is the rest of its line, without quotes around it. Raises ValueError naming the file ``shown``, with every
    line that is malformed, repeats a name, or names a variable not set here.
    """
    found: dict[str, str] = {}
    wrong = []
    # not `splitlines`, which also ends a line at U+2028 and the like, within a value
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.removeprefix("export ").strip().partition("=")
        if not _VARIABLE.fullmatch(name):
            wrong.append(f"line {number}: Expected 'NAME=value' or 'NAME', got {content!r:.80}.")
        elif name in found:
            wrong.append(f"line {number}: Expected each variable once, got {name} again.")
        elif not equals and name not in here:
            wrong.append(f"line {number}: Expected {name} to be set here, or '{name}=value', got neither.")
        else:
            found[name] = _unquote(value) if equals else here[name]
    if wrong:
        raise ValueError("\n  ".join([f"Expected an environment file in {shown}, got", *wrong]) + " [ZERO-901]")
    return found


def variables_to_export(here: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process with one of `PREFIXES`, in alphabetical order."""
    return {name: here[name] for name in sorted(here) if name.startswith(PREFIXES)}


def _unquote(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


# The command for each host


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of torchrun's agents."""

    address: str | None  # address of the first host; None for this machine alone
    port: int | None  # port on it; None lets torchrun find one
    job: str  # a name that is unique at this address
    own: Mapping[str, str] = field(default_factory=dict)  # known addresses of hosts, by name


@dataclass(frozen=True)
class HostCommand:
    """This machine's command for one host; ``has_prefix`` puts the host's name before lines of output."""

    host: str
    argv: tuple[str, ...]
    has_prefix: bool = True


def commands(
    launcher: str,
    hosts: Sequence[Host],
    meeting: Meeting,
    options: Namespace,
    guard: PurePath,
    folder: PurePath,
    variables: Mapping[str, str],
) -> tuple[HostCommand, ...]:
    """The command for each host, in the order of their ranks.

    Processes get ``variables`` in their environment, and start in ``folder``; ``guard`` is the guard's file.
    """
    found = []
    for rank, host in enumerate(hosts):
        torchrun = torchrun_command(host, rank, len(hosts), meeting, options)
        devices = {} if host.is_first_slots else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
        guarded = guard_command(options, guard, folder, {**variables, **devices})
        found.append(reach(launcher, host.name, [*guarded, *torchrun], options))
    return tuple(found)


def torchrun_command(host: Host, rank: int, count: int, meeting: Meeting, options: Namespace) -> list[str]:
    """The command that runs torchrun on one host."""
    # agents with fixed ranks keep the order of the hosts but do not meet again after a failure; with restarts they use
    # a rendezvous instead, and torchrun ranks them by address
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
    argv += [] if options.rank_logs is None else [f"--log-dir={options.rank_logs}", "--redirects=3"]
    return [*argv, *options.script]


def guard_command(options: Namespace, guard: PurePath, folder: PurePath, variables: Mapping[str, str]) -> list[str]:
    """The guard and its options; a command follows."""
    argv = [options.python, str(guard), f"--chdir={folder}", f"--grace={options.grace:g}"]
    argv.append(f"--lost-after={options.lost_after:g}")
    kind, *rest = options.script
    if not kind.startswith("--"):
        argv.append(f"--script={kind}")
    elif kind == "--module":
        argv.append(f"--module={rest[0]}")
    return [*argv, *(f"--env={name}={value}" for name, value in variables.items()), "--"]


def check_command(host: str, toward: str, options: Namespace, guard: PurePath, folder: PurePath) -> HostCommand:
    """The command that asks a host over ssh for its readiness, an address that ``toward`` reaches, and a free port."""
    script = [] if options.script[0].startswith("--") else [f"--script={options.script[0]}"]
    argv = [options.python, str(guard), "--check", f"--chdir={folder}", *script, f"--toward={toward}"]
    return reach("ssh", host, argv, options)


def reach(launcher: str, host: str, argv: Sequence[str], options: Namespace) -> HostCommand:
    """A command that runs ``argv`` on a host, and ends there when its standard input ends here."""
    if launcher == "local":
        return HostCommand(host, tuple(argv), has_prefix=False)
    if launcher == "slurm":
        placed = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--unbuffered", "--kill-on-bad-exit=1")
        return HostCommand(host, ("srun", *placed, *argv))
    alive = [f"-oConnectTimeout={_CONNECT_SECONDS}", f"-oServerAliveInterval={max(1, int(options.lost_after / 4))}"]
    ssh = ["-oBatchMode=yes", *alive, "-oServerAliveCountMax=3", *options.ssh_args]
    return HostCommand(host, ("ssh", "-x", *ssh, host, shlex.join(argv)))
