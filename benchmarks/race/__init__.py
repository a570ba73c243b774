"""Step time, bytes on the wire and peak memory of sharded and unsharded training, raced in turns on this machine.

``python -m benchmarks.race`` starts it; `compare` tells how it measures.
"""
