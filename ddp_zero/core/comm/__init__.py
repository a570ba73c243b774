"""Every message between ranks: collectives, exchanges, agreement, errors reported to all ranks.

Imports `plan` and `local`. The only package that sends on process groups; `service` has connections of its own.
"""

from ddp_zero.core.comm.communicator import Communicator, next_generation
from ddp_zero.core.comm.control_group import connect, store_of_this_attempt
from ddp_zero.core.comm.groups import Peers, check_not_alone, gather_text_across
from ddp_zero.core.comm.ranks import WHAT_NOW, Agreement, StepFailedElsewhereError, options_differ
from ddp_zero.core.comm.recorder import RING, SNAPSHOT_COUNTS, Interval, when_failing
from ddp_zero.core.comm.reduction import average_in_place
from ddp_zero.core.comm.tracing import logger

__all__ = ["Communicator", "connect", "next_generation", "store_of_this_attempt"]
__all__ += ["Peers", "check_not_alone", "gather_text_across"]
__all__ += ["WHAT_NOW", "Agreement", "StepFailedElsewhereError", "options_differ"]
__all__ += ["RING", "SNAPSHOT_COUNTS", "Interval", "average_in_place", "logger", "when_failing"]
