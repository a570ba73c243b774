"""Starting a job: torchrun on every host with ``python -m ddp_zero launch``, and the process group in the script.

Importing this package imports what a script needs, `init_process_group`, and not the launcher.
"""

from ddp_zero.launch.process_group import init_process_group

__all__ = ["init_process_group"]
