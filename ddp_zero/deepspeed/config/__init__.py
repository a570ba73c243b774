"""A DeepSpeed configuration as a frozen, validated value: what each of its keys does here. Runs without torch."""
