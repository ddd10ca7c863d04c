"""The command `python -m trainers.run`, which trains in this one process, and the reader of its configuration."""

import os

from gangway.surroundings import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory(os.environ, "trainers.run")  # first: it begins the process anew

from gangway.program import leave
from trainers.commands.run import main
from trainers.settings import read

__all__ = ["main", "read"]

if __name__ == "__main__":
    leave(main())
