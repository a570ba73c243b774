"""Two hosts on this machine: network namespaces, joined by a bridge, each with an sshd and keys of its own."""

import os
import shlex
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("alpha", "beta")
_SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/{name}.pid
StrictModes no
UsePAM no
PermitRootLogin yes
"""


@dataclass(frozen=True)
class Network:
    """Hosts that ssh reaches.

    Attributes:
        folder: holds keys, the configuration of ssh, and the hostfile.
        prefix: of the names of namespaces and interfaces.
    """

    folder: Path
    prefix: str

    @property
    def ssh_args(self) -> str:
        return f"-F {self.folder / 'config'}"

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    def set_link(self, name: str, state: str) -> None:
        """Connect a host, or cut it off: "up" or "down"."""
        _run(f"ip link set {self.prefix}{NAMES.index(name)} {state}")

    def kill(self, name: str) -> None:
        """The host loses its power: every process at once, without a word to anybody."""
        self.set_link(name, "down")
        for pid in _run(f"ip netns pids {self.prefix}{name}").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def needs(*programs: str) -> None:
    """Skip, with the reason, where a test of hosts cannot run."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces and start daemons")
    paths = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=paths) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here")


@contextmanager
def network(folder: Path, mark: str = "") -> Iterator[Network]:
    """Hosts for the time of the context; several of one process differ in the mark."""
    needs("ip", "sshd", "ssh", "ssh-keygen")
    number = zlib.crc32(f"{os.getpid()} {mark}".encode()) % 10_000  # names of interfaces are short
    net = Network(folder, f"dz{number}")
    bridge = f"{net.prefix}br"
    subnet = f"10.{200 + number // 250}.{number % 250}"
    try:
        _make(net, bridge, subnet)
    except subprocess.CalledProcessError as error:
        _remove(net, bridge)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        for number, name in enumerate(NAMES, start=1):
            _wait_for(net, name, f"{subnet}.{number}")
        yield net
    finally:
        _remove(net, bridge)


def _make(net: Network, bridge: str, subnet: str) -> None:
    Path("/run/sshd").mkdir(exist_ok=True)
    net.folder.chmod(0o700)
    for key in ("host_key", "user_key"):
        _run(f"ssh-keygen -q -t ed25519 -N '' -f {net.folder / key}")
    shutil.copy(net.folder / "user_key.pub", net.folder / "authorized_keys")
    options = f"IdentityFile {net.folder}/user_key\nUserKnownHostsFile {net.folder}/known\nStrictHostKeyChecking no\n"
    config = f"Host *\n{options}LogLevel ERROR\n"
    _run(f"ip link add {bridge} type bridge")
    _run(f"ip addr add {subnet}.254/24 dev {bridge}")
    _run(f"ip link set {bridge} up")
    for number, name in enumerate(NAMES):
        space, link, address = f"{net.prefix}{name}", f"{net.prefix}{number}", f"{subnet}.{number + 1}"
        _run(f"ip netns add {space}")
        _run(f"ip link add {link} type veth peer name eth0 netns {space}")
        _run(f"ip link set {link} master {bridge} up")
        _run(f"ip -n {space} addr add {address}/24 dev eth0")
        _run(f"ip -n {space} link set eth0 up")
        _run(f"ip -n {space} link set lo up")
        daemon = net.folder / f"{name}.conf"
        daemon.write_text(_SSHD.format(address=address, folder=net.folder, name=name))
        _run(f"ip netns exec {space} /usr/sbin/sshd -f {daemon} -E {net.folder / name}.log")
        config += f"Host {name}\n HostName {address}\n"
    (net.folder / "config").write_text(config + f"Host gamma\n HostName {subnet}.77\n")
    net.hostfile.write_text("".join(f"{name} slots=1\n" for name in NAMES))


def _wait_for(net: Network, name: str, address: str) -> None:
    for _ in range(50):
        result = subprocess.run(
            ["ssh", "-F", str(net.folder / "config"), name, "true"], capture_output=True, check=False
        )
        if result.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"Expected sshd of {name} to answer at {address}, got {result.stderr.decode()}")


def _remove(net: Network, bridge: str) -> None:
    for number, name in enumerate(NAMES):
        pids = subprocess.run(["ip", "netns", "pids", f"{net.prefix}{name}"], capture_output=True, check=False).stdout
        for pid in pids.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for command in (f"ip netns del {net.prefix}{name}", f"ip link del {net.prefix}{number}"):
            subprocess.run(shlex.split(command), capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _run(command: str) -> str:
    return subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout
