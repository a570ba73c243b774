"""Steps inside DDP's backward: the communication hook, the machine that it obeys, and the gradients of each stage."""

from ddp_zero.core.backward.overlap_machine import Phase

__all__ = ["Phase"]
