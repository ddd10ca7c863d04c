"""Documents as tokens on a disk: made once, the same bytes by any number of processes, and of nothing else than what is asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from gangway.errors import DataError, DataMissingError, UsageError
from gangway.storage import json_text
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from trainers.config import DataConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.data import encoders, kept, parts, preparing
from trainers.data.documents import Document
from trainers.data.encoders import TextEncoder, encoder_of
from trainers.data.prepared import FORMAT, PreparedDocuments, dtype_of
from trainers.data.preparing import Source, documents_of, make, of_source
from trainers.data.sources.records import open_records

TEXTS = [f"text {number} " + "\u00e9" * (number % 7) for number in range(150)]
NUM_PARTS = 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Tokens are kept where nobody else keeps some."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home / ".cache" / "gangway" / "tokens"


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def arguments(path, **data):
    model = ModelConfig(vocab_size=256)
    return TrainingArguments(name="t", max_num_steps=1, data=DataConfig(paths=(str(path),), **data), model=model)


def source(path, encoder=None, **data):
    made = arguments(path, **data)
    return Source(made.data, made, encoder or encoder_of(made.data, made, open_records(made.data).columns))


def no_note(message):
    raise AssertionError(message)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_are_the_texts_in_order_each_with_its_end(lines, tmp_path):
    documents = of_source(arguments(lines).data, arguments(lines), no_note)
    assert [bytes(documents[index].tokens.astype(np.uint8)) for index in range(150)] == [f"{text}\n".encode() for text in TEXTS]
    assert documents[3].tokens.dtype == np.int32
    assert documents[3].token_weight is None
    assert (documents.lengths.dtype, list(documents.lengths)) == (np.int32, [len(text.encode()) + 1 for text in TEXTS])
    assert (len(documents), documents.tokens.dtype, documents.num_ids, documents.columns) == (150, np.uint8, 256, ("text",))
    with pytest.raises(IndexError):
        documents[150]
    assert [dtype_of(size) for size in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.uint32]


def test_the_text_may_have_another_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "content": "abc"}\n{"id": 2}\n')
    documents = (made := arguments(path, columns={"text": "content"})).data, made
    asked = r"data\.columns asks for the column 'content' for 'text': there are "
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {asked}id$"):
        of_source(*documents, no_note)
    expected = r"have the columns id, content; expected for .*text: 'text'; data\.columns names others, such as {text: id}"
    with pytest.raises(DataError, match=expected):
        of_source((made := arguments(path)).data, made, no_note)
    path.write_text('{"text": "abc"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: {asked}text$"):
        of_source(*documents, no_note)
    path.write_text('{"content": "abc"}\n{"content": 5}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: expected a text in the column 'text': it is int"):
        of_source(*documents, no_note)
    path.write_text('{"content": "abc", "text": null}\n')
    assert bytes(of_source(*documents, no_note)[0].tokens.astype(np.uint8)) == b"abc\n"


def test_a_column_in_whose_place_another_one_is_read_is_left_out_only_by_its_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "abc", "text": "other"}\n')
    made = arguments(path, columns={"text": "content"})
    way_out = r"add other: text to data\.columns, and set data\.ignore_columns=\[other\]"
    with pytest.raises(DataError, match=rf"line 1: data\.columns reads 'content' as 'text', and there is a .* too, .*{way_out}"):
        of_source(made.data, made, no_note)
    made = arguments(path, columns={"text": "content", "other": "text"}, ignore_columns=["other"])
    assert bytes(of_source(made.data, made, no_note)[0].tokens.astype(np.uint8)) == b"abc\n"
    made = arguments(path, columns={"text": "content", "content": "text"})  # each in the place of the other
    with pytest.raises(DataError, match="nothing reads the column content"):
        of_source(made.data, made, no_note)


def test_the_kind_of_the_examples_is_named_or_found_by_the_columns(lines, monkeypatch):
    made = arguments(lines, examples="text")
    assert isinstance(encoder_of(made.data, made, ["text"]), TextEncoder)
    with pytest.raises(UsageError, match=r"data\.examples = 'tekst': expected one of auto, .*text; did you mean text\?"):
        encoder_of(arguments(lines, examples="tekst").data, made, ["text"])
    other = encoders.EncoderKind(lambda columns: "number" in columns, "'number'", lambda arguments, ignored: Numbers())
    monkeypatch.setitem(encoders.ENCODERS, "numbers", other)
    assert isinstance(encoder_of(arguments(lines).data, made, ["number"]), Numbers)
    with pytest.raises(DataError, match=r"the columns number; expected for .*text: 'text'"):
        encoder_of(made.data, made, ["number"])


class Numbers:
    """Weighted tokens of a number; every third document has no weights."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def encode(self, records):
        texts = [len(record["text"]) for record in records]
        return [Document(np.arange(n), None if n % 3 == 0 else np.arange(n) % 2 * np.float32(self.scale)) for n in texts]

    def digest(self):
        return f"numbers {self.scale}"


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, np.uint8), (0.5, np.float32)])
def test_weights_are_kept_and_tokens_without_one_count_fully(lines, tmp_path, scale, dtype):
    make(source(lines, Numbers(scale)), tmp_path / "made")
    documents = PreparedDocuments(tmp_path / "made")
    assert documents.weights.dtype == dtype
    for index, text in enumerate(TEXTS):
        tokens, weights = documents[index]
        np.testing.assert_array_equal(tokens, np.arange(len(text)))
        np.testing.assert_array_equal(weights, np.ones(len(text)) if len(text) % 3 == 0 else np.arange(len(text)) % 2 * scale)
        assert weights.dtype == np.float32


