"""One sharded step, wherever the gradients come from: who owns what, clipping, scaling, skipping, Join.

Imports `sync` and what lies below it; knows neither DDP nor backward.
"""
