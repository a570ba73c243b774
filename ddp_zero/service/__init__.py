"""Answers to other ranks' questions, on TCP connections of its own, given by threads while the training loop goes on.

Knows nothing of process groups: ranks tell each other their `Address` by other means.
"""
