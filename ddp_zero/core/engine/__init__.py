"""When a step is taken, and what the façade hands on."""
