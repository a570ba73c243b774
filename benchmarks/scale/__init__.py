"""Step time and memory per rank at 2 to 4,096 ranks, by a model, and its error against measurements.

``python -m benchmarks.scale`` starts it; `predict` states the assumptions of the model.
"""
