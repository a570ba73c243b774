"""``python -m ddp_zero postmortem DIR``: which rank, bucket and message everyone waited for."""

import argparse
import sys

from ddp_zero.tools.postmortem.records import read_folder
from ddp_zero.tools.postmortem.report import report


def main(arguments: list[str] | None = None) -> int:
    """Print the report. Returns the exit status: 0, or 1 if there are no records."""
    parser = argparse.ArgumentParser(prog="python -m ddp_zero postmortem", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="where DDP_ZERO_RECORD_DIR or record_to has put the records")
    parser.add_argument("--attempt", type=int, help="of torchrun; by default the last one that has left a record")
    parser.add_argument("--events", type=int, default=0, metavar="N", help="also print the last N events of each rank")
    parser.add_argument("--stacks", action="store_true", help="also print where every thread of each rank was")
    given = parser.parse_args(arguments)
    try:
        records = read_folder(given.folder, given.attempt)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report(records, num_events=given.events, with_stacks=given.stacks))
    return 0
