"""The command `python -m orchestrator.verify`."""

import signal
import sys

from orchestrator.verify.command import main

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that everything is cleaned up.
sys.exit(main())
