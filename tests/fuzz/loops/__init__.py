"""Training loops as people write them, each beside DDP with the plain optimizer: equal, or refused with a fitting code.

``python -m tests.fuzz --loops --cases 300 --ranks 2``; ``--only SEED`` prints one loop and runs it again.

The plain loop runs first and leaves a trace. The sharded one runs afterwards, alone: nothing that the fuzzer does
between two statements holds ranks together, and each rank sleeps now and then, so that they drift apart as in a job.

| file | owns |
| --- | --- |
| `case.py` | a loop: statements by iteration, frozen, without torch |
| `draw.py`, `idioms.py` | a loop from an integer; the forms in which people write its parts |
| `expect.py` | the statements after which a mode may or must refuse, and with which codes |
| `statements.py` | the statements, carried out on either side |
| `run_case.py` | one loop on one rank |
"""
