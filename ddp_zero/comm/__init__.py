"""Every message between ranks: collectives, exchanges, agreement, errors that all ranks must hear of.

Imports `plan` and `local`. The only package that communicates.
"""
