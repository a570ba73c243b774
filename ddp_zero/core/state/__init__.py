"""The optimizer's state as dictionaries: gathered whole, or each rank's owned part; and loading both."""

from ddp_zero.core.state.connections import (
    MOST_REQUEST_BYTES,
    Address,
    call,
    listen,
    receive_frame,
    receive_into,
    send_all,
    send_frame,
)
from ddp_zero.core.state.state_dicts import StateDicts, check_state

__all__ = ["MOST_REQUEST_BYTES", "Address", "call", "listen", "receive_frame", "receive_into", "send_all"]
__all__ += ["StateDicts", "check_state", "send_frame"]
