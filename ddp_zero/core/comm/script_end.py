"""Whether the script of this process has ended with an error: then nothing may keep the process alive."""

import sys
from multiprocessing.util import Finalize


class _Worker:
    has_failed = False


def watch_worker() -> None:
    """Watch for an error that ends a worker of `multiprocessing`. To be called once in each process."""
    # such a process prints its own traceback and sets no `sys.last_value`; its finalizers run while the exception is
    # handled
    Finalize(None, _note_error, exitpriority=100)


def _note_error() -> None:
    error = sys.exc_info()[1]
    # `torch.multiprocessing` turns an exception into an exit code
    _Worker.has_failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def script_has_failed() -> bool:
    """True at the end of a script, or of a worker of `multiprocessing`, that has raised.

    An exit code that a script chooses (``sys.exit(1)``) cannot be seen from inside.
    """
    return _Worker.has_failed or getattr(sys, "last_value", None) is not None  # Python has printed an exception
