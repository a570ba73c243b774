"""``python -m ddp_zero.launch``: run torchrun on every host of a job."""

import sys

from ddp_zero.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
