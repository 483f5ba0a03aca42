"""``python -m autockpt`` is the command ``autockpt``."""

import sys

from autockpt.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
