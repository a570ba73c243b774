"""What one rank holds, and the step it takes on its own: parameters, groups, masters, trees of values.

Imports `plan` and nothing that communicates.
"""
