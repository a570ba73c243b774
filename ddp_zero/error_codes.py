"""The codes at the end of messages, such as ``[ZERO-104]``; ``docs/troubleshooting.md`` explains each.

A code is a literal part of its message, so that a search for it finds both. This file has the one case that needs more:
a message that quotes an error, whose own code says more than the code of the message around it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_CODE = re.compile(r" \[ZERO-\d{3}\]")


def coded(message: str, code: str) -> str:
    """A message with one code at its end: the code of the errors that it quotes, else its own, as ``[ZERO-505]``.

    Codes of several errors that differ stay where they are.
    """
    quoted = set(_CODE.findall(message))
    if len(quoted) > 1:
        return f"{message} {code}"
    return _CODE.sub("", message) + (quoted.pop() if quoted else f" {code}")


def uncoded(message: str) -> str:
    """A message without its code, for one that has a remedy of its own."""
    return _CODE.sub("", message)


@contextmanager
def ending_with(code: str) -> Iterator[None]:
    """Errors in arguments that torch finds, in its words, end with a code as well."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = (coded(str(error), code), *error.args[1:])
        raise


def truncated(message: str, nbytes: int) -> bytes:
    """The beginning of a message as UTF-8, in at most so many bytes, with its code at the end."""
    raw = message.encode(errors="replace")
    if len(raw) <= nbytes:
        return raw
    code = "".join(_CODE.findall(message)[-1:]).encode()
    return raw[: nbytes - len(code)] + code
