"""``python -m ddp_zero config check ds_config.json``: what becomes of each key here."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.document import read
from ddp_zero.deepspeed.config.keys import ConfigError
from ddp_zero.deepspeed.config.page import listing, render
from ddp_zero.deepspeed.config.table import autos, find


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 1 if a configuration cannot be used."""
    parser = ArgumentParser(prog="python -m ddp_zero config", description="DeepSpeed configurations in ddp_zero.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="print what becomes of each key of a configuration")
    check.add_argument("config", help="a JSON file")
    check.add_argument("--ranks", type=int, default=1, help="the number of ranks, for the batch sizes (default: 1)")
    commands.add_parser("keys", help="print the page of all keys")
    options = parser.parse_args(arguments)
    if options.command == "keys":
        print(render(), end="")
        return 0
    return _check(options.config, options.ranks)


def _check(path: str, ranks: int) -> int:
    try:
        document = read(path)
        print(listing(find(document)))
        left = autos(document)
        if left:
            print(f'\n"auto" is filled in when training begins, so values were not checked: {", ".join(left)}')
        else:
            batch = Config.parse(document, ranks).batch
            print(f"\n{batch.train} samples a step = {batch.micro} * {batch.accumulation} rounds * {ranks} ranks")
    except ConfigError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0
