"""What happened on this rank: a ring of events with their times, and sums over them. No torch, no communication."""
