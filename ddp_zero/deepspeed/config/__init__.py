"""A DeepSpeed configuration as a frozen, validated value, with the effect of each key. Runs without torch."""
