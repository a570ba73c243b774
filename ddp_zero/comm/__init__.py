"""Every message between ranks: collectives, exchanges, agreement, errors reported to all ranks.

Imports `plan` and `local`. The only package that communicates.
"""
