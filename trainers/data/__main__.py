"""The command `python -m trainers.data`, which shows the data of a configuration."""

import sys

from trainers.commands.data import main

if __name__ == "__main__":
    sys.exit(main())
