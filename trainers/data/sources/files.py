"""Which files a source has, what each of them is, and in which order they come."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gangway.errors import DataError, DataMissingError
from gangway.storage.documents import is_url
from trainers.config.data import SourceConfig
from trainers.data.sources.access import reading, remote, stamp, unreadable

PYTHON_STDLIB = "python-stdlib"
OF_PYTHON = "__pycache__"
"""Folders that Python makes beside the code that it imports, also while a run goes on: their files are never data. So a folder
that has the code of the run too is the same data at the next start."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"})
"""Folders of the standard library to leave out: they are large, generated, or differ between distributions."""
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".ldjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
}
"""What a file is, by its ending; any other file is text."""
NOT_READ = frozenset(
    {
        *(".tfrecord", ".npy", ".npz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".rar"),
        *(".pdf", ".docx", ".xlsx", ".orc", ".avro", ".h5", ".hdf5", ".db", ".sqlite", ".pkl", ".pickle", ".pt", ".safetensors"),
    }
)
"""Endings of files that are no text, and that no reader here knows: as plain bytes a model would learn to write such files."""
SPLIT = re.compile(r"^(train|test|valid|validation|val|dev|eval)(?=[-_.0-9])", re.IGNORECASE)
"""How the name of a file begins that says of which split it is."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that git-lfs has put in the place of another one."""
MAX_POINTER_BYTES = 1024
SAVED_DATASET = "state.json"
SAVED_SPLITS = "dataset_dict.json"
"""The files by which a folder of `datasets.save_to_disk` is known."""
PREPARED = "prepared.json"
"""The file by which a folder of `python -m trainers.prepare` is known."""


class SourceFile(NamedTuple):
    name: str
    """Its path relative to what `paths` names: the same on every machine."""
    path: str
    """A path, or a URL. Of a saved dataset: its folder."""
    format: str
    parts: tuple[str, ...] = ()
    """The files of a saved dataset, in its order."""

    @property
    def files(self) -> tuple[str, ...]:
        return self.parts or (self.path,)


class Listing(NamedTuple):
    """The files of a source, by one look at its folders."""

    files: list[SourceFile]
    """In the order of a digest of their relative paths. So a held-out tail is a random choice of files, and the same on every
    machine."""
    left_out: list[str]
    """A line for each folder of which not all files are read."""


def listing(source: SourceConfig) -> Listing:
    """Returns the files of a source, each once, and what of its folders is left out. Raises DataError, DataMissingError or
    DataUnavailableError."""
    left_out: list[str] = []
    files: list[SourceFile] = []
    again: list[str] = []
    seen: set[Any] = set()
    for file in (file for path in source.paths for file in _files(path, source, left_out)):
        parts = identities(file)
        if seen.isdisjoint(parts):
            files.append(file)
        elif seen >= parts:
            again.append(file.path)
        else:
            raise DataError(f"data.paths: some parts of {file.path} are named by themselves too: name each once")
        seen |= parts
    if again:
        left_out.append(
            f"data.paths {', '.join(source.paths)}: {len(again):,} files are named more than once, such as {again[0]}, and are "
            "read once; a source of data.mixture can have a weight, or several epochs"
        )
    return Listing(sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest()), left_out)


def identities(file: SourceFile) -> set[Any]:
    """Returns what tells each file of it from others, whatever their names. Raises DataMissingError or DataUnavailableError."""
    found: set[Any] = set()
    for path in file.files:
        with reading(path):
            about = None if is_url(path) else os.stat(path)
            if about is not None and not stat.S_ISREG(about.st_mode):
                raise DataError(
                    f"data.paths: {path} is no file, but a pipe, a socket or a device, which nothing reads: leave it out with "
                    "data.pattern, or take it away"
                )
            if about is not None and about.st_size < MAX_POINTER_BYTES:
                with open(path, "rb") as opened:
                    is_pointer = opened.read(len(POINTER)) == POINTER
                if is_pointer:
                    raise DataError(
                        f"data.paths: {path} is a pointer of git-lfs, and not the file itself: fetch it by `git lfs pull`"
                    )
        found.add(path if about is None else (about.st_dev, about.st_ino))
    return found


def check_apart(sources: Sequence[SourceConfig]) -> None:
    """Raises DataError if two sources share a file: what is held out of one would be trained on in the other."""
    owners: dict[Any, SourceConfig] = {}
    for source in sources:
        for file in files_of(source):
            for each in identities(file):
                if owners.setdefault(each, source) is not source:
                    both = f"{', '.join(owners[each].paths)} and {', '.join(source.paths)}"
                    raise DataError(
                        f"data.mixture: the sources of the paths {both} share {file.path}: what is held out of one would be "
                        "trained on in the other; set data.eval_fraction=0, or name each file in one source"
                    )


