"""What a run learns from, compared wherever it goes on, and between its hosts: its files, how many examples, the tokenizer.

    {"files": {"a.jsonl": {"num_bytes": 120, "changed": "1764403810", "digest": "9f86"}}, "examples": [96, 4], "tokenizer": "c2",
     "rules": {"how records become tokens": 2}}

Each checkpoint has it in its meta (`KEY`). A start compares sizes and times alone, and reads again what has others. Of data in a
bucket nothing is read: its store has a tag for each object. Of data that a function of the user's own returns, only the number of
examples is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import jax

from gangway.config.masking import masked
from gangway.errors import DataError, DataUnavailableError
from gangway.storage.documents import is_url
from trainers.config.arguments import TrainingArguments
from trainers.config.data import RULES_OF_RECORDS, DataConfig, SourceConfig
from trainers.data.prepared import PREPARED
from trainers.data.preparing import prepared_folder
from trainers.data.sources.access import ByteRanges
from trainers.data.sources.files import SourceFile, listing, stamps
from trainers.runtime import multihost
from trainers.text import tokenizers

KEY = "data"
IN_MEMORY = "trainers.data.sources.pieces:"
"""How the names of functions begin whose data is in no files of `data.paths`."""
OF_FILES = frozenset({"dataset", "prepared", "tokenizer", "paths", "pattern", "format", "mixture"})
"""The settings of `data` that say which files there are."""
RECORDS = "how records become tokens"
RULES = {RECORDS: RULES_OF_RECORDS, "what optimizer.name = 'rmsprop' does with optimizer.eps": 2}
"""What a run computes beside its settings: a version of each rule, one more for each change."""
HARMLESS = frozenset({"retries", "retry_backoff_s", "on_change"})
MANY = 5000
"""Files. Of more, as of images, the names alone are compared: a checkpoint would record them all, and a start ask for each."""
WHOLE_BYTES = 4 << 30
"""A larger file is read in part: its first and last block, and a drawn one of a hundred of the others."""
BLOCK_BYTES = 1 << 20
SHOWN = 5
OTHER_TOKENIZER = "the files of data.tokenizer are others than the run has learned with: each token would mean something else"
OTHER_RULES = "the run was begun by another version of this program, which has changed since: "
WAY_OUT = "bring the data back, or begin the run anew (--fresh, or another name, with init_from for its weights)"
CONTINUE = f"{WAY_OUT}, or go on with what is there by data.on_change=continue"


class Identity:
    """What the trainer of `arguments` learns from, as this process has seen it when this was made. `reads_files`: whether the
    datasets were made of the files that `arguments.data` names; `reads_records`: whether these have records, as images have
    none; `units`: the datasets of validation units that have their own."""

    def __init__(
        self,
        arguments: TrainingArguments,
        datasets: Sequence[Any],
        *,
        reads_files: bool,
        reads_records: bool = True,
        units: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._arguments = arguments
        found = _files(arguments, reads_records=reads_records) if reads_files else []
        self._is_of_files = bool(found)
        asked = {name: unit.exact_match for name, unit in arguments.evaluation.units.items() if unit.exact_match is not None}
        everything = [*found, *((_of_unit(name), listing(SourceConfig(paths=unit.paths)).files) for name, unit in asked.items())]
        is_few = sum(len(files) for _, files in everything) <= MANY
        files = {f"{begin}{file['name']}": file for begin, files in everything for file in (stamps(files) if is_few else ())}
        self._paths = {name: file["path"] for name, file in files.items()}
        self.seen: dict[str, Any] = {
            "files": {name: {key: file[key] for key in ("num_bytes", "changed")} for name, file in files.items()},
            "many": None if is_few else _names(found),
            "examples": [_count(dataset) for dataset in datasets],
            "units": {name: _count(dataset) for name, dataset in units.items() if name not in asked},
            "tokenizer": tokenizers.of(arguments).content() if self._is_of_files else None,
            "records": bool(files) and reads_records,
            "rules": rules_of(arguments),
        }
        self._digests: dict[str, str] = {}
        """Of the files that were read up to now."""

    def check(self, meta: Mapping[str, Any], note: Callable[[str], None], *, is_shared: bool) -> None:
        """Compares the data with that of the run, which goes on from a checkpoint with this meta, and with that of the other
        hosts (`is_shared`: every host reads the same data); what is not digested yet is digested beside the training. All hosts
        must call this. Raises DataError, or DataUnavailableError if data cannot be read, or a host does not see what host 0 sees;
        on all hosts alike."""
        problem = absent = ""
        if jax.process_index() == 0:
            try:
                problem, known = self.problem(meta, note)
                threading.Thread(target=self._digest, args=(known,), name="digests of the data", daemon=True).start()
            except DataUnavailableError as error:
                absent = str(error)
        answers = multihost.all_hosts("data", {"problem": problem, "absent": absent, "seen": _summary(self.seen)})
        if problem := answers[0]["problem"]:
            raise DataError(multihost.of_host0(problem))
        if absent := answers[0]["absent"]:
            raise DataUnavailableError(multihost.of_host0(absent))
        if not is_shared:
            return
        theirs = answers[0]["seen"]
        if other := next((host for host, answer in enumerate(answers) if answer["seen"] != theirs), None):
            raise DataUnavailableError(
                f"host {other} reads other data than host 0: {_told(answers[other]['seen'])} there, {_told(theirs)} on host 0; "
                "is a folder not mounted yet, or another one?"
            )

    def problem(self, meta: Mapping[str, Any], note: Callable[[str], None]) -> tuple[str, dict[str, str]]:
        """Returns why a run that goes on from a checkpoint with this meta must not learn from what is here, empty if it may; and
        the digests that are known. With `data.on_change: continue` a note says what has changed. Raises what reading raises."""
        before, known = meta.get(KEY), dict[str, str]()
        if before is None:
            if meta:
                note("the run has no record of what it learned from before: its next checkpoint has one, of what is there now")
            return "", known
        if rules := [rule for rule, version in self.seen["rules"].items() if before.get("rules", {}).get(rule, 1) != version]:
            return (
                f"{OTHER_RULES}{'; '.join(rules)}. Go on with that version, or begin the run anew (--fresh, or another name)",
                known,
            )
        settings = json.loads(json.dumps(masked(asdict(self._arguments.data))))
        changed = {name for name, value in settings.items() if meta["arguments"]["data"].get(name, value) != value}
        if changed & OF_FILES:
            return "", known  # it is told as a change of settings, and other files go with it
        if before["tokenizer"] != self.seen["tokenizer"]:
            return f"{OTHER_TOKENIZER}; {WAY_OUT}", known
        units = meta["arguments"]["evaluation"]["units"]
        now = json.loads(json.dumps(masked(asdict(self._arguments.evaluation))))["units"]
        others = {name for name in units.keys() | now.keys() if units.get(name) != now.get(name)}
        changes = list(self._changes(before, known, others))
        if before["many"] != self.seen["many"]:
            numbers = [f"{about['files']:,} files" if about else "few" for about in (before["many"], self.seen["many"])]
            changes.append(f"the names of its files are others ({numbers[0]} then, {numbers[1]} now)")
        if not self._is_of_files and not changed - HARMLESS and before["examples"] != self.seen["examples"]:
            changes.append(f"there were {_examples(before['examples'])}, and there are {_examples(self.seen['examples'])}")
        told = "; ".join(changes[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")
        if changes and self._arguments.data.on_change == "refuse":
            return f"the run has learned from other data: {told}; {CONTINUE}", known
        if changes:
            note(f"the run goes on with other data than before (data.on_change=continue): {told}")
        return "", known

    def recorded(self) -> dict[str, Any]:
        """Returns what a checkpoint has of the data. The digest of a file that was not read yet is empty."""
        digests = self._digests
        files = {name: {**about, "digest": digests.get(name, "")} for name, about in self.seen["files"].items()}
        return {KEY: {**self.seen, "files": files}}

    def _changes(self, before: Mapping[str, Any], known: dict[str, str], other_units: Set[str]) -> Iterator[str]:
        """Yields what has changed, but for units that have other settings, and adds the digests of files that are the same to
        `known`."""
        skipped = tuple(map(_of_unit, other_units))
        old, new = (
            {name: files[name] for name in files if not name.startswith(skipped)}
            for files in (before["files"], self.seen["files"])
        )
        for name in sorted(self.seen["units"].keys() & before["units"].keys() - other_units):
            was, count = before["units"][name], self.seen["units"][name]
            if was != count:
                yield f"{_of_unit(name)}there were {_examples([was])}, and there are {_examples([count])}"
        yield from (f"{name} is new" for name in sorted(new.keys() - old.keys()))
        yield from (f"{name} is gone" for name in sorted(old.keys() - new.keys()))
        for name in sorted(old.keys() & new.keys()):
            was, size = old[name], new[name]["num_bytes"]
            more = size - was["num_bytes"]
            if more == 0 and was["changed"] == new[name]["changed"]:
                known[name] = was["digest"]
            elif more < 0:
                yield f"{name} had {was['num_bytes']:,} bytes, and has {size:,}"
            elif not was["digest"] or digest_of(self._paths[name], was["num_bytes"]) != was["digest"]:
                yield f"{name} had {was['num_bytes']:,} bytes, and has {size:,}, others" if more else f"{name} has other contents"
            elif more:
                yield f"{name} has {more:,} bytes more at its end, and the same before them"
            else:
                known[name] = was["digest"]

    def _digest(self, known: Mapping[str, str]) -> None:
        self._digests = {**known}
        for name, about in self.seen["files"].items():
            if not known.get(name):
                with suppress(DataError, DataUnavailableError):  # whoever trains on it will say so
                    self._digests[name] = digest_of(self._paths[name], about["num_bytes"])


def check_ahead(meta: Mapping[str, Any], arguments: TrainingArguments) -> None:
    """Compares the files of the data with those that a run has learned from, which goes on from a checkpoint with this meta:
    before anything else reads them, since the tokens of millions of records take minutes. Raises DataError. What cannot be
    compared yet, or cannot be read, is for the trainer."""
    if not meta.get(KEY, {}).get("records"):
        return
    with suppress(DataUnavailableError):
        if problem := Identity(arguments, (), reads_files=True).problem(meta, lambda text: None)[0]:
            raise DataError(problem)


def rules_of(arguments: TrainingArguments) -> dict[str, int]:
    """Returns the rules that a run depends on."""
    data = arguments.data
    ours = data.dataset.startswith("trainers.") and (bool(data.mixture) or data.paths != DataConfig.paths)
    rmsprop = arguments.optimizer.name == "rmsprop"
    return {rule: version for (rule, version), follows in zip(RULES.items(), (ours, rmsprop), strict=True) if follows}


def digest_of(path: str, num_bytes: int) -> str:
    """Returns the digest of the first bytes of a file; empty for an object of a bucket. Raises DataUnavailableError."""
    if is_url(path):
        return ""
    ranges, found = ByteRanges(path), hashlib.sha256()
    last = max(num_bytes - 1, 0) // BLOCK_BYTES
    blocks: Sequence[int] = range(last + 1)
    if num_bytes > WHOLE_BYTES:
        blocks = sorted({0, last, *random.Random(num_bytes).sample(blocks, len(blocks) // 100)})
    for block in blocks:
        found.update(ranges.read(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, num_bytes)))
    return found.hexdigest()


def _of_unit(name: str) -> str:
    """How the names of a validation unit's files begin here."""
    return f"evaluation.units.{name}: "


