"""The private core: who owns what, one sharded step, and the backward pass that drives it."""
