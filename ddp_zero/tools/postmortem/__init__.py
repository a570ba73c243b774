"""``python -m ddp_zero postmortem DIR``: what the flight records of all ranks say about the end of a job."""
