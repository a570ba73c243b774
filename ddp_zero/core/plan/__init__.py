"""Ownership of parameters and their layout in memory, in plain ints; without torch."""
