"""The tests, by tier; see `tests/conftest.py`."""

HANG = 600.0
"""Seconds after which a test that hangs is ended, however busy the machine is: no outcome depends on it otherwise."""
