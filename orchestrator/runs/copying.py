"""Copies a run between folders and buckets: its good checkpoints, each verified, and what a driver needs to go on with it.

The copy may be made while the run goes on: it has what was committed when it began. It is marked until it is complete, so a copy
that was cut short is never taken for a run; the same command completes it. Checkpoints come first, the newest before the others,
and the record that names them comes last.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gangway.storage import documents, ours, row
from gangway.storage.probe import check_writable
from gangway.storage.store import Place
from orchestrator.config.locate import NoRunError, is_run
from orchestrator.run_state import incident_log, lines, requests
from orchestrator.run_state.launch import TIMELINE
from orchestrator.run_state.lease import LEASE_KIND
from orchestrator.run_state.stored import CHECKPOINTS, GANG, STATE, STATE_KIND
from orchestrator.tracking import of_bucket, spool
from trainers.checkpoint import copied, layout, manifest

READ_BYTES = 16 << 20
SAVED = (CHECKPOINTS, layout.MODELS_FOLDER)
OF_A_PLACE = {
    *(row.FOLDER, requests.FOLDER, GANG, LEASE_KIND.name, STATE, copied.KIND.name),
    *SAVED,
}
"""What is not copied as it is: who has the run, and what is committed where."""
LINES = (incident_log.NAME, TIMELINE)


@dataclass
class Report:
    """What was copied."""

    saved: dict[str, list[int]] = field(default_factory=dict)
    """Steps, by the folder: `checkpoints`, `models`."""
    left_out: list[str] = field(default_factory=list)
    """Why checkpoints were not copied, as lines."""
    num_files: int = 0
    num_bytes: int = 0


def copy_run(source: Place, target: Place) -> Report:
    """Copies the run in `source` to the folder or URL `target`. Raises NoRunError if another run is there, or if nothing good is
    in the source; OSError and StorageError if a storage fails: what was copied stays, marked, for the next try."""
    copied.check_whole(source)
    _take(source, target)
    report, last = Report(), row.Row(target / row.FOLDER)
    if last.newest().what != "copy":  # else all is there but the end of the mark
        state = STATE_KIND.read(source / STATE)  # before the row: so it names no step that the row does not have
        record = row.Row(source / row.FOLDER).newest()
        kept = {name: _saved(source, target, name, report) for name in SAVED}
        _everything_else(source, target, report)
        step = max(kept[CHECKPOINTS], default=None)
        if step is None and record.step is not None:
            raise NoRunError(
                f"{source.url} has no good checkpoint to go on from: {'; '.join(report.left_out) or 'none is there'}"
            )
        if state is not None:
            STATE_KIND.write(target / STATE, _state(state, target, step, kept[CHECKPOINTS]))
            _give_rights(source / STATE, target / STATE)
        last.copied(record, {"hostname": socket.gethostname(), "pid": os.getpid()}, step, kept)
    documents.delete(target / copied.KIND.name)
    report.saved = {name: sorted(last.newest().of(name)) for name in SAVED}
    return report


def _take(source: Place, target: Place) -> None:
    """Marks the target. Raises NoRunError if it is in use, or cannot be the place of a copy."""
    inside = f"{target.url}/".startswith(f"{source.url}/") or f"{source.url}/".startswith(f"{target.url}/")
    if inside:
        raise NoRunError(f"--copy-to {target.url}: the run itself is there; give another folder or URL")
    copying = copied.KIND.read(target / copied.KIND.name)
    if copying is None and is_run(target):
        raise NoRunError(f"--copy-to {target.url}: a run is there already; give a folder or URL where none is")
    if copying is not None and copying["source"] != source.url:
        raise NoRunError(f"--copy-to {target.url}: a copy of {copying['source']} was begun there; delete it, or give another one")
    if copying is None:
        check_writable(target.url)
        copied.KIND.write(target / copied.KIND.name, {"source": source.url})


# ---------------------------------------------------------------------- checkpoints


def _saved(source: Place, target: Place, name: str, report: Report) -> dict[int, row.Kept]:
    """Copies the checkpoints, or the models, in the folder `name`. Returns what the record of the copy says of them."""
    folder, kept = source / name, dict[int, row.Kept]()
    for step in reversed(layout.steps(folder)):
        path = layout.at(folder, step)
        try:
            kept[step] = _one(path, target / name, step, report)
        except manifest.DamagedError as error:
            if path.is_dir():  # else it was removed meanwhile, as old ones are
                report.left_out.append(f"{name}/{path.name} is not copied: {error}")
    return kept


def _one(source: Place, target: Place, step: int, report: Report) -> row.Kept:
    """Copies a checkpoint. Raises DamagedError if it is not whole."""
    content = manifest.read(source)
    if problems := list(content.problems(source, content.files, digest_up_to=0)):
        raise manifest.DamagedError("; ".join(problems[:3]))
    # The same name at each try: what the last one has left is completed.
    token = hashlib.sha256(f"{source}".encode()).hexdigest()[:8]
    name = layout.name_for(step, row.NO_DRIVER, token)
    place = target / name
    if (digest := _complete(place, content)) is not None:
        return row.Kept(name, digest)
    found = dict[str, manifest.Entry]()
    for file, entry in content.files.items():
        found[file] = _copy(source / file, place / file, report)
        if found[file].size != entry.size or (not entry.sha256.startswith(manifest.TAG) and found[file] != entry):
            ours.delete(place / file, ours.among("what this command has just copied", [place / file]))
            raise manifest.DamagedError(f"the contents of {file} are not those that were saved (digests differ)")
    return row.Kept(name, manifest.write(place, _arrived(place, replace(content, files=found))))


def _arrived(place: Place, sent: manifest.Manifest) -> manifest.Manifest:
    """Returns the manifest of what has arrived. Raises OSError if anything has not."""
    if not place.store.tags_last:  # each file was synced to the disk
        return replace(sent, at="")
    tags = manifest.of_files(place, sent.step, sent.committed_s, {})
    there = {file: entry for file, entry in tags.files.items() if file in sent.files}
    if wrong := [file for file, entry in sent.files.items() if file not in there or there[file].size != entry.size]:
        raise OSError(f"{place.url}: {', '.join(wrong)} did not arrive whole; give the command again")
    return replace(tags, files=there)


def _complete(place: Place, content: manifest.Manifest) -> str | None:
    """Returns the digest of the manifest of a checkpoint that an earlier try has copied; None if it is not all there."""
    try:
        there = manifest.read(place)
    except manifest.DamagedError:
        return None
    about = [(found.committed_s, {name: entry.size for name, entry in found.files.items()}) for found in (there, content)]
    if about[0] != about[1] or list(there.problems(place, there.files, digest_up_to=manifest.SMALL_BYTES)):
        return None
    return manifest.digest_of(place)


# ---------------------------------------------------------------------- all else


def _everything_else(source: Place, target: Place, report: Report) -> None:
    """Copies what else there is. Where nothing can be appended to, lines become parts, and metrics segments."""
    to_bucket, from_bucket = not target.store.is_local, not source.store.is_local
    for entry in source.list():
        first, _, rest = entry.name.partition("/")
        if first in OF_A_PLACE:
            continue
        if to_bucket and not from_bucket and first == spool.FOLDER:
            if rest == spool.SPOOL:
                _segments(source / entry.name, target, entry.size)
        elif to_bucket and not from_bucket and entry.name in LINES:
            data = source.store.get_part((source / entry.name).key, 0, entry.size) or b""
            (target / entry.name / next(lines.part_names(0))).put(data)
        elif entry.size or not to_bucket:
            _copy(source / entry.name, target / entry.name, report, entry.size)


def _segments(file: Place, target: Place, size: int) -> None:
    """Writes a file of metrics as the segments of a run in a bucket."""
    offset = 0
    while data := file.store.get_part(file.key, offset, min(size, offset + READ_BYTES)) or b"":
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            break
        (target / spool.FOLDER / of_bucket.SEGMENTS / of_bucket.name_for(0, offset)).put(whole)
        offset += len(whole)


def _copy(source: Place, target: Place, report: Report, size: int | None = None) -> manifest.Entry:
    """Copies a file, or the first `size` bytes of one that grows. Returns size and digest of what was copied."""
    digest, done = hashlib.sha256(), 0
    with tempfile.TemporaryDirectory(prefix="gangway-copy-") as temporary:
        path = Path(temporary, "file")
        with path.open("xb") as file:
            while size is None or done < size:
                stop = done + READ_BYTES if size is None else min(size, done + READ_BYTES)
                part = source.store.get_part(source.key, done, stop)
                if part is None:
                    raise manifest.DamagedError(f"{source.name} is missing")
                if not part:
                    break
                file.write(part)
                digest.update(part)
                done += len(part)
        target.store.upload(target.key, path)
    _give_rights(source, target)
    report.num_files, report.num_bytes = report.num_files + 1, report.num_bytes + done
    return manifest.Entry(done, digest.hexdigest())


def _give_rights(source: Place, target: Place) -> None:
    """Whoever could not read a file of the run, or its folder, cannot read the copy."""
    if source.store.is_local and target.store.is_local:
        for one, other in ((source.path, target.path), (source.path.parent, target.path.parent)):
            os.chmod(other, stat.S_IMODE(os.stat(one).st_mode))


def _state(state: dict[str, Any], target: Place, step: int | None, kept: dict[int, row.Kept]) -> dict[str, Any]:
    """Returns `launch.json` of the copy: its paths are those of the copy, and what was not copied is not committed there."""
    path = None if step is None else target / CHECKPOINTS / kept[step].folder
    changes: dict[str, Any] = {"checkpoint_step": step, "committed_step": step}
    if path is None:
        return {**state, **changes, "saved_path": None, "saved_at": None}
    inside = f"{CHECKPOINTS}/{path.name}" if target.store.is_local else path.url
    return {**state, **changes, "saved_path": inside, "saved_at": path.url}
