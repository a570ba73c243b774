"""Gradients that only their owner keeps: reduced segments, their memory, and what `param.grad` shows.

Imports `backward` and what lies below it.
"""
