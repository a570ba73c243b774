"""``python -m ddp_zero timeline trace.json``: one step as a picture, to see what communication is hidden."""
