"""Messages in flight, from the moment they were posted until they are over. `collectives` posts them."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import Work

Pending = tuple[Callable[[], str], Work]
"""Something in flight, and how messages call the peer."""


class Exchange:
    """Messages in flight. The tensors they are read from and written to must stay untouched until `wait` returns."""

    def __init__(self, works: Sequence[Pending], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # keeps the memory alive that the backend reads and writes
        self._waited = 0  # works that are over; Gloo would wait for a second message

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
                _abandoned.append(self)
                raise RuntimeError(f"Expected {peer()} to take part in {what}, got: {error}") from error
            finally:
                self._waited += position == self._waited and work.is_completed()  # raised after waiting

    def abandon(self) -> None:
        """Never wait for it. Its memory is kept until the process ends, since the backend may still write there."""
        _abandoned.append(self)


_abandoned: list[Exchange] = []
