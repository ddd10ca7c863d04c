"""Makes documents of a source: found prepared, or made once, by this process or by several, and kept."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gangway.errors import DataError, DataMissingError, TransientError
from gangway.storage import durable, json_text, ours
from gangway.storage.documents import is_url
from trainers.config.arguments import TrainingArguments
from trainers.config.data import SourceConfig
from trainers.console.progress import Progress
from trainers.data import kept, prepared
from trainers.data.documents import Encoder, notes_of
from trainers.data.encoders import encoder_of
from trainers.data.parts import Part, is_finished, join, parts_of, write_part
from trainers.data.prepared import AGAIN, PREPARED, PreparedDocuments, settings_of
from trainers.data.sources.files import Listing, files_of, listing, stamps
from trainers.data.sources.records import FilesRecords, open_records, tell_left_out
from trainers.text import tokenizers

SLOW_S = 10.0
"""After this time a note says that tokens are made, and how it goes."""
PARTS = ours.named("a folder of finished parts", r".+\.parts-[0-9a-f]{16}")
Note = Callable[[str], None]


@dataclass
class Source:
    """A source that is to be made into documents, and all that they depend on."""

    config: SourceConfig
    arguments: TrainingArguments
    encoder: Encoder

    @cached_property
    def listing(self) -> Listing:
        return listing(self.config)

    @cached_property
    def records(self) -> FilesRecords:
        return open_records(self.config, self.listing.files)

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        return stamps(self.listing.files)

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.of(self.arguments)

    @cached_property
    def dtype(self) -> np.dtype:
        return prepared.dtype_of(self.tokenizer.num_ids)

    def digest(self) -> str:
        """Returns what tells documents of these files and settings from others."""
        about = [prepared.FORMAT, settings_of(self.config), self.files, self.encoder.digest()]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def about(self) -> dict[str, Any]:
        return {
            "format": prepared.FORMAT,
            "source": settings_of(self.config),
            "columns": list(self.records.columns),
            "num_malformed": self.records.num_malformed,
            "notes": notes_of(self.encoder, self.records),
            "tokenizer": self.tokenizer.source,
            "tokenizer_digest": self.tokenizer.digest(),
            "encoder": self.encoder.digest(),
            "num_ids": self.tokenizer.num_ids,
        }


def of_source(config: SourceConfig, arguments: TrainingArguments, note: Note) -> PreparedDocuments:
    """Returns the documents of a source as `documents_of` does, with the encoder that fits its records."""
    folder = prepared_folder(config, arguments)
    columns = open_records(config).columns if folder is None else tuple(prepared.read_about(folder)["columns"])
    return documents_of(config, arguments, encoder_of(config, arguments, columns), note)


def documents_of(config: SourceConfig, arguments: TrainingArguments, encoder: Encoder, note: Note) -> PreparedDocuments:
    """Returns the documents of a source: prepared ones if the configuration names some (`data.prepared`), or else those kept on
    this machine, or made now and kept.

    Raises DataError if they were prepared from something else, and what `open_records` and the encoder raise. `note` gets what
    a user should know.
    """
    source = Source(config, arguments, encoder)
    folder = prepared_folder(config, arguments)
    if folder is not None:
        found = PreparedDocuments(folder)
        check(found, source, note)
        tell(found, note)
        return found
    place = kept.folder(kept.TOKENS) / source.digest()
    found = _kept(place) or _make_and_keep(source, place, note)
    tell(found, note)
    tell_left_out(config, source.listing, found.about["num_malformed"], note)
    return found


def tell(found: PreparedDocuments, note: Note) -> None:
    for line in found.about["notes"]:
        note(line)


def prepared_folder(config: SourceConfig, arguments: TrainingArguments) -> Path | None:
    """Returns the folder that has the documents of a source prepared; None if the configuration names none. Raises DataError if
    it names one that does not have them, and DataMissingError if it is not there."""
    if arguments.data.prepared is None:
        return None
    place = Path(os.path.expanduser(arguments.data.prepared))
    folders = sorted(path.parent for path in (*place.glob(PREPARED), *place.glob(f"*/{PREPARED}")))
    if not folders:
        raise DataMissingError(
            f"data.prepared = {arguments.data.prepared!r}: there is no {PREPARED} in it (looked in {place.absolute()}); expected "
            "a whole folder of `python -m trainers.prepare`"
        )
    wanted = settings_of(config)
    for folder in folders:
        if prepared.read_about(folder)["source"] == wanted:
            return folder
    raise DataError(_other_settings(wanted, folders))


def _other_settings(wanted: Mapping[str, Any], folders: Sequence[Path]) -> str:
    lines = []
    for folder in folders:
        found = prepared.read_about(folder)["source"]
        differ = [f"{name} {found[name]!r} (now {wanted[name]!r})" for name in wanted if found.get(name) != wanted[name]]
        lines.append(f"{folder} was made with {', '.join(differ)}")
    return f"data.prepared has not this source: {'; '.join(lines)}; {AGAIN}"


def check(found: PreparedDocuments, source: Source, note: Note) -> None:
    """Raises DataError if the documents were made with another tokenizer or encoder, or from files that have changed since."""
    about, tokenizer = found.about, source.tokenizer
    if about["tokenizer_digest"] != tokenizer.digest():
        raise DataError(
            f"{found.folder} was prepared with another tokenizer: {about['tokenizer']}; the run has {tokenizer.source} (its "
            f"files, or the version of its library, are others); set data.tokenizer, or {AGAIN}"
        )
    if about["encoder"] != source.encoder.digest():
        raise DataError(
            f"{found.folder} was prepared by other rules: settings, the template, or the version of this program; {AGAIN}"
        )
    try:
        now = source.files
    except DataMissingError:
        # As on a machine that has the tokens alone.
        note(f"{found.folder}: what it was made of is not here, so nothing can tell whether that has changed")
        return
    prepared.check_files(about, now, found.folder)


def _kept(place: Path) -> PreparedDocuments | None:
    """Returns the documents that are kept there; None if there are none, or if they are damaged."""
    try:
        found = PreparedDocuments(place)
    except (DataError, TransientError):
        return None
    kept.used(place)
    return found


def _make_and_keep(source: Source, place: Path, note: Note) -> PreparedDocuments:
    progress = _noted_when_slow(source, note, time.monotonic)
    try:
        with kept.one_at_a_time(str(place)):
            # Made by another process, while this one has waited.
            if (found := _kept(place)) is not None:
                return found
            ours.delete(place, kept.ENTRY)
            make(source, place, progress=progress)
            found = PreparedDocuments(place)
            # Mapped files stay readable when they are deleted, here and below.
            kept.tidy(place.parent)
            return found
    except OSError as error:
        note(f"the tokens cannot be kept in {place.parent} ({error}): each start makes them again")
    with tempfile.TemporaryDirectory() as folder:
        make(source, Path(folder, "made"), progress=progress)
        return PreparedDocuments(Path(folder, "made"))


def _noted_when_slow(source: Source, note: Note, clock: Callable[[], float]) -> Progress:
    """Returns a progress that tells once that the tokens take long."""
    begun_s, is_told = clock(), False

    def progress(done: int, num_tokens: int, before: int) -> None:
        nonlocal is_told
        took_s, total = clock() - begun_s, len(source.records)
        if took_s >= SLOW_S and done < total and not is_told:
            is_told = True
            note(
                f"the tokens of the data are made for the first time on this machine: {done:,} of {total:,} records after "
                f"{took_s:.0f} s; `python -m trainers.prepare` makes them once for all hosts, in several processes"
            )

    return progress


def make(
    source: Source, folder: Path, *, num_workers: int = 0, with_checksums: bool = False, progress: Progress | None = None
) -> None:
    """Writes the documents of a source to the new folder `folder`, all or nothing: by this process, or by so many others.

    Parts that an earlier process has finished are not made again. The bytes do not depend on the number of workers. Of two
    processes that make one folder, both end well. `with_checksums`: those of the files of the source are kept too, which tells
    a copy of them from others. Raises DataError if the files change meanwhile, and OSError if there is no room.
    """
    work = folder.with_name(f"{folder.name}.parts-{source.digest()[:16]}")
    work.mkdir(parents=True, exist_ok=True)
    parts = parts_of(len(source.records))
    try:
        with ThreadPoolExecutor(1) as beside:
            checksums = [beside.submit(_checksum, file if with_checksums else None) for file in source.files]
            _write_parts(source, work, parts, num_workers, progress or (lambda done, tokens, before: None))
            files = [{**file, "sha256": sha256.result()} for file, sha256 in zip(source.files, checksums, strict=True)]
        if stamps(files_of(source.config)) != source.files:
            raise DataError(f"data.paths {', '.join(source.config.paths)}: files have changed while they were read; start again")
        _publish(source, work, parts, folder, files)
    except FileNotFoundError:
        if not (folder / PREPARED).is_file():  # else another process was faster, and has deleted the parts
            raise
    with suppress(OSError):
        ours.delete(work, PARTS)


def _checksum(file: Mapping[str, Any] | None) -> str | None:
    return None if file is None or is_url(file["path"]) else prepared.checksum(Path(file["path"]))


def _write_parts(source: Source, work: Path, parts: Sequence[Part], num_workers: int, progress: Progress) -> None:
    waiting = [part for part in parts if not is_finished(work, part)]
    before = sum(part.stop - part.start for part in parts) - sum(part.stop - part.start for part in waiting)
    done = num_tokens = 0
    progress(before, 0, before)
    write = _here(source, work, waiting) if num_workers == 0 else _by_workers(source, work, waiting, num_workers)
    for part, about in write:
        done, num_tokens = done + part.stop - part.start, num_tokens + about["num_tokens"]
        progress(before + done, num_tokens, before)


def _here(source: Source, work: Path, parts: Sequence[Part]) -> Iterator[tuple[Part, dict[str, Any]]]:
    return ((part, write_part(work, part, source.records, source.encoder, source.dtype)) for part in parts)


def _by_workers(source: Source, work: Path, parts: Sequence[Part], num_workers: int) -> Iterator[tuple[Part, dict[str, Any]]]:
    context = multiprocessing.get_context("spawn")
    given = (source.config, source.arguments, source.records.columns)
    with ProcessPoolExecutor(max(1, min(num_workers, len(parts))), context, _begin, given) as pool:
        try:
            futures = {pool.submit(_work, work, part): part for part in parts}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise TransientError(
                "a worker process was killed, perhaps for its memory: start again, with fewer --workers; finished parts stay"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@cache
def _worker() -> dict[str, Source]:
    """Returns what this worker process works on."""
    return {}


def _begin(config: SourceConfig, arguments: TrainingArguments, columns: Sequence[str]) -> None:
    # One worker a core: the tokenizer's own threads would be too many.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Of a terminal, Ctrl-C reaches all processes: the first one ends the others, between two parts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker()["source"] = Source(config, arguments, encoder_of(config, arguments, columns))


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, which the pool itself does not notice."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(work: Path, part: Part) -> dict[str, Any]:
    source = _worker()["source"]
    return write_part(work, part, source.records, source.encoder, source.dtype)


def _publish(source: Source, work: Path, parts: Sequence[Part], folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Joins the parts, and gives the whole folder its name."""
    # Beside the parts: what a killed process leaves goes with them.
    mine = work / f"{uuid.uuid4().hex}.tmp"
    mine.mkdir()
    try:
        with kept.whole(mine, folder):
            about = {**source.about(), "files": files, **join(work, parts, mine, source.dtype)}
            durable.write(mine / PREPARED, json_text.seal(about))
    except OSError:
        if not (folder / PREPARED).is_file():  # else another process has just written the same
            raise
