"""The tests, by tier; see `tests/conftest.py`."""

HANG = 600.0
"""Seconds after which a test that hangs is ended, however busy the machine is: no outcome depends on it otherwise."""

TIERS = {
    "unit": "quick",
    "accelerator": "nightly",
    "deepspeed": "nightly",
    "extras": "nightly",
    "frameworks": "nightly",
    "gpu": "nightly",
    "hosts": "nightly",
    "scripts": "nightly",
}
"""The tier of each folder; a mark of its own goes before. Tests elsewhere have such a mark, or none.

A run that names neither paths nor marks leaves out the nightly tier.
"""
