"""The owner of every parameter and its place in memory, as plain ints: no torch, no communication.

Imports nothing.
"""
