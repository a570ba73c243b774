"""Every message between ranks: collectives, exchanges, agreement, errors reported to all ranks.

Imports `plan` and `local`. The only package that sends on process groups; `service` has connections of its own.
"""
