"""Optimizer state, masters and the step in different memory than the parameters: on the host, or in files.

Imports `plan` and the ground only, so that what holds stepped tensors can ask a `Residence` where they live.
"""
