"""Events of this rank: a ring of recent ones with their times, and sums over all. No torch, no communication."""
