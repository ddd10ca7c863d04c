"""`gangway logs RUN_DIR|CONFIG [--host N] [--follow]`: what the processes of a run have printed, from its folder.

Exit status: 0; 2 when there is no such run or host.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.config.job import ConfigError
from orchestrator.config.locate import NoRunError, checkpoints_of, parser_of_run
from trainers.console.text import printable
from trainers.terminal import command, nobody_looks

EXIT_FINE, EXIT_REFUSED = 0, 2
FOLDER = "logs"
LINES = 50
FOLLOW_EVERY_S = 1.0
TAIL_BYTES = 4 << 20


@command
def main(argv: Sequence[str] | None = None) -> int:
    about = "What the processes of a run have printed."
    parser = parser_of_run("orchestrator.runs.logs", about)
    parser.add_argument("--host", type=int, metavar="N", help="of one host alone, from 0 (default: of all)")
    parser.add_argument(
        "--lines", type=int, default=LINES, metavar="N", help=f"the last N of each log; 0: all (default: {LINES})"
    )
    parser.add_argument("--follow", action="store_true", help="show what comes, until Ctrl-C")
    options = parser.parse_intermixed_args(argv)
    if options.lines < 0:
        parser.error(f"--lines {options.lines}: expected 0 or more")
    try:
        run_dir = checkpoints_of(options.run, options.overrides).parent
        found = newest(run_dir, options.host)
    except (ConfigError, NoRunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    for host, path in found:
        print(f"==> host {host}: {path} <==")
        for line in last_lines(path, options.lines):
            print(printable(line))
    if options.follow:
        follow(run_dir, options.host, found)
    return EXIT_FINE


def newest(run_dir: Path, host: int | None) -> list[tuple[int, Path]]:
    """Returns (host, its newest log) of the hosts of a run that have one. Raises NoRunError if there is none."""
    folders = sorted((run_dir / FOLDER).glob("host-*")) if (run_dir / FOLDER).is_dir() else []
    numbered = {int(found[1]): folder for folder in folders if (found := re.fullmatch(r"host-(\d+)", folder.name))}
    if host is not None and host not in numbered:
        there = ", ".join(map(str, numbered)) or "none"
        raise NoRunError(f"{run_dir} has no log of host {host}; there are those of: {there}")
    chosen = numbered if host is None else {host: numbered[host]}
    # A process that stands by has a log, too: an empty one.
    logs = {
        number: sorted((path for path in folder.glob("process-*.log") if path.stat().st_size), key=_changed_s)
        for number, folder in chosen.items()
    }
    found_logs = [(number, paths[-1]) for number, paths in logs.items() if paths]
    if not found_logs:
        raise NoRunError(f"{run_dir} has no logs yet: its hosts copy them to {run_dir / FOLDER} every half minute")
    return found_logs


def last_lines(path: Path, number: int) -> list[str]:
    """Returns the last lines of a file; 0: all."""
    with open(path, "rb") as file:
        if number:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-number:] if number else lines


def follow(run_dir: Path, host: int | None, shown: Sequence[tuple[int, Path]]) -> None:
    """Shows what is added to the logs, those of later processes too, until Ctrl-C, or until nobody reads it any more."""
    sizes = {path: path.stat().st_size for _, path in shown}
    try:
        while not nobody_looks():
            time.sleep(FOLLOW_EVERY_S)
            for number, path in newest(run_dir, host):
                for line in _added(path, sizes):
                    print(f"host {number}  {printable(line)}", flush=True)
    except KeyboardInterrupt:
        return


def _added(path: Path, sizes: dict[Path, int]) -> Iterator[str]:
    before, size = sizes.get(path, 0), path.stat().st_size
    # A log that has grown too large is emptied, and begins anew.
    before = before if before <= size else 0
    with open(path, "rb") as file:
        file.seek(before)
        added = file.read(size - before)
    whole = added[: added.rfind(b"\n") + 1]
    sizes[path] = before + len(whole)
    yield from whole.decode(errors="replace").splitlines()


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
