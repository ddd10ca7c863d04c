"""`gangway logs RUN|CONFIG [--host N] [--follow]`: what the processes of a run have printed, from its folder.

Exit status: 0; 2 when there is no such run or host.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gangway.program import EXIT_FINE, command
from gangway.storage.documents import Where
from gangway.storage.opening import place_of
from gangway.storage.store import Entry, Place
from gangway.terminal import nobody_looks
from orchestrator.config.locate import REFUSALS, NoRunError, parser_of_run, run_of
from trainers.console.text import printable

FOLDER = "logs"
_LOG = re.compile(r"host-(\d+)/process-[^/]*\.log")
LINES = 50
FOLLOW_EVERY_S, FOLLOW_IN_BUCKET_EVERY_S = 1.0, 10.0
TAIL_BYTES = 4 << 20


class Log(NamedTuple):
    """The newest log of a host."""

    host: int
    place: Place
    size: int
    """Bytes, as of the look."""


@command(*REFUSALS, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    about = "What the processes of a run have printed."
    parser = parser_of_run("orchestrator.runs.logs", about, example="runs/spirals --host 1 --follow")
    parser.add_argument("--host", type=int, metavar="N", help="of one host alone, from 0 (default: of all)")
    parser.add_argument(
        "--lines", type=int, default=LINES, metavar="N", help=f"the last N of each log; 0: all (default: {LINES})"
    )
    parser.add_argument("--follow", action="store_true", help="show what comes, until Ctrl-C")
    options = parser.parse_intermixed_args(argv)
    if options.lines < 0:
        parser.error(f"--lines {options.lines}: expected 0 or more")
    run = run_of(options.run, options.overrides)
    found = newest(run, options.host)
    for log in found:
        print(f"==> host {log.host}: {log.place} <==")
        for line in last_lines(log, options.lines):
            print(printable(line))
    if options.follow:
        follow(run, options.host, found)
    return EXIT_FINE


def newest(run: Where, host: int | None) -> list[Log]:
    """Returns the newest log of each host of a run that has one, or of one host. Raises NoRunError if there is none, and
    OSError."""
    folder = place_of(run) / FOLDER
    by_host: dict[int, list[Entry]] = {}
    for entry in folder.list():
        if match := _LOG.fullmatch(entry.name):
            by_host.setdefault(int(match[1]), []).append(entry)
    if host is not None and host not in by_host:
        there = ", ".join(map(str, sorted(by_host))) or "none"
        raise NoRunError(f"{run} has no log of host {host}; there are those of: {there}")
    # A process that stands by has a log, too: an empty one.
    chosen = {
        number: [one for one in by_host[number] if one.size] for number in ([host] if host is not None else sorted(by_host))
    }
    newest_of = {number: max(found, key=lambda one: (one.changed_s, one.name)) for number, found in chosen.items() if found}
    if not newest_of:
        raise NoRunError(f"{run} has no logs yet: its hosts copy them to {folder} every half minute")
    return [Log(number, folder / entry.name, entry.size) for number, entry in newest_of.items()]


def last_lines(log: Log, number: int) -> list[str]:
    """Returns the last lines of a log; 0: all. Raises OSError."""
    begin = max(0, log.size - TAIL_BYTES) if number else 0
    lines = (log.place.store.get_part(log.place.key, begin, log.size) or b"").decode(errors="replace").splitlines()
    return lines[-number:] if number else lines


def follow(run: Where, host: int | None, shown: Sequence[Log]) -> None:
    """Shows what is added to the logs, those of later processes too, until Ctrl-C, or until nobody reads it any more."""
    sizes = {log.place.url: log.size for log in shown}
    every_s = FOLLOW_EVERY_S if place_of(run).store.is_local else FOLLOW_IN_BUCKET_EVERY_S
    try:
        while not nobody_looks():
            time.sleep(every_s)
            for log in newest(run, host):
                for line in _added(log, sizes):
                    print(f"host {log.host}  {printable(line)}", flush=True)
    except KeyboardInterrupt:
        return


def _added(log: Log, sizes: dict[str, int]) -> Iterator[str]:
    before = sizes.get(log.place.url, 0)
    # A log that has grown too large is emptied, and begins anew.
    before = before if before <= log.size else 0
    added = (log.place.store.get_part(log.place.key, before, log.size) or b"") if before < log.size else b""
    whole = added[: added.rfind(b"\n") + 1]
    sizes[log.place.url] = before + len(whole)
    yield from whole.decode(errors="replace").splitlines()


if __name__ == "__main__":
    sys.exit(main())
