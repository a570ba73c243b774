"""Messages in flight, from the moment they were posted until they are over. `communicator` posts them."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import Work

Pending = tuple[Callable[[], str], Work]
"""Something in flight, and how messages call the peer."""


class Exchange:
    """Messages in flight. The tensors they are read from and written to must stay untouched until `wait` returns.

    One that is dropped before is kept until the process ends, with its memory: a peer may still read from there or
    write there, and on Gloo a message whose buffer is freed meanwhile leaves the connection to its peer unusable.
    """

    def __init__(self, works: Sequence[Pending], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # keeps the memory alive that the backend reads and writes
        self._waited = 0  # works that are over; Gloo would wait for a second message
        if works:
            _unfinished.add(self)

    def wait(self, what: str) -> None:
        """Block until everything has arrived and left. Can be called again after a signal's handler has raised.

        Args:
            what: what is exchanged, for the message, such as ``the sync of bucket 3``.

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