def files_of(source: SourceConfig) -> list[SourceFile]:
    """Returns the files of a source. Raises as `listing`."""
    return listing(source).files


def stamps(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Returns what tells that the files are the same as before: name, path, size and time of the last change of each."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for part in file.files:
            name = file.name if part == file.path else f"{file.name}/{os.path.basename(part)}"
            # Files of several folders may have one name: their order tells them apart.
            name = next(
                free for number in itertools.count(1) if (free := f"{name}#{number}" if number > 1 else name) not in found
            )
            found[name] = {"name": name, "path": part if is_url(part) else os.path.abspath(part), **stamp(part)._asdict()}
    return list(found.values())


def _files(path: str, source: SourceConfig, left_out: list[str]) -> list[SourceFile]:
    if is_url(path):
        return _remote_files(path, source, left_out)
    location = sysconfig.get_paths()["stdlib"] if path == PYTHON_STDLIB else os.path.expanduser(path)
    if os.path.isfile(location):
        return [_file(os.path.basename(location), location, source)]
    if os.path.isdir(location):
        return _files_of_folder(path, location, source, left_out)
    if not glob.has_magic(location):
        raise DataMissingError(
            f"data.paths: {path!r} does not exist (looked for {os.path.abspath(location)}); expected a file or a folder"
        )
    found = [file for file in sorted(_not_of_python(glob.glob(location, recursive=True), location)) if os.path.isfile(file)]
    if not found:
        raise DataMissingError(f"data.paths: no file matches {path!r} (looked in {os.path.abspath(_fixed(location))})")
    return [_file(os.path.relpath(file, _fixed(location)), file, source) for file in found]


def _fixed(location: str) -> str:
    """Returns the folder in front of the first pattern of a path."""
    parts = location.split(os.sep)
    number = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:number]) or (os.sep if location.startswith(os.sep) else os.curdir)


def _files_of_folder(path: str, location: str, source: SourceConfig, left_out: list[str]) -> list[SourceFile]:
    if os.path.isfile(os.path.join(location, PREPARED)):
        raise DataError(
            f"data.paths: {path} has prepared tokens, and no records: set data.prepared={path}, and leave data.paths as they were"
        )
    if os.path.isfile(os.path.join(location, SAVED_SPLITS)):
        raise DataError(f"data.paths: {path} has several splits: name one, such as {os.path.join(path, _splits(location)[0])}")
    if os.path.isfile(os.path.join(location, SAVED_DATASET)):
        return [_saved(location)]
    there = _names(path, location)
    names = _read_of(path, there, source.pattern, left_out)
    if not names:
        raise DataMissingError(f"data.paths: no file in {path!r} {_fits(source)}{_endings(there)}")
    return _of_one_kind(path, [_file(name, os.path.join(location, name), source) for name in names], source)


def _of_one_kind(path: str, files: list[SourceFile], source: SourceConfig) -> list[SourceFile]:
    """Returns the files of a folder. Raises DataError if they are more than one set of data, as in a copy of a repository of
    Hugging Face: a page about the data beside files of records, or a split for tests beside that for training."""
    if source.pattern is not None or path == PYTHON_STDLIB:
        return files
    of_records, texts = ([file.name for file in files if (file.format == "text") == is_text] for is_text in (False, True))
    if of_records and texts:
        raise DataError(
            f"data.paths: the folder {path} has files of records ({_some(of_records)}), and others that would be texts to train "
            f"on ({_some(texts)}): say with data.pattern which to read, such as '*{os.path.splitext(of_records[0])[1]}'"
        )
    splits = {found[1].lower(): name for name in of_records if (found := SPLIT.search(os.path.basename(name)))}
    if len(splits) > 1:
        raise DataError(
            f"data.paths: the folder {path} has the splits {', '.join(sorted(splits))} ({_some(splits.values())}): say with "
            "data.pattern which to train on, such as 'train*'"
        )
    return files


def _some(names: Iterable[str]) -> str:
    several = sorted(names)
    return ", ".join(several[:3]) + (", ..." if len(several) > 3 else "")


def _names(path: str, location: str) -> list[str]:
    """Returns the files below a folder, by their paths relative to it."""
    if path == PYTHON_STDLIB:
        return [name for name in _below(location, LEFT_OUT) if name.endswith(".py")]
    return list(_below(location, frozenset()))


