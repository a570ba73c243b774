"""The library in the hands of frameworks: a file for each, imported only by who uses it.

`docs/frameworks.md` shows a line for each, and what the tests of each have shown.
"""
