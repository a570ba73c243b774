"""Every message between ranks on process groups: collectives, exchanges, agreement, errors reported to all ranks."""

from ddp_zero.core.comm.communicator import Communicator, next_generation
from ddp_zero.core.comm.control_group import connect, store_of_this_attempt
from ddp_zero.core.comm.groups import Peers, all_gather_text_across
from ddp_zero.core.comm.ranks import WHAT_NOW, Agreement, StepFailedElsewhereError, difference_in_options
from ddp_zero.core.comm.recorder import RECENT_SPANS, Interval, on_failure
from ddp_zero.core.comm.reduction import average_in_place
from ddp_zero.core.comm.serving import start_serving, watch_script_end
from ddp_zero.core.comm.tracing import logger

__all__ = ["Communicator", "Peers", "all_gather_text_across", "connect", "next_generation", "store_of_this_attempt"]
__all__ += [
    "RECENT_SPANS",
    "WHAT_NOW",
    "Agreement",
    "Interval",
    "StepFailedElsewhereError",
    "difference_in_options",
    "on_failure",
]
__all__ += ["average_in_place", "logger", "start_serving", "watch_script_end"]
