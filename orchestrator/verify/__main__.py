"""The command `python -m orchestrator.verify`."""

import signal
import sys

from orchestrator.verify import command


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that everything is cleaned up.
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
