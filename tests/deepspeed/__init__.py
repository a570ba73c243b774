"""Comparisons with DeepSpeed itself, skipped where it is not installed; the command is in docs/from-deepspeed.md."""
