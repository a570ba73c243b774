"""Checkpoints that other libraries wrote, read without running what is in them.

Files of `torch.save` hold a pickle, which is a program; here it is interpreted by a machine that knows a few names.
"""
