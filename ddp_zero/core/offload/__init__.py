"""Optimizer state, masters and the step in other memory than the parameters: on the host."""
