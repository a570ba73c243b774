"""Files, and the progress of work on them. No torch, no communication."""
