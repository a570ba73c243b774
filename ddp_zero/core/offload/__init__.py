"""Optimizer state, masters and the step in other memory than the parameters: on the host.

Imports only `plan` and the options, so that stepped tensors can ask a `Residence` for their memory.
"""
