"""The optimizer's state as dictionaries: gathered whole, or each rank's owned part; and loading both."""
