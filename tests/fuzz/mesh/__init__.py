"""Random mesh programs: models whose ranks hold different parameters, beside the plain optimizer and one device.

| file | owns |
| --- | --- |
| `case.py` | a case as a value, and its arithmetic: who holds what, which tokens go where; without torch |
| `draw.py` | a case from an integer |
| `net.py` | this rank's part of the model, or all of it |
| `side.py` | one of the three runs: its groups, wrappers, optimizer, and a step |
| `run_case.py` | one case on one rank |
"""
