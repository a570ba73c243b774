"""Messages in flight, from posting to completion. `communicator` posts them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Waitable(Protocol):
    """What `torch.distributed.Work` is to an exchange."""

    def wait(self) -> object:
        """Block until it is complete."""

    def is_completed(self) -> bool:
        """True if it has ended."""


class NotPosted:
    """A message that could not be posted; waiting for it raises the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._message = str(error)  # the error itself would keep the frames alive through which it is raised

    def wait(self) -> object:
        """Raise the error."""
        raise RuntimeError(self._message)

    def is_completed(self) -> bool:
        """False: it never will be."""
        return False


Pending = tuple[Callable[[], str], Waitable]
"""A message in flight, and a function that names the peer."""


class InFlight(Protocol):
    """What was started and must be waited for."""

    def wait(self, what: str) -> None:
        """Block until it is complete; see `Exchange.wait`."""


class Exchange:
    """Messages in flight. The tensors they are read from and written to must stay untouched until `wait` returns.

    An exchange that is dropped before that is kept until the process ends, with its memory: a peer may still read or
    write there, and on Gloo freeing a message's buffer meanwhile makes the connection to its peer unusable.
    """

    def __init__(self, works: Sequence[Pending], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # keeps the memory alive that the backend reads and writes
        self._waited = 0  # completed works: waiting again on Gloo would wait for a second message
        if works:
            _unfinished.add(self)

    def wait(self, what: str) -> None:
        """Block until everything was received and sent. Can be called again after a signal handler has raised.

        Args:
            what: the name of the exchange in the error message, such as ``the sync of bucket 3``.

        Raises:
            RuntimeError: naming the peer, if one failed or the group's time-out passed.
        """
        for position, (peer, work) in enumerate(self._works[self._waited :], start=self._waited):
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"Expected {peer()} to take part in {what}, got: {error}") from error
            finally:
                self._waited += position == self._waited and work.is_completed()  # raised after waiting
        _unfinished.discard(self)


_unfinished: set[Exchange] = set()
