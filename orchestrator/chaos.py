"""The command `python -m orchestrator.chaos`."""

import sys

from orchestrator.faultlab.chaos import command
from orchestrator.faultlab.on_sigterm import clean_up_on_sigterm


def main() -> int:
    clean_up_on_sigterm()
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
