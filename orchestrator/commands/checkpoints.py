"""`python -m orchestrator.commands.checkpoints RUN|CONFIG`: lists the checkpoints of a run, and whether they are intact.

It only reads files, and may be used while the run goes on. With --accept-loss it records that there are no newer checkpoints.
With --copy-to it copies the run, with all that it needs to go on there, between folders and buckets.
Exit status: 0; 1 when a checkpoint is damaged; 2 when there is no such run, or it is in use and a loss is to be accepted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from gangway.first_line import say
from gangway.program import EXIT_FINE, command
from gangway.published import number
from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from gangway.storage.row import BEST
from gangway.storage.store import Place
from orchestrator.config.locate import REFUSALS, parser_of_run, run_of
from orchestrator.run_state.lease import RunInUse, wait_until_free
from orchestrator.run_state.stored import CHECKPOINTS, STATE, STATE_KIND
from orchestrator.runs.copying import copy_run
from trainers.checkpoint import layout, manifest
from trainers.console.text import table_console

EXIT_DAMAGED = 1
STYLES = {"verified": "green", "whole": None, "model": None, "damaged": "red", "incomplete": "yellow", "unfinished": "yellow"}


@dataclass(frozen=True)
class Row:
    """One checkpoint."""

    step: int
    path: str
    state: str
    """`verified`: every byte is what was saved; `whole`: every file is there and has its size, small ones their contents, and
    those that were saved to a bucket are the same objects;
    `model`: its parameters alone are left; `damaged`; `incomplete`: there is no manifest; `unfinished`: being saved, or left by a
    save that was cut short."""
    why: list[str] = field(default_factory=list)
    committed_s: float | None = None
    """Unix time."""
    num_bytes: int | None = None
    num_hosts: int | None = None
    score: float | None = None
    """By `evaluation.score` of the newest checkpoint; None: it was not evaluated at its step."""
    marks: list[str] = field(default_factory=list)
    """`best`, which RUN/best stands for; `newest`, which RUN does."""
    lineage: list[Any] = field(default_factory=list)
    skipped_batches: list[int] = field(default_factory=list)


@command(*REFUSALS, RunInUse, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_run("orchestrator.commands.checkpoints", "The checkpoints of a run.", example="runs/spirals --verify")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the digest of every file: reads everything (saved to a bucket: tags)",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="newer checkpoints were committed and are lost or deleted: the next start goes on with what is there, or at step 0",
    )
    parser.add_argument(
        "--copy-to",
        metavar="FOLDER|URL",
        help="copy the run, with its good checkpoints, to this folder or URL, STORAGE/NAME; give it again if it was cut short",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_intermixed_args(argv)
    say(f"reading the checkpoints of {arguments.run}", stream=sys.stderr)  # --verify may take long, and so may a storage
    run = run_of(arguments.run, arguments.overrides)
    if arguments.copy_to:
        return copy(run, arguments.copy_to)
    folder = run / CHECKPOINTS
    if arguments.accept_loss:
        accept_loss(folder)
    rows = marked(inspect(folder, verify=arguments.verify), layout.scored(run))
    lost = layout.lost(folder)
    if arguments.json:
        print(json_text.dumps([asdict(row) for row in rows], indent=1))
    elif rows or not lost:
        show(folder, rows, table_console())
    if lost:
        print(f"error: {lost}", file=sys.stderr)
    return EXIT_DAMAGED if lost or any(row.state == "damaged" for row in rows) else EXIT_FINE


def copy(run: Place, to: str) -> int:
    """Copies the run; returns the exit status. Raises what `copy_run` does."""
    target = place_of(to if documents.is_url(to) else os.path.abspath(to))
    report = copy_run(run, target)
    for line in report.left_out:
        print(line, file=sys.stderr)
    steps = ", ".join(map(str, report.saved[CHECKPOINTS])) or "none"
    print(f"copied {run.url} to {target.url}: checkpoints {steps}; {report.num_files} files, {report.num_bytes / 1e6:,.1f} MB")
    storage, _, name = target.url.rpartition("/")
    print(f"it goes on there by the command of the run with storage={storage} name={name}")
    return EXIT_DAMAGED if report.left_out else EXIT_FINE


def accept_loss(folder: Place) -> None:
    """Records that the newest checkpoint in `folder` is the newest one that was ever committed. Raises RunInUse, OSError or
    StorageError."""
    # Not while a driver lives: it would write its own record over this one.
    wait_until_free(folder.parent.url, waiting=lambda message: print(message, file=sys.stderr))
    layout.accept_loss(folder)
    newest = max(layout.steps(folder), default=None)
    # A damaged one is set aside, as a driver would do.
    document, notes = STATE_KIND.salvaged(folder.parent / STATE)
    for note in notes:
        print(note, file=sys.stderr)
    if document is not None:
        # Without a course: what is trained from there on takes the place of what was published of later steps.
        record = {"committed_step": newest, "checkpoint_step": newest, "course": None}
        STATE_KIND.write(folder.parent / STATE, document | record)


def inspect(folder: Place, *, verify: bool) -> Iterator[Row]:
    """Yields a row per checkpoint, oldest first. One that is deleted meanwhile is left out. Raises OSError, or StorageError of a
    bucket."""
    for step in layout.steps(folder):
        path = layout.at(folder, step)
        row = _inspect_one(path, step, verify)
        if not row.why or path.is_dir():
            yield row
    for step, path in layout.unfinished(folder):
        yield Row(step, str(path), "unfinished", ["being saved, or what a save that was cut short has left"])


def marked(rows: Iterable[Row], scored: Sequence[tuple[float, int, Place]]) -> list[Row]:
    """Returns the rows with their scores and marks, and one more if the best has its parameters alone. `scored` are (score,
    step, place), the best first."""
    found, scores = [*rows], {str(place): score for score, _, place in scored}
    newest = next((row.path for row in reversed(found) if row.state in ("whole", "verified")), None)
    _, step, best = next((each for each in scored if layout.is_whole(each[2])), (None, 0, None))
    if best is not None and str(best) not in [row.path for row in found]:
        found.append(replace(_inspect_one(best, step, verify=False), state="model"))
    marks = {BEST: str(best), "newest": newest}
    return [
        replace(row, score=scores.get(row.path), marks=[mark for mark, path in marks.items() if path == row.path])
        for row in found
    ]


def _inspect_one(path: Place, step: int, verify: bool) -> Row:
    try:
        content = manifest.read(path)
    except manifest.UnfinishedError as error:
        return _with_meta(Row(step, str(path), "incomplete", [str(error)]), path)
    except manifest.DamagedError as error:
        return _with_meta(Row(step, str(path), "damaged", [str(error)]), path)
    problems = list(content.problems(path, content.files, digest_up_to=None if verify else manifest.SMALL_BYTES))
    state = "damaged" if problems else "verified" if verify and not content.has_tags else "whole"
    return _with_meta(Row(step, str(path), state, problems, content.committed_s, content.num_bytes), path)


def _with_meta(row: Row, path: Place) -> Row:
    try:
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        return row if row.why else replace(row, state="damaged", why=[str(error)])
    lineage = meta.get("lineage", [])
    num_hosts = lineage[-1]["num_hosts"] if lineage else None
    return replace(row, num_hosts=num_hosts, lineage=lineage, skipped_batches=meta.get("skipped_batches", []))


def show(folder: Place, rows: Sequence[Row], console: Console) -> None:
    if not rows:
        console.print(f"no checkpoint in {folder} yet")
        return
    numbers = ("step", "size", "hosts", "score", "skipped")
    columns = (
        Column(name, justify="right" if name in numbers else "left", no_wrap=name != "state")
        for name in ("step", "", "committed", "size", "hosts", "score", "lineage", "skipped", "state")
    )
    table = Table(*columns, title=str(folder), title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row), style=STYLES[row.state])
    console.print(table)


def _cells(row: Row) -> list[str]:
    when = "" if row.committed_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.committed_s))
    size = "" if row.num_bytes is None else f"{row.num_bytes / 1e6:,.1f} MB"
    lineage = " ".join(f"{segment['num_hosts']}x{segment['num_devices']}@{segment['batch_index']}" for segment in row.lineage)
    skipped = str(len(row.skipped_batches)) if row.skipped_batches else ""
    state = row.state if not row.why else f"{row.state}: {'; '.join(row.why[:3])}{' ...' if len(row.why) > 3 else ''}"
    marks, score = " ".join(row.marks), "" if row.score is None else number(row.score)
    return [str(row.step), marks, when, size, str(row.num_hosts or ""), score, lineage, skipped, state]


if __name__ == "__main__":
    sys.exit(main())
