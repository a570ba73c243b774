"""Calls another rank."""

import socket
import time

from ddp_zero.service.address import Address
from ddp_zero.service.handshake import WrongPeer, greet


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
        left = max(0.001, deadline - time.monotonic())
        try:
            connection = socket.create_connection((host, address.port), left / (len(address.hosts) - position))
        except OSError as error:
            failed.append(f"{host}: {error}")
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, bytes.fromhex(address.secret))
        except (OSError, EOFError, WrongPeer) as error:
            connection.close()
            failed.append(f"{host}: {error}")
            continue
        except BaseException:
            connection.close()
            raise
        connection.settimeout(time_out)
        return connection
    raise ConnectionError("; ".join(failed))
