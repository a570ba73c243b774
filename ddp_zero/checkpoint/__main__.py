"""``python -m ddp_zero.checkpoint export``: write a checkpoint as plain files."""

import sys

from ddp_zero.checkpoint.export import main

if __name__ == "__main__":
    sys.exit(main())
