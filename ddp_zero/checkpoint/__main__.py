"""``python -m ddp_zero.checkpoint export``: a checkpoint as plain files of torch."""

import sys

from ddp_zero.checkpoint.export import main

if __name__ == "__main__":
    sys.exit(main())
