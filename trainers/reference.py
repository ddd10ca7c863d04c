"""The command `python -m trainers.reference`, which writes the log-probabilities of a reference."""

import sys

from trainers.commands.reference import main

if __name__ == "__main__":
    sys.exit(main())