class Wrong(Numbers):
    def encode(self, records):
        return [Document(np.array([999]))]


def test_a_token_that_the_tokenizer_has_not(lines, tmp_path):
    with pytest.raises(DataError, match="a token 999 does not fit into uint8"):
        make(source(lines, Wrong()), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_tokens_are_made_once_and_again_when_something_changed(lines, cache, monkeypatch, tmp_path):
    def tokens(**data):
        made = arguments(lines, **data)
        return bytes(of_source(made.data, made, told.append).tokens)

    told = []
    first = tokens()
    monkeypatch.setattr(preparing, "write_part", None)  # it is not asked again
    assert tokens() == first
    with pytest.raises(TypeError):
        tokens(on_malformed="skip")
    os.utime(lines, (1, 1))
    with pytest.raises(TypeError):
        tokens()
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(cache.parents[2]))
    assert tokens() == first
    for file in cache.glob("*/tokens.bin"):
        file.write_bytes(file.read_bytes()[:-1])
    assert tokens() == first
    monkeypatch.setattr(kept, "KEPT_BYTES", 10)
    os.utime(next(iter(cache.iterdir())), (1, 1))
    assert tokens(on_malformed="skip") == first
    (entry,) = cache.iterdir()  # what was used last, however large
    assert json.loads((entry / "prepared.json").read_text())["source"]["on_malformed"] == "skip"
    shutil.rmtree(cache)
    cache.write_text("no folder")
    assert told == []
    assert tokens() == first
    assert "the tokens cannot be kept in" in told[0]


def test_a_process_waits_for_another_one_that_makes_the_same_tokens(lines, cache, monkeypatch):
    write, started, may_go_on, made_by = parts.write_part, threading.Event(), threading.Event(), []

    def slowly(*given):
        made_by.append(threading.current_thread().name)
        started.set()
        assert may_go_on.wait(PATIENCE_S)
        return write(*given)

    monkeypatch.setattr(preparing, "write_part", slowly)
    made = arguments(lines)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(of_source, made.data, made, no_note)
        assert started.wait(PATIENCE_S)
        second = pool.submit(of_source, made.data, made, no_note)
        assert not wait([second], timeout=0.3).done
        may_go_on.set()
        assert bytes(first.result().tokens) == bytes(second.result().tokens)
    assert len(made_by) == NUM_PARTS


def test_tokens_that_take_long_are_reported_once(lines, monkeypatch):
    monkeypatch.setattr(preparing, "SLOW_S", 0.0)
    made, told = arguments(lines), []
    of_source(made.data, made, told.append)
    of_source(made.data, made, told.append)
    (line,) = told
    assert "made for the first time on this machine: 0 of 150 records after 0 s; `python -m trainers.prepare` makes them" in line


def test_malformed_lines_that_are_left_out_are_reported(lines):
    with open(lines, "a") as file:
        file.write("{\n")
    made = arguments(lines, on_malformed="skip")
    for _ in range(2):  # made, and kept
        told = []
        assert len(of_source(made.data, made, told.append)) == 150
        assert told == [f"data.paths {lines}: 1 malformed lines are left out (data.on_malformed: skip)"]


