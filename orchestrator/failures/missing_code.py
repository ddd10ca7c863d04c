"""A machine without the program's code, as Ray tells of it: its actors there die, with a traceback in a text. Pure."""

from __future__ import annotations

import re

from gangway.errors import HOW_TO_SHIP

NO_MODULE = re.compile(r"ModuleNotFoundError\W+No module named \W*([\w.]+)")
ADDRESS = re.compile(r"\bip=([\w.:]+)")


def explain(text: str) -> str | None:
    """Returns which module is missing on which machine, and what to do; None if the text tells of something else."""
    missing = NO_MODULE.search(text)
    if missing is None:
        return None
    machine = ADDRESS.search(text)
    where = f"on the machine {machine[1]}" if machine else "on one of the machines of the cluster"
    return f"no module named {missing[1]!r} {where}: {HOW_TO_SHIP}"
