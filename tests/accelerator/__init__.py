"""A simulated accelerator: what a GPU would only show as rare wrong numbers is an error here.

`device.load` compiles the extension once per environment and makes the device ``sim`` and its process groups known to
torch. `engine.h` says what is ordered before what; `collectives.cpp` has the rules of NCCL.
"""
