"""Both ends of a connection prove that they know a secret, and never send it; see RFC 2104 for the function used.

1. who calls sends `_GREETING` and a nonce;
2. who answers sends a nonce of its own and the keyed hash of both;
3. who calls sends a different keyed hash of both.
"""

import hashlib
import hmac
import secrets
import socket

from ddp_zero.core.state.frames import receive_into

SECRET_BYTES = 16
_NONCE_BYTES = 16
_GREETING = b"ddp_zero 1\n"


class WrongPeer(Exception):
    """The peer is not who was meant: it does not know the secret, or speaks a different protocol."""


def greet(connection: socket.socket, secret: bytes) -> None:
    """Client side.

    Raises:
        WrongPeer: if the peer does not know the secret; EOFError or OSError if it is gone or makes no progress.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + nonce)
    theirs = _receive(connection, _NONCE_BYTES)
    _check(_receive(connection, hashlib.sha256().digest_size), _proof(secret, b"answers", nonce, theirs))
    connection.sendall(_proof(secret, b"calls", nonce, theirs))


class Admission:
    """Server side, apart from the connection: what was received goes in, what to send comes out.

    Args:
        secret: what the caller must know.

    Attributes:
        is_proven: whether the caller knows it.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._received = bytearray()
        self._proof = b""
        self.is_proven = False

    @property
    def missing(self) -> int:
        """How many bytes must still be received before anything can be said."""
        wanted = len(self._proof) or len(_GREETING) + _NONCE_BYTES
        return wanted - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Take at most `missing` bytes. Returns what to send.

        Raises:
            WrongPeer: if the peer does not know the secret, or speaks a different protocol.
        """
        self._received += data
        if not self._proof and not self._received.startswith(_GREETING[: len(self._received)]):
            raise WrongPeer(f"Expected a greeting of this protocol, got {bytes(self._received[:16])!r}.")
        if self.missing:
            return b""
        received, self._received = bytes(self._received), bytearray()
        if self._proof:
            _check(received, self._proof)
            self.is_proven = True
            return b""
        nonce, own = received[len(_GREETING) :], secrets.token_bytes(_NONCE_BYTES)
        self._proof = _proof(self._secret, b"calls", nonce, own)
        return own + _proof(self._secret, b"answers", nonce, own)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    received = bytearray(nbytes)
    receive_into(connection, memoryview(received))
    return bytes(received)


def _proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise WrongPeer("Expected a peer that knows the secret, got one that does not.")
