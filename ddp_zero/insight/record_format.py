"""The format of a flight record; `ddp_zero.tools.postmortem` reads it where there is no torch."""

VERSION = 2
FIELDS = (
    *("number", "optimizer", "step", "phase", "bucket", "begun", "ended"),
    *("sent", "received", "message", "peer", "failed"),
)
"""Columns of an event in a file; times in seconds since the epoch, ``ended`` is None for an unfinished event."""

UNCAUGHT = "an uncaught exception"
