"""``python -m ddp_zero COMMAND``: the commands of the library, one program.

Without a command: ``check``, versions and what works on this machine.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "check": ("ddp_zero.tools.check", "versions, and what works on this machine (the default)"),
    "estimate": ("ddp_zero.tools.estimate", "memory per rank of a model, before anything is allocated"),
    "launch": ("ddp_zero.launch.launcher", "run torchrun on every host of a job"),
    "checkpoint": ("ddp_zero.checkpoint.export", "what a checkpoint holds, and exports of it"),
    "postmortem": ("ddp_zero.tools.postmortem.command", "which rank everyone waited for, from flight records"),
    "timeline": ("ddp_zero.tools.timeline", "a picture of one step, from a trace of torch.profiler"),
    "config": ("ddp_zero.deepspeed.config.command", "what becomes of each key of a DeepSpeed configuration"),
}
"""By command: the module whose `main` takes its arguments, and what it does."""


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{what}" for name, (_, what) in COMMANDS.items()]
    head = "usage: python -m ddp_zero [COMMAND] [ARGUMENTS]\n\nZeRO for plain DistributedDataParallel. Commands:"
    return "\n".join([head, *lines, "", "python -m ddp_zero COMMAND --help shows the arguments of a command."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status; 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if not given or given[0].startswith("-"):
        given.insert(0, "check")
    command, *rest = given
    if command not in COMMANDS:
        print(f"{usage()}\n\nExpected a command of the list, got {command!r}.", file=sys.stderr)
        return 2
    module, _ = COMMANDS[command]
    status: int = importlib.import_module(module).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
