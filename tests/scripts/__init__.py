"""Training loops in the manner of public scripts, each with the plain optimizer; `variants.py` shards it.

They are written anew, small, with every habit of their models that touches an optimizer, a gradient or a save.
"""
