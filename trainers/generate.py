"""The command `python -m trainers.generate`, which continues texts with a trained model."""

import sys

from trainers.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
