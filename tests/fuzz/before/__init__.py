"""Cases about all that existed before the optimizer: equal to DDP with the plain one, or refused by a code that fits.

Gradients, references to DDP's reducer, hooks, earlier optimizers of torch's and of the library, a module wrapped
before, and passes in ``no_sync()`` or interrupted. `draw.py` draws a case from an integer, `run_case.py`
runs it on a rank.
"""
