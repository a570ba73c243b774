"""Optimizer state, masters and the step in other memory than the parameters: on the host."""

from ddp_zero.core.offload.placement import tensors_in

__all__ = ["tensors_in"]
