"""The command `python -m orchestrator.run`."""

import sys

from orchestrator.commands.run import main

if __name__ == "__main__":
    sys.exit(main())
