"""The whole model, of which each rank holds a part: global names, boxes of tensors, and who writes what."""
