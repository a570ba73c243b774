"""A slow network on one machine: every rank in a network namespace of its own, behind a link of a given rate.

A bridge, in a namespace of its own as well, joins the ranks; nothing is added to the network of the machine. Each link
is a pair of virtual interfaces, and each end of it sends through a token bucket, so both directions have the rate::

    rank 0: lan --rate-->  <--rate-- port0 :bridge: port1 --rate-->  <--rate-- lan :rank 1

With several nodes each has a bridge for its ranks, which share a link of a tenth of the rate to the bridge that joins
the nodes::

    ranks of node 0 :bridge: uplink --rate/10-->  <--rate/10-- node0 :bridge: node1 ... and so on

Namespaces carry the process that made them in their names. They are removed when it is done, also after an error,
Ctrl-C or SIGTERM; what a killed process has left, the next process removes. Linux only, with rights to make namespaces.
"""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

INTERFACE = "lan"
PREFIX = "ddpzero"
RATES = {"1gbit": 1.0, "500mbit": 0.5, "200mbit": 0.2, "100mbit": 0.1}  # Gbit/s
QUEUE = "50ms"  # how long a packet may wait for tokens
SHORTEST_BURST = 65536  # bytes; the kernel hands over as much at once
BURST_SECONDS = 0.01
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}
UPLINK = "uplink"
SLOWER = 10  # how many times links between nodes are, than those of ranks

Command = list[str]
Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints; raises OSError or CalledProcessError."""


def run(command: Sequence[str]) -> str:
    """A `Runner`, for real."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Unavailable(Exception):
    """There can be no such network here; the message says why."""


def identity(pid: int) -> str | None:
    """A name that no later process shares: the id, and the clock tick at which it began. None for one that is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{pid}-{after_name[19]}"


def bucket_of(rate: str, gbit: float) -> str:
    """A token bucket, as ``tc`` writes it, of one rate in its words and as a number."""
    burst = max(SHORTEST_BURST, round(gbit * 1e9 / 8 * BURST_SECONDS))
    return f"root tbf rate {rate} burst {burst}b latency {QUEUE}"


def build_commands(hub: str, ranks: Sequence[str], rate: str, nodes: Sequence[str] = ()) -> list[Command]:
    """Command lines that make the network.

    Args:
        hub: the namespace of the bridge that joins all ranks, or all nodes.
        ranks: the namespace of each rank.
        rate: one of `RATES`.
        nodes: the namespace of each node's bridge; each has as many of the ranks, in order. Empty: none.
    """
    gbit = RATES[rate]
    bucket, between = bucket_of(rate, gbit), bucket_of(f"{1000 * gbit / SLOWER:g}mbit", gbit / SLOWER)
    lines = [f"ip netns add {name}" for name in (hub, *nodes, *ranks)]
    for name in (hub, *nodes):
        lines += [f"ip -n {name} link add bridge type bridge", f"ip -n {name} link set bridge up"]
    for node, name in enumerate(nodes):
        port = f"node{node}"
        lines += [
            f"ip -n {hub} link add {port} type veth peer name {UPLINK} netns {name}",
            f"ip -n {hub} link set {port} master bridge",
            f"ip -n {hub} link set {port} up",
            f"ip -n {name} link set {UPLINK} master bridge",
            f"ip -n {name} link set {UPLINK} up",
            f"tc -n {hub} qdisc add dev {port} {between}",
            f"tc -n {name} qdisc add dev {UPLINK} {between}",
        ]
    for rank, name in enumerate(ranks):
        port, home = f"port{rank}", nodes[rank * len(nodes) // len(ranks)] if nodes else hub
        lines += [
            f"ip -n {home} link add {port} type veth peer name {INTERFACE} netns {name}",
            f"ip -n {home} link set {port} master bridge",
            f"ip -n {home} link set {port} up",
            f"ip -n {name} address add 10.77.{rank // 250}.{rank % 250 + 1}/16 dev {INTERFACE}",
            f"ip -n {name} link set {INTERFACE} up",
            f"ip -n {name} link set lo up",
            f"tc -n {home} qdisc add dev {port} {bucket}",
            f"tc -n {name} qdisc add dev {INTERFACE} {bucket}",
        ]
    return [line.split() for line in lines]


class Link:
    """Context manager: the network is there inside.

    Args:
        ranks: how many.
        rate: one of `RATES`.
        runner: runs the command lines.
        owner: the id of the process that the names carry.
        nodes: how many nodes the ranks are spread over, as many on each.
    """

    def __init__(self, ranks: int, rate: str, runner: Runner, owner: int, nodes: int = 1) -> None:
        self.rate, self._run = rate, runner
        stem = f"{PREFIX}-{identity(owner)}"
        self.hub = f"{stem}-hub"
        self.nodes = [f"{stem}-node{node}" for node in range(nodes)] if nodes > 1 else []
        self.ranks = [f"{stem}-rank{rank}" for rank in range(ranks)]

    def __enter__(self) -> "Link":
        """Make it, or raise `Unavailable` and leave nothing."""
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise Unavailable(f"no {' and no '.join(missing)} on this machine (package iproute2)")
        try:
            self._remove(owner_is_gone)
            for command in build_commands(self.hub, self.ranks, self.rate, self.nodes):
                self._run(command)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError | subprocess.CalledProcessError):
                raise Unavailable(f"{error} {getattr(error, 'stderr', None) or ''}".strip()) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def prefix(self, rank: int) -> Command:
        """Prefix of a command line that runs it in a rank's namespace."""
        return ["ip", "netns", "exec", self.ranks[rank]]

    def remove(self) -> None:
        """All namespaces of this process, with everything in them; a signal can not stop it half way."""
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
        try:
            self._remove(lambda name: name in (self.hub, *self.nodes, *self.ranks))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _remove(self, is_ours: Callable[[str], bool]) -> None:
        for line in self._list().splitlines():
            name = line.split()[0]
            if is_ours(name):
                with suppress(subprocess.CalledProcessError):  # somebody else was faster; go on with the others
                    self._run(["ip", "netns", "delete", name])

    def _list(self) -> str:
        try:
            return self._run(["ip", "netns", "list"])
        except (OSError, subprocess.CalledProcessError):
            return ""  # where they can not be listed none were made


def bytes_from_node(node: str, runner: Runner = run) -> int:
    """Bytes that the ranks of a node have sent to other nodes so far, by its bridge's namespace."""
    (found,) = json.loads(runner(["ip", "-n", node, "-json", "-statistics", "link", "show", "dev", UPLINK]))
    return int(found["stats64"]["tx"]["bytes"])


def owner_is_gone(name: str) -> bool:
    """True if a namespace belongs to a `Link` whose process has ended."""
    parts = name.split("-")
    if len(parts) != 4 or parts[0] != PREFIX or not parts[1].isdigit():
        return False
    return identity(int(parts[1])) != f"{parts[1]}-{parts[2]}"
