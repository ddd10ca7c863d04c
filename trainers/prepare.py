"""The command `python -m trainers.prepare`, which makes the tokens of data before training."""

import sys

from trainers.commands.prepare import main

if __name__ == "__main__":
    sys.exit(main())
