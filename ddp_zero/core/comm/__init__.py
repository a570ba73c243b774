"""Every message between ranks on process groups: collectives, exchanges, agreement, errors reported to all ranks."""

from ddp_zero.core.comm.communicator import Communicator, next_generation
from ddp_zero.core.comm.control_group import connect, store_of_this_attempt
from ddp_zero.core.comm.groups import Peers, all_gather_text_across
from ddp_zero.core.comm.ranks import WHAT_NOW, Agreement, StepFailedElsewhereError, options_differ
from ddp_zero.core.comm.recorder import RING, Interval, when_failing
from ddp_zero.core.comm.reduction import average_in_place
from ddp_zero.core.comm.serving import start_serving, watch_the_end
from ddp_zero.core.comm.tracing import logger

__all__ = ["Communicator", "Peers", "all_gather_text_across", "connect", "next_generation", "store_of_this_attempt"]
__all__ += ["RING", "WHAT_NOW", "Agreement", "Interval", "StepFailedElsewhereError", "options_differ", "when_failing"]
__all__ += ["average_in_place", "logger", "start_serving", "watch_the_end"]
