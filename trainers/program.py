"""The name by which a person has called a command, and its help."""

from __future__ import annotations

import argparse
import sys

GANGWAY = "gangway"


def program(module: str) -> str:
    """Returns how the running command was called, for its usage: `gangway run`, or `python -m orchestrator.run`."""
    # `orchestrator.gangway` sets it before it calls the command.
    return sys.argv[0] if sys.argv[0].startswith(f"{GANGWAY} ") else f"python -m {module}"


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command whose help is the docstring of its module: the first paragraph, and the others below the
    options."""
    about, _, details = str(doc).replace(f"python -m {module}", program(module)).partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program(module), description=about, epilog=details, formatter_class=form)
