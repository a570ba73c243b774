"""``ddp-zero COMMAND``, or ``python -m ddp_zero COMMAND``: the commands of the library, one program.

Without a command: ``check``, versions and features that work on this machine. Command lines are parsed here, before
torch is imported, which takes seconds.
"""

import importlib
import os
import select
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ddp_zero import __version__
from ddp_zero.error_codes import coded
from ddp_zero.launch import job

SHELLS = ("bash", "zsh", "tcsh")


class Parser(ArgumentParser):
    """A parser whose errors begin with the program's name, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {coded(message, '[ZERO-905]')}\n'{self.prog} --help' shows what it takes.\n")


def _check(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def _estimate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODULE:FUNCTION", help="a function that returns a module; it is called on the meta device")
    add("--ranks", type=int, default=8, help="number of ranks that share the state (default: 8)")
    add("--optimizer", default="AdamW", help="a class in torch.optim (default: AdamW)")
    add("--stage", type=int, choices=(0, 1, 2), help="show this stage only; 0 is DDP")
    add("--partition", choices=("parameters", "elements"), help="show this partition only")
    add("--dtype", help="dtype of the parameters, such as bfloat16")
    add("--master-weights", action="store_true", help="keep an fp32 copy of low-precision parameters")
    add("--offload", choices=("cpu",), help="also the modes whose state and step are on the host")
    add("--device", default="cuda", help="where the model is to be trained: cpu, cuda, ... (default: cuda)")
    add("--bucket-cap-mb", type=float, help="the bucket_cap_mb of DistributedDataParallel")
    add("--memory", help="memory per rank, such as 80GiB: print the fewest ranks that fit")


def _checkpoint(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    info = actions.add_parser("info", help="show the contents of a checkpoint of this library or of DeepSpeed")
    info.add_argument("--tensors", action="store_true", help="list the tensors of the model as well")
    info.add_argument("--verify", action="store_true", help="read everything, and compare it with its checksums")
    export = actions.add_parser("export", help="write model.safetensors and optimizer.pt, as plain as torch's own")
    formats = "as torch saves, or as DeepSpeed loads (default: plain)"
    export.add_argument("--format", choices=("plain", "deepspeed-universal"), default="plain", help=formats)
    export.add_argument("--fp32", action="store_true", help="plain weights in fp32, of masters where there are some")
    export.add_argument("--exclude-frozen", action="store_true", help="plain weights without frozen parameters")
    for one in (info, export):
        one.add_argument("path", metavar="DIR", help="a checkpoint, or a folder of them: the newest")
    export.add_argument("out", metavar="OUT", help="a folder for the files")


def _postmortem(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where DDP_ZERO_RECORD_DIR or record_to has put the records")
    parser.add_argument("--attempt", type=int, help="attempt of torchrun (default: the last with a record)")
    parser.add_argument("--events", type=int, default=0, metavar="N", help="also print the last N events of each rank")
    parser.add_argument("--stacks", action="store_true", help="also print where every thread of each rank was")


def _explain(parser: ArgumentParser) -> None:
    parser.add_argument("code", help="such as ZERO-203, or 203")


def _config(parser: ArgumentParser) -> None:
    parser.epilog = "'config FILE' is 'config check FILE'; 'config KEY' is 'config keys KEY'."
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="print the effect of each key of a configuration")
    check.add_argument("config", help="a JSON file")
    check.add_argument("--ranks", type=int, default=1, help="the number of ranks, for the batch sizes (default: 1)")
    keys = actions.add_parser("keys", help="print the page of all keys, or the effect of some")
    keys.add_argument("key", nargs="?", help="such as zero_optimization.stage, or a part of it")


COMMANDS: dict[str, tuple[str, str, Callable[[ArgumentParser], None]]] = {
    "check": ("tools.check", "show versions, and whether the library can work on this machine (default)", _check),
    "estimate": ("tools.estimate", "estimate the memory per rank of a model, without allocating it", _estimate),
    "launch": ("launch.launcher", "run torchrun on every host of a job, and stop all together", job.add_arguments),
    "checkpoint": ("checkpoint.export", "show the contents of a checkpoint, or export it to plain files", _checkpoint),
    "postmortem": (
        "tools.postmortem.command",
        "name the rank that a hung job waits for, from its records",
        _postmortem,
    ),
    "explain": ("tools.explain_code", "explain the code at the end of an error, such as ZERO-203", _explain),
    "config": ("deepspeed.config.command", "explain each key of a DeepSpeed configuration", _config),
}
"""By command: a module whose `main` takes the parsed options, the line of the help text, and what adds the options."""

WITHOUT_TORCH = {"launch", "postmortem", "explain"}


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the program, and by command the one of its arguments."""
    whole = Parser(prog="ddp-zero", description="ZeRO for plain DistributedDataParallel.")
    whole.epilog = "ddp-zero COMMAND --help shows the arguments of a command. python -m ddp_zero is the same program."
    whole.add_argument("--version", action="version", version=f"ddp_zero {__version__}", help="show the version")
    completes = "print a script that completes commands"
    whole.add_argument("--print-completion", metavar="SHELL", choices=SHELLS, help=f"{completes}: {', '.join(SHELLS)}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, summary, add_arguments) in COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        add_arguments(commands.add_parser(name, help=summary, description=description))
    return whole, commands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status.

    Wrong arguments end the process with exit code 2. Where the reader of the output is gone, as ``head`` is after its
    lines, the status is as after SIGPIPE, and nothing is said.
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
    whole, of_command = parsers()
    first = given[0].partition("=")[0] if given else "check"
    if first in ("-h", "--help", "--version", "--print-completion"):
        shell: str = whole.parse_args(given).print_completion
        return print_completion(whole, shell)
    if first.startswith("-"):  # options of the default
        first = "check"
        given = ["check", *given]
    if first not in COMMANDS:
        near = get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}."
        whole.error(f"there is no command {first!r}; {hint}")
    if first == "config" and given[1:] and given[1] not in ("check", "keys") and not given[1].startswith("-"):
        given.insert(1, "check" if given[1].endswith(".json") or Path(given[1]).exists() else "keys")
    options = of_command[first].parse_args(given[1:])
    if first not in WITHOUT_TORCH:
        importlib.import_module("ddp_zero.tools.needs")  # an unusable torch is refused there
    module: Any = importlib.import_module(f"ddp_zero.{COMMANDS[first][0]}")
    status: int = module.main(options)
    return status


def print_completion(whole: ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        print(
            "ddp-zero: error: completion needs shtab. Run pip install 'ddp_zero[completion]'. [ZERO-909]",
            file=sys.stderr,
        )
        return 1
    print(shtab.complete(whole, shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
