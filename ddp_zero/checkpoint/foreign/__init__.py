"""Checkpoints of other libraries, read without running code in them.

Files of `torch.save` hold a pickle, which is a program; here it is interpreted by a machine that knows a few names.
"""
