"""Text as bytes: which files, in which order, cut how; every sample once an epoch; what is said when it cannot be read."""

from __future__ import annotations

import collections
import errno
import hashlib
import os
import re

import numpy as np
import pytest

from gangway.errors import DataError, DataMissingError, DataUnavailableError, UsageError
from trainers.config import DataConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.data.documents import check_all_read
from trainers.data.sources import access
from trainers.data.sources.files import PYTHON_STDLIB, files_of
from trainers.data.sources.text import read, text_windows

LENGTH = 16


def config(*paths, **changes):
    return DataConfig(
        paths=tuple(map(str, paths)), **{"pattern": "*.txt", "sequence_length": LENGTH, "eval_fraction": 0.2, **changes}
    )


def arguments(data, seed=0, **changes):
    return TrainingArguments(name="t", max_num_steps=1, seed=seed, data=data, **changes)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


FILES = {f"{name}/{number}.txt": bytes([65 + number]) * 100 for name in ("one", "two") for number in range(5)}


def text_of(data):
    return bytes(read(files_of(data), data.encoding))


def test_files_come_in_the_order_of_a_digest_of_their_relative_paths(tmp_path):
    here, there = write(tmp_path / "here", FILES), write(tmp_path / "over" / "there", dict(reversed(FILES.items())))
    by_digest = sorted(FILES, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert text_of(config(here)) == b"".join(FILES[name] + b"\n" for name in by_digest)
    assert text_of(config(here)) == text_of(config(there))


def test_the_files_of_several_folders_are_mixed(tmp_path):
    whole = write(tmp_path / "whole", FILES)
    parts = [write(tmp_path / part, {n[4:]: c for n, c in FILES.items() if n.startswith(part)}) for part in ("one", "two")]
    both = text_of(config(*parts))
    assert sorted(both) == sorted(text_of(config(whole)))
    assert both == text_of(config(*parts))
    halves = both[:505], both[505:]
    assert all(len(set(half)) > 2 for half in halves)


def test_a_pipe_among_the_texts_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt is no file, but a pipe, a socket or a device"):
        text_windows(arguments(DataConfig(paths=(str(tmp_path),), sequence_length=2)))


def test_only_matching_files_of_a_folder_are_read_and_a_named_file_always_is(tmp_path):
    folder = write(tmp_path / "folder", {"a.txt": b"a" * 50, "b.bin": b"b" * 50, "deep/c.txt": b"c" * 50})
    assert set(text_of(config(folder))) == set(b"a\nc")
    assert text_of(config(folder / "b.bin")) == b"b" * 50 + b"\n"


def test_windows_overlap_by_the_one_byte_that_is_only_predicted(tmp_path):
    text = bytes(range(1, 100))
    train, held = text_windows(arguments(config(write(tmp_path, {"a.txt": text}) / "a.txt", shuffle=False)))
    assert len(train) == 4  # 79 pairs of a byte and its successor, in sixteens
    assert len(held) == 1
    for index in range(4):
        np.testing.assert_array_equal(train[index]["tokens"], range(1 + 16 * index, 16 * index + 18))
    np.testing.assert_array_equal(held[0]["tokens"], range(81, 98))
    example = train[2]
    assert (example["tokens"].dtype, example["sample_id"].dtype, example["sample_id"].shape) == (np.int32, np.int32, ())
    assert [int(train[i]["sample_id"]) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert int(held[0]["sample_id"]) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"), {"a.txt": bytes(np.random.default_rng(0).integers(1, 128, 2000, np.uint8))})


def ids(dataset, indices):
    return [int(dataset[i]["sample_id"]) for i in indices]


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(folder):
    train, _ = text_windows(arguments(config(folder)))
    size = len(train)
    epochs = [ids(train, range(k * size, (k + 1) * size)) for k in range(3)]
    assert all(collections.Counter(epoch) == collections.Counter(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_an_example_is_a_function_of_the_seed_and_its_index(folder):
    train, again, other = (text_windows(arguments(config(folder), seed=seed))[0] for seed in (1, 1, 2))
    indices = [0, 500, 3, 499, 1, 10**6]
    first = ids(train, indices)
    assert ids(again, reversed(indices)) == first[::-1]
    assert ids(train, indices) == first
    assert ids(other, range(50)) != ids(train, range(50))


def test_the_held_out_text_is_never_trained_on(folder):
    train, held = text_windows(arguments(config(folder, eval_fraction=0.25)))
    assert not set(ids(train, range(len(train)))) & set(ids(held, range(len(held))))
    seen = {bytes(train[i]["tokens"].astype(np.uint8)) for i in range(len(train))}
    assert not seen & {bytes(held[i]["tokens"].astype(np.uint8)) for i in range(len(held))}


def test_without_a_held_out_fraction_there_is_no_held_out_text(folder):
    assert len(text_windows(arguments(config(folder, eval_fraction=0)))[1]) == 0


def test_the_standard_library_is_read_without_what_is_installed_or_tests_it():
    text = text_of(DataConfig(paths=(PYTHON_STDLIB,)))
    assert 5_000_000 < len(text) < 40_000_000
    assert b"class OrderedDict(dict):" in text
    assert b"def pip_main" not in text
    assert b"class TestCase(object):" in text  # unittest itself is part of it


def error_of(data):
    with pytest.raises(DataMissingError) as error:
        text_windows(arguments(data))
    return str(error.value)


def test_a_path_that_does_not_exist(tmp_path):
    missing = tmp_path / "missing"
    assert error_of(config(missing)) == (
        f"data.paths: '{missing}' does not exist (looked for {missing}); expected a file or a folder"
    )


def test_a_folder_without_matching_files(tmp_path):
    write(tmp_path, {"a.py": b"x"})
    assert error_of(config(tmp_path)) == (
        f"data.paths: no file in '{tmp_path}' matches data.pattern '*.txt'; files are matched by name, as in '*.txt'; "
        "it has files that end in .py"
    )


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    assert error_of(config(tmp_path)) == (
        f"data.paths: {tmp_path}/a.txt cannot be read: No such file or directory; is it there, and yours to read?"
    )


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch):
    """As of a share that hangs on a stale handle: the run would train on other data."""
    write(tmp_path, {"a.txt": b"x" * 99, "deep/b.txt": b"y"})
    list_folder = os.scandir

    def stale(path):
        if str(path).endswith("deep"):
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(DataUnavailableError, match=r"data.paths: .*/deep cannot be read: Stale file handle"):
        text_windows(arguments(config(tmp_path)))


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, DataUnavailableError), (errno.EACCES, DataMissingError)])
def test_a_file_that_cannot_be_read_just_now(tmp_path, monkeypatch, number, error):
    write(tmp_path, {"a.txt": b"x" * 99})

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(access, "open", refuse, raising=False)
    with pytest.raises(error, match=f"data.paths: {tmp_path}/a.txt cannot be read: {os.strerror(number)}") as caught:
        text_windows(arguments(config(tmp_path)))
    assert type(caught.value) is error


