"""The command `python -m orchestrator.verify`."""

import sys

from gangway.surroundings import clean_up_on_sigterm
from orchestrator.faultlab.verify import command


def main() -> int:
    clean_up_on_sigterm()
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
