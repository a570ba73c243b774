"""One sharded step, wherever the gradients come from: ownership, clipping, scaling, skipping, Join.

Imports `comm` and the rooms below it; knows neither DDP nor backward.
"""
