"""``python -m ddp_zero``: versions, and what works on this machine. Never initializes a process group."""
