"""How far a bucket, a step or a checkpoint walks through the library; `python -m tests.walk` prints it."""
