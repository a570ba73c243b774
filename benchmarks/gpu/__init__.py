"""Every mode beside DDP and FSDP2 on accelerators: correctness first, then speed, memory, and waits of the host.

``python -m benchmarks.gpu --ranks 8`` starts it; `compare` tells how it measures.
"""
