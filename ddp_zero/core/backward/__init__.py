"""Steps inside DDP's backward: the communication hook, the machine that it obeys, and DDP's internals.

Imports `step` and the rooms below it. `reducer` is the only file that looks into DDP and autograd.
"""
