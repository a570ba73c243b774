"""``ddp-zero COMMAND``, or ``python -m ddp_zero COMMAND``: the commands of the library, one program.

Without a command: ``check``, versions and features that work on this machine.
"""

import importlib
import os
import select
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, TextIO

COMMANDS = {
    "check": ("ddp_zero.tools.check", "show versions, and whether the library can work on this machine (default)"),
    "estimate": ("ddp_zero.tools.estimate", "estimate the memory per rank of a model, without allocating it"),
    "launch": ("ddp_zero.launch.launcher", "run torchrun on every host of a job"),
    "checkpoint": ("ddp_zero.checkpoint.export", "show the contents of a checkpoint, or export it to plain files"),
    "postmortem": (
        "ddp_zero.tools.postmortem.command",
        "name the rank that a hung job waits for, from its records",
    ),
    "timeline": ("ddp_zero.tools.timeline", "draw one step of a trace of torch.profiler"),
    "explain": ("ddp_zero.tools.explain_code", "explain the code at the end of an error, such as ZERO-203"),
    "config": ("ddp_zero.deepspeed.config.command", "explain each key of a DeepSpeed configuration"),
}
"""By command: a module with `build_parser` and `main`, and the line of the help text."""

SHELLS = ("bash", "zsh", "tcsh")


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ddp-zero [--version] [--print-completion SHELL] [COMMAND] [ARGUMENTS]",
            "",
            "ZeRO for plain DistributedDataParallel.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --version                  show the version",
            f"  --print-completion SHELL   print a script that completes commands: {', '.join(SHELLS)}",
            "",
            "ddp-zero COMMAND --help shows the arguments of a command. python -m ddp_zero is the same program.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status; 2 for an unknown command.

    Where the reader of its output is gone, as ``head`` is after its lines, it ends with the status of a program that
    SIGPIPE has ended, and says nothing.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # here, where a broken pipe can be caught: not at the exit of the interpreter
    except BrokenPipeError:
        broken = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not broken:
            raise  # of a pipe that a command has opened
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in broken:
            os.dup2(nowhere, stream.fileno())  # the interpreter flushes both once more
        os.close(nowhere)
        return 128 + signal.SIGPIPE


def _has_no_reader(stream: TextIO) -> bool:
    asked = select.poll()  # an unbuffered stream has nothing left that a flush could fail to write
    asked.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in asked.poll(0))


def _run(given: list[str]) -> int:
    first = given[0] if given else "check"
    if first in ("-h", "--help"):
        print(usage())
        return 0
    if first == "--version":
        from ddp_zero import __version__

        print(f"ddp_zero {__version__}")
        return 0
    if first == "--print-completion":
        return print_completion(given[1:])
    if first.startswith("-"):  # options of the default
        first, given = "check", ["check", *given]
    if first not in COMMANDS:
        print(f"{usage()}\n\nddp-zero: error: there is no command {first!r}.", file=sys.stderr)
        return 2
    status: int = _module(first).main(given[1:])
    return status


def print_completion(arguments: Sequence[str]) -> int:
    """Print a completion script for a shell. Returns the exit status."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        print(f"ddp-zero: error: --print-completion takes one of {', '.join(SHELLS)}.", file=sys.stderr)
        return 2
    try:
        import shtab
    except ImportError:
        print("ddp-zero: error: completion needs shtab. Run pip install 'ddp_zero[completion]'.", file=sys.stderr)
        return 1
    print(shtab.complete(whole_parser(), arguments[0]))
    return 0


def whole_parser() -> ArgumentParser:
    """The parser of all commands, as a completion script needs it."""
    parser = ArgumentParser(prog="ddp-zero")
    commands = parser.add_subparsers(dest="command")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, parents=[_module(name).build_parser()], add_help=False, help=summary)
    return parser


def _module(command: str) -> Any:
    return importlib.import_module(COMMANDS[command][0])


if __name__ == "__main__":
    sys.exit(main())
