"""Flat storage of parameters, and their transfer from the owner to all ranks after a step.

Imports `plan`, `local` and `comm`.
"""
