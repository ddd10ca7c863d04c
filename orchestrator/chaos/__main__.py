"""The command `python -m orchestrator.chaos`."""

import signal
import sys

from orchestrator.chaos import command


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that everything is cleaned up.
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
