"""Jobs whose processes and hosts are killed at random moments, and go on from snapshots."""
