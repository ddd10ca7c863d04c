"""`gangway save RUN|CONFIG`: lets a run save now and go on, from any machine that sees its storage.

Exit status: 0; 1 when it has not saved in time; 2 when there is no such run, or it does not go on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gangway.program import command
from orchestrator.config.locate import REFUSALS
from orchestrator.runs import asking


@command(*REFUSALS)
def main(argv: Sequence[str] | None = None) -> int:
    return asking.main("save", "orchestrator.runs.save", "Lets a run save now, and go on.", argv)


if __name__ == "__main__":
    sys.exit(main())
