"""ZeRO stages 1 and 2 for plain PyTorch DistributedDataParallel: state and gradients sharded, the numbers unchanged."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_zero.public import *  # noqa: F403
    from ddp_zero.public import __all__ as __all__
else:

    def __getattr__(name):
        """Import all names with the first: torch takes seconds, which the help of a command does not need."""
        if name == "__all__" or not name.startswith("__"):
            public = import_module("ddp_zero.public")
            globals().update({one: getattr(public, one) for one in ("__all__", *public.__all__)})
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *import_module("ddp_zero.public").__all__})


__version__ = "0.1.0"
