"""Options of the launcher."""

from argparse import Namespace

from ddp_zero.__main__ import parsers
from ddp_zero.launch.job import check_options


def options(*arguments: str) -> Namespace:
    parser = parsers()[1]["launch"]
    return check_options(parser.parse_args(["--python=/bin/py", *arguments, "train.py", "--lr", "it's %n"]))