def _below(folder: str, left_out: frozenset[str]) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_raise_unreadable):
        # In place: `os.walk` goes only into the folders that are left in this list.
        folders[:] = [name for name in folders if name not in left_out and name != OF_PYTHON]
        yield from (os.path.relpath(os.path.join(parent, name), folder) for name in files)


def _globbed(filesystem: Any, pattern: str) -> list[str]:
    found = filesystem.glob(pattern, detail=True)
    return [name for name, entry in found.items() if entry["type"] == "file"]


def _not_of_python(files: Iterable[str], asked: str) -> list[str]:
    """Returns the files that Python has not made, or all if its folders are asked for by their name."""
    return [file for file in files if OF_PYTHON not in file.split("/") or OF_PYTHON in asked.split("/")]


def _read_of(path: str, names: Sequence[str], pattern: str | None, left_out: list[str]) -> list[str]:
    """Returns which files of a folder are read, and adds a line to `left_out` if not all are."""
    read = [name for name in names if _is_read(name, pattern)]
    if num_unread := len(names) - len(read):
        why = "are hidden" if pattern is None else f"do not match data.pattern {pattern!r}"
        left_out.append(f"data.paths {path}: {num_unread:,} of {len(names):,} files {why} and are left out")
    return read


def _is_read(name: str, pattern: str | None) -> bool:
    """Returns whether a file of a folder is read: by its pattern, else if neither the file nor a folder above it is hidden."""
    if pattern is not None:
        return fnmatch.fnmatch(os.path.basename(name), pattern)
    return not any(part.startswith(".") for part in name.split(os.sep))


def _fits(source: SourceConfig) -> str:
    if source.pattern is None:
        return "is not hidden"
    return f"matches data.pattern {source.pattern!r}; files are matched by name, as in '*.txt'"


def _endings(names: Iterable[str]) -> str:
    endings = sorted({os.path.splitext(name)[1] for name in names} - {""})
    return f"; it has files that end in {', '.join(endings[:8])}" if endings else ""


def _raise_unreadable(error: OSError) -> None:
    """Raises for a folder that cannot be listed: leaving it out would train on other data."""
    raise unreadable(error.filename, error) from error


def _remote_files(url: str, source: SourceConfig, left_out: list[str]) -> list[SourceFile]:
    filesystem, name = remote(url)
    with reading(url):
        if glob.has_magic(name):
            root, found = _fixed(name), _not_of_python(_globbed(filesystem, name), name)
        elif filesystem.isdir(name):
            files = _not_of_python(filesystem.find(name), name)
            root, there = name, {os.path.relpath(file, name): file for file in files}
            found = [there[file] for file in _read_of(url, [*there], source.pattern, left_out)]
        else:
            filesystem.info(name)
            root, found = os.path.dirname(name), [name]
    if not found:
        raise DataMissingError(f"data.paths: no file in {url} {_fits(source)}")
    made = [_file(os.path.relpath(file, root), filesystem.unstrip_protocol(file), source) for file in sorted(found)]
    return made if glob.has_magic(name) else _of_one_kind(url, made, source)


def _file(name: str, path: str, source: SourceConfig) -> SourceFile:
    ending = os.path.splitext(name)[1].lower()
    if source.format != "auto":
        return SourceFile(name, path, source.format)
    if ending in NOT_READ:
        raise DataError(
            f"data.paths: {path}: files that end in {ending} are not read; expected text, or {', '.join(FORMATS)}; unpack it, "
            "say with data.format what it is, or leave it out with data.pattern"
        )
    inner = os.path.splitext(os.path.splitext(name)[0])[1].lower()
    if ending not in FORMATS and inner in FORMATS:
        raise DataError(
            f"data.paths: {path}: is it {FORMATS[inner]}, though it ends in {ending}, or one text? Say with data.format, rename "
            "it, or leave it out with data.pattern"
        )
    return SourceFile(name, path, FORMATS.get(ending, "text"))


def _splits(location: str) -> list[str]:
    with reading(location), open(os.path.join(location, SAVED_SPLITS), encoding="utf-8") as file:
        return json.load(file)["splits"]


def _saved(location: str) -> SourceFile:
    """Returns a folder of `datasets.save_to_disk` as one file: the order of its parts is that of the dataset."""
    with reading(location), open(os.path.join(location, SAVED_DATASET), encoding="utf-8") as file:
        parts = tuple(os.path.join(location, part["filename"]) for part in json.load(file)["_data_files"])
    return SourceFile(os.path.basename(os.path.abspath(location)), location, "arrow", parts)
