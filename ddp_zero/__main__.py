"""``python -m ddp_zero``: versions, and what works on this machine."""

import sys

from ddp_zero import __version__
from ddp_zero.about.report import main

if __name__ == "__main__":
    sys.exit(main(__version__))