def _files(arguments: TrainingArguments, *, reads_records: bool) -> list[tuple[str, list[SourceFile]]]:
    """Returns the files that the data is made of: those of each source, and how their names begin here."""
    data, found = arguments.data, list[tuple[str, list[SourceFile]]]()
    if not data.dataset.startswith("trainers.") or data.dataset.startswith(IN_MEMORY):
        return found
    sources: list[tuple[str, SourceConfig]] = [(f"{source.name}: ", source) for source in data.mixture] or [("", data)]
    for beginning, source in sources:
        if (folder := prepared_folder(source, arguments)) is not None:
            files = [SourceFile(f"{folder.name}/{PREPARED}", str(folder / PREPARED), "json")]
        else:
            files = listing(source).files if reads_records else _below(source)
        found.append((beginning, files))
    return found


def _below(source: SourceConfig) -> list[SourceFile]:
    """Returns all files of a source, whatever they are, by one look at each folder."""
    found: list[SourceFile] = []
    for path in [os.path.expanduser(path) for path in source.paths]:
        if os.path.isfile(path):
            found.append(SourceFile(os.path.basename(path), path, "text"))
        for folder, _, names in os.walk(path):
            paths = [os.path.join(folder, name) for name in names]
            found += [SourceFile(os.path.relpath(each, path), each, "text") for each in paths]
    return found


def _names(found: Sequence[tuple[str, Sequence[SourceFile]]]) -> dict[str, Any]:
    names = sorted(f"{begin}{file.name}" for begin, files in found for file in files)
    return {"files": len(names), "digest": _digest_of(names)}


def _digest_of(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _count(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # there is none, or it is a stream
        return None


def _summary(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be the same on all hosts: the times of local copies may differ."""
    sizes = {name: about["num_bytes"] for name, about in seen["files"].items()}
    digest = _digest_of([sorted(sizes.items()), seen["many"], seen["tokenizer"], seen["units"]])
    return {"examples": seen["examples"], "files": len(sizes), "bytes": sum(sizes.values()), "digest": digest}


def _told(summary: Mapping[str, Any]) -> str:
    files = f" in {summary['files']:,} files of {summary['bytes']:,} bytes" if summary["files"] else ""
    return _examples(summary["examples"]) + files


def _examples(counts: Sequence[int | None]) -> str:
    train, held = [*counts, None, None][:2]
    return f"{'?' if train is None else f'{train:,}'} examples" + (f" and {held:,} held out" if held else "")
