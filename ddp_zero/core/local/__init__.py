"""The shard of one rank, and its local step: parameters, groups, masters, trees of values."""
