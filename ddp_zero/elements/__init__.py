"""Parameters that are cut: views of a part of their memory, a part of their state, and which optimizers allow it.

Imports `plan`.
"""
