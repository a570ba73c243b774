"""Parameters in flat storage, and their way from owner to all ranks after a step.

Imports `plan`, `local` and `comm`.
"""
