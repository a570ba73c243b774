"""Integrations with frameworks: a module for each, which imports the framework.

`docs/frameworks.md` shows how to use each, and the results of its tests.
"""