def test_any_number_of_workers_writes_the_same_bytes(lines, tmp_path):
    made = source(lines)
    make(made, tmp_path / "alone", with_checksums=True)
    seen = []
    make(made, tmp_path / "many", num_workers=2, with_checksums=True, progress=lambda *numbers: seen.append(numbers))
    assert contents(tmp_path / "alone") == contents(tmp_path / "many")
    assert (seen[0], seen[-1]) == ((0, 0, 0), (150, sum(len(text.encode()) + 1 for text in TEXTS), 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "many", "texts.jsonl"]


def test_finished_parts_are_not_made_again_and_damaged_ones_are(lines, tmp_path, monkeypatch):
    make(source(lines), tmp_path / "undisturbed")
    written, write = [], parts.write_part

    def stop_at_the_third(folder, part, *rest):
        if len(written) == NUM_PARTS - 1:
            raise KeyboardInterrupt
        written.append(part.number)
        return write(folder, part, *rest)

    monkeypatch.setattr(preparing, "write_part", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        make(source(lines), tmp_path / "made")
    (work,) = tmp_path.glob("made.parts-*")
    assert not (tmp_path / "made").exists()
    path = work / "000001.tokens.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    again = []
    monkeypatch.setattr(
        preparing, "write_part", lambda folder, part, *rest: again.append(part.number) or write(folder, part, *rest)
    )
    seen = []
    make(source(lines), tmp_path / "made", progress=lambda *numbers: seen.append(numbers))
    assert (written, again, seen[0]) == ([0, 1], [1, 2], (64, 0, 64))
    assert contents(tmp_path / "made") == contents(tmp_path / "undisturbed")


def test_of_two_that_make_one_folder_both_end_well(lines, tmp_path, monkeypatch):
    join = preparing.join

    def with_another(work, *rest):
        monkeypatch.setattr(preparing, "join", join)
        make(source(lines), tmp_path / "made")  # which deletes the parts
        return join(work, *rest)

    monkeypatch.setattr(preparing, "join", with_another)
    make(source(lines), tmp_path / "made")

    def then_another(*given):
        about = join(*given)
        monkeypatch.setattr(preparing, "join", join)
        make(source(lines), tmp_path / "late")
        return about

    monkeypatch.setattr(preparing, "join", then_another)
    make(source(lines), tmp_path / "late")
    write = parts.write_part

    def after_another(*given):
        monkeypatch.setattr(preparing, "write_part", write)
        make(source(lines), tmp_path / "slow")
        return write(*given)

    monkeypatch.setattr(preparing, "write_part", after_another)
    make(source(lines), tmp_path / "slow")
    assert contents(tmp_path / "made") == contents(tmp_path / "late") == contents(tmp_path / "slow")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "made", "slow", "texts.jsonl"]


def test_a_file_that_changes_meanwhile(lines, tmp_path, monkeypatch):
    write = parts.write_part

    def meanwhile(*given):
        os.utime(lines, (1, 1))
        return write(*given)

    monkeypatch.setattr(preparing, "write_part", meanwhile)
    with pytest.raises(DataError, match=r"texts\.jsonl: files have changed while they were read; start again"):
        make(source(lines), tmp_path / "made")


@pytest.fixture
def prepared(lines, tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    make(source(lines), folder / "data", with_checksums=True)
    return folder


def use(lines, prepared, note=no_note, **data):
    made = arguments(lines, prepared=str(prepared), **data)
    return of_source(made.data, made, note)


def test_a_prepared_folder_is_used_and_nothing_is_made(lines, prepared, cache, monkeypatch):
    monkeypatch.setattr(preparing, "write_part", None)
    assert use(lines, prepared).folder == prepared / "data"
    assert use(lines, prepared / "data").folder == prepared / "data"
    assert not cache.exists()
    assert not (cache.parent / kept.CHECKED).exists()  # the source is not read again


def test_a_prepared_folder_says_what_has_changed_since(lines, prepared, tmp_path):
    os.utime(lines, (1, 1))  # as of a copy
    use(lines, prepared)
    text = lines.read_text()
    lines.write_text(text.replace("text 3", "TEXT 3"))
    with pytest.raises(DataError, match=rf"was prepared from other data: {lines} has as many bytes as before, and others; run"):
        use(lines, prepared)
    lines.write_text(text + "\n")
    with pytest.raises(DataError, match=rf"{lines} had 5,854 bytes, and has 5,855; run `python -m trainers\.prepare`"):
        use(lines, prepared)
    lines.write_text(text)
    changed = r"prepared has not this source: .*data was made with columns {} \(now {'text': 'body'}\)"
    with pytest.raises(DataError, match=changed):
        use(lines, prepared, columns={"text": "body"})
    lines.unlink()
    told = []
    assert len(use(lines, prepared, told.append)) == 150
    assert "what it was made of is not here" in told[0]


def test_files_that_came_and_went(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    make(source(folder, pattern="*.txt"), tmp_path / "made")
    (folder / "a.txt").rename(folder / "b.txt")
    with pytest.raises(DataError, match=rf"was prepared from other data: {folder}/a.txt is gone; {folder}/b.txt is new; run"):
        use(folder, tmp_path / "made", pattern="*.txt")
    with pytest.raises(
        DataError, match=r"made has prepared tokens, and no records: set data\.prepared=.*, and leave data\.paths"
    ):
        open_records(arguments(tmp_path / "made").data)


def test_another_tokenizer_or_encoder(lines, prepared, tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(DataError, match=rf"was prepared with another tokenizer: bytes; the run has {path} .*; set data"):
        use(lines, prepared, tokenizer=str(path))
    made = arguments(lines, prepared=str(prepared))
    with pytest.raises(DataError, match="was prepared by other rules: settings, the template, or the version of this"):
        documents_of(made.data, made, Numbers(), no_note)


def test_a_damaged_folder(lines, prepared, tmp_path):
    with pytest.raises(DataMissingError, match=r"data\.prepared = '.*/none': there is no prepared\.json in it"):
        use(lines, tmp_path / "none")
    folder = prepared / "data"
    PreparedDocuments(folder).check()
    tokens = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(b"x" + tokens[1:])
    with pytest.raises(DataError, match=r"data is damaged: tokens\.bin do not have the checksums"):
        use(lines, prepared).check()
    (folder / "tokens.bin").write_bytes(tokens[:-1])
    with pytest.raises(
        DataError, match=r"data is damaged: prepared\.json says 150 documents of \d+ tokens, and its files have 150"
    ):
        use(lines, prepared)
    (folder / "tokens.bin").unlink()
    with pytest.raises(DataError, match=r"data is not whole: .*tokens\.bin is missing; run `python -m trainers\.prepare` again"):
        use(lines, prepared)
    about = json_text.unseal((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json_text.seal({**about, "format": 99}))
    with pytest.raises(DataError, match=f"has format 99, and this version reads format {FORMAT}"):
        use(lines, prepared)
    (folder / "prepared.json").write_text("{}")
    with pytest.raises(DataError, match=r"prepared\.json is damaged: its contents do not have the digest"):
        use(lines, prepared)


def test_a_source_without_a_token_is_empty_and_no_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    make(source(tmp_path / "a.txt", Empty()), tmp_path / "made")
    documents = PreparedDocuments(tmp_path / "made")
    assert (len(documents), len(documents.tokens), len(documents[0].tokens)) == (1, 0, 0)


class Empty(Numbers):
    def encode(self, records):
        return [Document(np.zeros(0, np.int32)) for _ in records]


def test_a_process_that_finds_its_tokens_imports_no_library_for_them(tmp_path, cache):
    from tokenizers import Tokenizer, models

    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tokenizer))
    (tmp_path / "a.jsonl").write_text('{"text": "aaa"}\n')
    program = f"""
import sys
from trainers.data.preparing import of_source
from tests.unit.trainers.data.test_prepared import arguments
made = arguments({str(tmp_path / "a.jsonl")!r}, tokenizer={str(tokenizer)!r})
before = set(sys.modules)
print(len(of_source(made.data, made, print).tokens))
print(sorted({{"transformers", "tokenizers", "datasets", "pyarrow", "grain", "fsspec"}} & (sys.modules.keys() - before)))
"""
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT) for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["3\n['tokenizers']\n", "3\n[]\n"], runs[0].stderr + runs[1].stderr
