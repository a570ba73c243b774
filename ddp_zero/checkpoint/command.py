"""``python -m ddp_zero checkpoint``: ``info`` says what a checkpoint holds, ``export`` writes it as other files."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.export import MODEL_FILE, OPTIMIZER_FILE, export, export_deepspeed
from ddp_zero.checkpoint.folder import folder_of
from ddp_zero.checkpoint.tensor_file import verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, and exits with 1 and a message for a checkpoint that cannot be read."""
    parser = ArgumentParser(prog="python -m ddp_zero checkpoint", description="Work with sharded checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="say what a checkpoint of this library or of DeepSpeed holds")
    info.add_argument("--tensors", action="store_true", help="list the tensors of the model as well")
    info.add_argument("--verify", action="store_true", help="read everything, and compare it with its checksums")
    command = commands.add_parser("export", help=f"write {MODEL_FILE} and {OPTIMIZER_FILE}, as plain as torch's own")
    command.add_argument("--format", choices=("plain", "deepspeed-universal"), default="plain", help="what to write")
    command.add_argument("--fp32", action="store_true", help="plain weights in fp32, of masters where there are some")
    command.add_argument("--exclude-frozen", action="store_true", help="plain weights without frozen parameters")
    for one in (info, command):
        one.add_argument("path", metavar="DIR", help="a checkpoint, or a folder of them: the newest")
    command.add_argument("out", metavar="OUT", help="a folder for the files")
    options = parser.parse_args(arguments)
    try:
        _info(options) if options.command == "info" else _export(options)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return 0


def _info(options: Namespace) -> None:
    saved = SavedCheckpoint.open(folder_of(options.path))
    print(saved.folder)
    for title, text in saved.summary():
        print(f"  {title:<14}{text}")
    for name, stored in saved.tensors().items() if options.tensors else ():
        print(f"  {name}: {stored.describe()}")
    if options.verify:
        verify(saved.folder, saved.stored())
        print("  everything fits its checksums")


def _export(options: Namespace) -> None:
    path, out = folder_of(options.path), folder_of(options.out)
    if options.format == "deepspeed-universal":
        if options.fp32 or options.exclude_frozen:
            raise ValueError("Expected --fp32 and --exclude-frozen with --format plain: DeepSpeed's has fp32 alone.")
        print(export_deepspeed(path, out))
        return
    for file in export(path, out, fp32=options.fp32, exclude_frozen=options.exclude_frozen):
        print(f"{file}: {file.stat().st_size:,} bytes")
