"""What can be seen of a run: estimates, records, pictures, and what works on this machine."""
