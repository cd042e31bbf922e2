"""`python -m mainstem` is `mainstem`."""

import sys

from mainstem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
