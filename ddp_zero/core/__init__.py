"""The private core: plan, communication, backward, step and state of a sharded optimizer."""
