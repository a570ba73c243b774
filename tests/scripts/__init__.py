"""Training loops in the manner of public scripts, each the plain one; `variants.py` makes the sharded ones of it.

They are written anew, small, with every habit of their models that touches an optimizer, a gradient or a save.
"""
