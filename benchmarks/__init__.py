"""Benchmarks: cost and savings of the library, measured and predicted; run from the repository's root.

- ``python -m benchmarks.race``: modes side by side, step time, bytes on the wire and peak memory.
- ``python -m benchmarks.gpu``: modes on GPUs: correctness, tokens per second, memory, waits of the host.
- ``python -m benchmarks.scale``: a model of step time and memory at 2 to 4,096 ranks.
- ``python -m benchmarks.checkpoint``: time and memory of saving and loading.
- ``python -m benchmarks.memory``: peak memory of every mode, on a large model.
- ``python -m benchmarks.overhead``: CPU time of messages by size of chunk, and passes over all parameters.
- ``python -m benchmarks.partition``: time of planning.

Tables, pictures and raw numbers go to ``benchmarks/results/``.
"""
