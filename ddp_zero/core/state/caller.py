"""Calls another rank."""

import socket
import time

from ddp_zero.core.state.address import Address
from ddp_zero.core.state.handshake import WrongPeer, greet

_ATTEMPTS, _PAUSE_SECONDS = 5, 0.2


def call(address: Address, time_out: float) -> socket.socket:
    """A connection to a rank, both ends of which have proved that they know the secret.

    Args:
        address: where.
        time_out: seconds until this gives up, for all hosts together; afterwards that of the connection.

    Raises:
        OSError: if the rank cannot be reached at any of its hosts.
    """
    if not address.port:
        raise ConnectionError(address.reason)
    failed = []
    deadline = time.monotonic() + time_out
    for position, host in enumerate(address.hosts):
        for attempt in range(_ATTEMPTS):
            left = max(0.001, deadline - time.monotonic())
            try:
                connection = _greeted(host, address, left / (len(address.hosts) - position))
            except (OSError, EOFError, WrongPeer) as error:
                has_hung_up = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
                if has_hung_up and attempt < _ATTEMPTS - 1 and left > _PAUSE_SECONDS:
                    time.sleep(_PAUSE_SECONDS)  # it may have made room for others that had called
                    continue
                failed.append(f"{host}: {error}")
                break
            connection.settimeout(time_out)
            return connection
    raise ConnectionError("; ".join(failed))


def _greeted(host: str, address: Address, time_out: float) -> socket.socket:
    connection = socket.create_connection((host, address.port), time_out)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(connection, bytes.fromhex(address.secret))
    except BaseException:
        connection.close()
        raise
    return connection
