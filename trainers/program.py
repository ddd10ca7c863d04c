"""The name by which a person has called a command."""

from __future__ import annotations

import sys

GANGWAY = "gangway"


def program(module: str) -> str:
    """Returns how the running command was called, for its usage: `gangway run`, or `python -m orchestrator.run`."""
    # `orchestrator.gangway` sets it before it calls the command.
    return sys.argv[0] if sys.argv[0].startswith(f"{GANGWAY} ") else f"python -m {module}"
