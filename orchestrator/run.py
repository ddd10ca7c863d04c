"""Runs a job: `python -m orchestrator.run CONFIG [key=value ...] [--fresh] [--dry-run [--all]]`.

On this machine alone it starts Ray itself; with RAY_ADDRESS (or driver.address, or inside `ray job submit`) it uses that cluster.
Exit status: 0 training finished; 1 it failed; 2 the configuration is wrong, the cluster does not answer, or the run is in use;
3 stopped on request, state saved; 130 (Ctrl-C) or 143 (SIGTERM) interrupted before anything was trained.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NoReturn

from gangway.first_line import say
from gangway.program import Parser, command, leave


@command(interrupted="interrupted before anything was trained; what earlier launches of the run have saved is as it was")
def main(argv: list[str] | None = None) -> int:
    began_s = time.monotonic()
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.dry_run:  # standard output is for what it prints
        say(f"checking {arguments.config}: nothing is started", stream=sys.stderr)
    else:
        say(f"reading {arguments.config}", clock=True)
    # After the first line: this imports much.
    from orchestrator.commands.launching import run

    how = {"begin_anew": arguments.fresh, "only_tell": arguments.dry_run, "everything": arguments.all}
    return run(arguments.config, arguments.overrides, began_s=began_s, **how)


class RunParser(Parser):
    """Says of an option that there is not how the setting is given that it may stand for."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            from orchestrator.config.job import as_settings

            message = f"{message}; {as_settings(message)}"
        super().error(message)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = RunParser("orchestrator.run", "Train on one machine or many.", example="config.yaml optimizer.learning_rate=1e-3")
    parser.add_argument("config", help="a YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optimizer.learning_rate=1e-3 hosts.count=4")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, take no machine")
    parser.add_argument("--all", action="store_true", help="with --dry-run: print the settings that have their defaults, too")
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew: the folder of an earlier run of this name is moved aside, and kept"
    )
    options = parser.parse_intermixed_args(argv)
    if options.all and not options.dry_run:
        parser.error("--all says what --dry-run prints: add --dry-run")
    return options


if __name__ == "__main__":
    leave(main())
