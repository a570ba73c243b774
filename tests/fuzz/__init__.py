"""A fuzzer: random programs on DDP + the plain optimizer and on ours, compared bit for bit after every operation.

``python -m tests.fuzz --cases 3000 --ranks 2 --seed 0``; ``--only SEED`` replays one case and prints it. ``--mesh``
draws programs whose ranks hold different parameters, ``--loops`` training loops as people write them.

| file | owns |
| --- | --- |
| `case.py` | what a case is: frozen, without torch, printed as a program |
| `draw.py`, `draw_program.py` | a case from an integer |
| `net.py` | the model of a case |
| `late_values.py` | parameters' values that backward reads again, and whether it may |
| `toys.py` | optimizers of the fuzzer's own |
| `sides.py` | model, optimizer and what else a loop has, of one of the two runs |
| `plain.py`, `ours.py` | the reference; the sharded run |
| `actions.py`, `iteration.py`, `operations.py` | operations of a program, on either side |
| `refusals.py` | what may raise, where, and with which message |
| `compare.py` | equality to the last bit |
| `run_case.py` | one case on one rank |
| `rank.py` | a rank's process, which runs case after case |
| `pool.py` | the parent: starts ranks, watches the time, gathers outcomes |
| `faults.py` | cases in which one rank fails, dies or stops |
| `loops/` | training loops as people write them: equal, or refused by a message that fits |
| `before/` | what existed before the optimizer: equal, or refused by a code that fits |
| `mesh/` | cases on a mesh: experts, tensor and pipeline parallelism, beside plain optimizers and one device |
| `__main__.py` | the command |
"""
