"""The optimizer's state as dictionaries: gathered whole, or each rank's owned part; and loading both."""

from ddp_zero.core.state.frames import MOST_REQUEST_BYTES, receive_frame, receive_into, send_frame
from ddp_zero.core.state.state_dicts import StateDicts, check_state

__all__ = ["MOST_REQUEST_BYTES", "StateDicts", "check_state", "receive_frame", "receive_into", "send_frame"]
