"""The optimizer's state as dictionaries: gathered whole, or each rank's own part; and loading both.

Imports `backward` and what lies below it, never `stage2`.
"""
