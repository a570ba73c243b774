"""Views of a run: estimates, records, pictures, and the capabilities of this machine."""
