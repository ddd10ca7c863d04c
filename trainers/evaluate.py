"""The command `python -m trainers.evaluate`, which evaluates checkpoints."""

import sys

from trainers.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