@pytest.mark.parametrize(("size", "eval_fraction"), [(0, 0.0), (15, 0.0), (19, 0.2)])
def test_text_shorter_than_one_sequence(tmp_path, size, eval_fraction):
    write(tmp_path, {"a.txt": b"x" * size})
    assert error_of(config(tmp_path, eval_fraction=eval_fraction)) == (
        f"data.paths {tmp_path}: the training text has {size + 1 - int((size + 1) * eval_fraction)} bytes; expected at least 17: "
        "data.sequence_length = 16 and one byte more to predict; give more text, a smaller sequence_length, "
        f"or another data.eval_fraction (now {eval_fraction})"
    )


def test_held_out_text_shorter_than_one_sequence(tmp_path):
    write(tmp_path, {"a.txt": b"x" * 1000})
    assert re.match(
        r"data\.paths .*: the held-out text has 10 bytes; expected at least 17", error_of(config(tmp_path, eval_fraction=0.01))
    )


def test_a_vocabulary_that_has_not_every_byte(folder):
    with pytest.raises(UsageError, match=r"model\.vocab_size = 128: expected at least 256, for the data are bytes"):
        text_windows(arguments(config(folder), model=ModelConfig(vocab_size=128)))


def test_the_texts_of_records_are_read_and_files_of_other_kinds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = write(tmp_path / "data", {"a.jsonl": b'{"text": "one \\u00e9"}\n{"text": "two"}\n' * 20, "b.npz": b"x"})
    train, _ = text_windows(arguments(config(folder / "a.jsonl", shuffle=False)))
    expected = ("one \u00e9\ntwo\n".encode() * 2)[:17]
    assert bytes(train[0]["tokens"].astype(np.uint8)) == expected
    with pytest.raises(DataError, match=r"b\.npz: files that end in \.npz are not read"):
        text_windows(arguments(config(folder, pattern="*")))


def test_a_column_that_nothing_reads_is_named_but_for_one_that_says_nothing():
    record = {"text": "a", "label": None, "id": 7}
    check_all_read(record, read=("text",), ignored=("id",))
    with pytest.raises(DataError, match=r"nothing reads the column id \(read are text\): .*data\.ignore_columns=\[id\]"):
        check_all_read(record, read=("text",), ignored=())
