"""How much memory a rank will need, by part and in every mode, before anything is allocated.

`ddp_zero.estimate` is the function.
"""
