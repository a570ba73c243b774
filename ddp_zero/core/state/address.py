"""Where a rank can be called: its addresses, a port and a secret, in a block of fixed size."""

import array
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field

BLOCK_BYTES = 384
_SIOCGIFADDR = 0x8915
_MOST_HOSTS = 4
_MOST_REASON = 120


@dataclass(frozen=True)
class Address:
    """Where a rank can be called.

    Attributes:
        hosts: addresses of its machine, to be tried in this order.
        port: of all of them; 0 if the rank cannot be called.
        secret: what both ends prove to know, in hexadecimal.
        reason: why the rank cannot be called, or nothing.
    """

    hosts: tuple[str, ...]
    port: int
    secret: str = field(repr=False)
    reason: str = ""

    def encode(self) -> bytes:
        """The address in `BLOCK_BYTES` bytes."""
        short = {"hosts": self.hosts[:_MOST_HOSTS], "reason": self.reason[:_MOST_REASON]}
        raw = json.dumps(asdict(self) | short).encode()
        assert len(raw) <= BLOCK_BYTES, "hosts are numeric addresses"
        return raw.ljust(BLOCK_BYTES, b"\0")

    @staticmethod
    def decode(block: bytes) -> "Address":
        """An address from what `encode` gave."""
        fields = json.loads(block.rstrip(b"\0"))
        return Address(tuple(fields["hosts"]), fields["port"], fields["secret"], fields["reason"])


def own_hosts(store_host: str | None) -> tuple[str, ...]:
    """Addresses of this machine at which other ranks may reach it, the likeliest first.

    Those are the address of the interface that Gloo is told to use (``GLOO_SOCKET_IFNAME``), of the one that leads to
    the job's store, of the host's name, and of the default route. No packet is sent.

    Args:
        store_host: the host of the job's store, or None if it has none; then ``MASTER_ADDR``, if set.
    """
    found = list(dict.fromkeys(_candidates(store_host or os.environ.get("MASTER_ADDR"))))
    return tuple(found[:_MOST_HOSTS]) or ("127.0.0.1",)


def bound_host(store_host: str | None) -> str | None:
    """The address at which to listen, if only one can be meant; None: all interfaces.

    That is the address of the one interface that Gloo is told to use, and the loopback where the job's store is there:
    all ranks are on this machine then, unless a port is forwarded to it.

    Args:
        store_host: as for `own_hosts`.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces and "," not in interfaces:
        with suppress(OSError):
            return _address_of_interface(interfaces)
    host = store_host or os.environ.get("MASTER_ADDR") or ""
    is_local = host == "localhost" or host == "::1" or host.startswith("127.")
    return own_hosts(store_host)[0] if is_local else None


def _candidates(store_host: str | None) -> Iterator[str]:
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with suppress(OSError):
            yield _address_of_interface(name)
    if store_host:
        with suppress(OSError):
            yield _address_towards(store_host)
    with suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())
    with suppress(OSError):
        yield _address_towards("192.0.2.1")  # a network reserved for documentation: whatever has the default route


def _address_towards(host: str) -> str:
    """The address of the interface that packets to a host leave by."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface."""
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = array.array("B", struct.pack("256s", name.encode()[:15]))
        fcntl.ioctl(probe, _SIOCGIFADDR, request)
        return socket.inet_ntoa(request.tobytes()[20:24])
