"""The command `python -m trainers.run`, which trains in this one process, and the reader of its configuration."""

import sys

from trainers.commands.run import main
from trainers.settings import read

__all__ = ["main", "read"]

if __name__ == "__main__":
    sys.exit(main())
