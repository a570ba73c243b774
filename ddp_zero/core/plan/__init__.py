"""Ownership of parameters and their layout in memory, in plain ints.

Imports neither torch nor any other package of the library.
"""
