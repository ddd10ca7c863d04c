"""The command `python -m orchestrator.run`."""

from gangway.program import leave
from orchestrator.commands.run import main

if __name__ == "__main__":
    leave(main())
