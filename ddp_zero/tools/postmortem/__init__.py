"""``ddp-zero postmortem DIR``: the end of a job, as told by the flight records of all ranks."""
