"""Step time and memory per rank at 2 to 4,096 ranks, by a model, and how far that is from what was measured.

``python -m benchmarks.scale`` starts it; `predict` tells what the model assumes.
"""
