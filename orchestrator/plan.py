"""The command `python -m orchestrator.plan`."""

import sys

from orchestrator.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
