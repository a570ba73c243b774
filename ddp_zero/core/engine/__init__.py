"""The engine of the optimizer: when a step is taken, and the work behind its methods."""
