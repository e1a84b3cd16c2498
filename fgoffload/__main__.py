"""Entry point for `python -m fgoffload`."""

import sys

from fgoffload.cli import main

if __name__ == "__main__":
    sys.exit(main())
