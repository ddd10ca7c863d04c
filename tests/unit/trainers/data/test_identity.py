"""What a run has learned from is compared when it goes on: what changed is named, and refused or allowed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import time

import pytest

from gangway.errors import DataError, DataUnavailableError
from tests import fuzz
from tests.programs.processes import PATIENCE_S
from tests.unit.training import of
from trainers.base import BaseTrainer
from trainers.checkpoint import going_on
from trainers.commands import run
from trainers.config import DataConfig, ModelConfig, UnitConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.evaluation import ExactMatchConfig
from trainers.data import identity
from trainers.data.identity import KEY, Identity, digest_of
from trainers.data.sources.text import text_windows
from trainers.planning import estimate
from trainers.runtime import multihost

WORDS = ("one ", "two ", "three ", "many words of a text ")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(WORDS[number] * 40)
    return folder


def arguments(tmp_path, texts, steps=2, **data):
    config = DataConfig(paths=(str(texts),), sequence_length=16, eval_fraction=0.1, **data)
    model = ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=16)
    about = {"max_num_steps": steps, "global_batch_size": 8, "storage": str(tmp_path / "runs"), "evaluation": {"max_batches": 1}}
    return from_dict(TrainingArguments, {"name": "run", "data": config, "model": model, **about})


def train(tmp_path, texts, steps=2, **data):
    made = arguments(tmp_path, texts, steps, **data)
    trainer = BaseTrainer(made, *text_windows(made))
    # As at a storage that is slower than the reading of four small files.
    trainer.batching.identity._digest({})
    return trainer.train()


def seen(tmp_path, texts, **data):
    found = Identity(arguments(tmp_path, texts, **data), (range(96), range(4)), reads_files=True)
    found._digest({})
    return found


def meta_of(found, tmp_path, texts):
    made = json.loads(json.dumps({"data": {**vars(arguments(tmp_path, texts).data)}}, default=list))
    return {"arguments": {**made, "evaluation": {"units": {}}}, **found.recorded()}


def add(texts):
    (texts / "4.txt").write_text("more")
    return "4.txt is new"


def remove(texts):
    (texts / "0.txt").unlink()
    return "0.txt is gone"


def append(texts):
    with open(texts / "2.txt", "a") as file:
        file.write("at the end")
    return "2.txt has 10 bytes more at its end, and the same before them"


def cut(texts):
    (texts / "3.txt").write_text(WORDS[3])
    return "3.txt had 840 bytes, and has 21"


def edit(texts):
    (texts / "1.txt").write_text("tow " * 40)
    return "1.txt has other contents"


def replace(texts):
    (texts / "1.txt").write_text("another text " * 40)
    return "1.txt had 160 bytes, and has 520, others"


CHANGES = (add, remove, append, cut, edit, replace)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_named(tmp_path, texts, change):
    meta = meta_of(seen(tmp_path, texts), tmp_path, texts)
    expected = change(texts)
    assert expected in seen(tmp_path, texts).problem(meta, pytest.fail)[0]
    told = []
    assert seen(tmp_path, texts, on_change="continue").problem(meta, told.append)[0] == ""
    assert expected in told[0]


def test_a_run_does_not_go_on_with_other_data(tmp_path, texts, events):
    train(tmp_path, texts)
    expected = append(texts)
    with pytest.raises(DataError, match=r"the run has learned from other data: .*data\.on_change=continue") as caught:
        train(tmp_path, texts, steps=4)
    assert expected in str(caught.value)
    assert of(events, "first_step")[-1]["step"] == 1  # nothing more was trained
    train(tmp_path, texts, steps=4, on_change="continue")
    told = [event["message"] for event in of(events, "note")]
    assert any("goes on with other data than before" in line and expected in line for line in told)
    train(tmp_path, texts, steps=5)  # what it goes on with is its data from here on
    assert of(events, "first_step")[-1]["step"] == 5


def test_other_files_are_refused_before_anything_is_made_of_them(tmp_path, texts, monkeypatch):
    """The tokens of ten million records take minutes."""

    def made(arguments):
        raise AssertionError("data is made of the files")

    train(tmp_path, texts)
    told = append(texts)
    for module in (run, estimate):
        monkeypatch.setattr(module, "dataset_function", lambda arguments: made)
    for start in (lambda to_do: run.train(to_do, 0.0), estimate.load_datasets):
        with pytest.raises(DataError, match=f"the run has learned from other data: {told}; bring the data back"):
            start(arguments(tmp_path, texts, 4))
        with pytest.raises(AssertionError, match="data is made"):
            start(arguments(tmp_path, texts, 4, on_change="continue"))
    problems, _ = estimate.plan(arguments(tmp_path, texts, 4), 1)
    assert [problem.partition("; ")[0] for problem in problems] == [f"the run has learned from other data: {told}"]


def test_a_run_whose_data_is_the_same_reads_none_of_it_again(tmp_path, texts, monkeypatch, events):
    train(tmp_path, texts)
    for path in texts.iterdir():  # a copy has other times
        os.utime(path)
    train(tmp_path, texts, steps=4)
    read = []
    monkeypatch.setattr(identity, "digest_of", lambda path, num_bytes: read.append(path) or digest_of(path, num_bytes))
    made = arguments(tmp_path, texts, steps=5)
    BaseTrainer(made, *text_windows(made)).train()
    assert read == []
    assert not any("data" in event["message"] for event in of(events, "note"))


def test_a_changed_time_alone_is_no_change_and_an_edit_with_the_old_time_is_found_by_a_later_digest(tmp_path, texts):
    before = seen(tmp_path, texts)
    meta = meta_of(before, tmp_path, texts)
    os.utime(texts / "0.txt", ns=(1, 1))
    assert seen(tmp_path, texts).problem(meta, pytest.fail)[0] == ""
    (texts / "0.txt").write_text("eno " * 40)
    os.utime(texts / "0.txt", ns=(2, 2))
    assert "0.txt has other contents" in seen(tmp_path, texts).problem(meta, pytest.fail)[0]


@pytest.mark.slow("trains three times")
def test_a_run_of_before_is_told_once_and_gets_a_record(tmp_path, texts, monkeypatch, events):
    with monkeypatch.context() as patch:
        patch.setattr(Identity, "recorded", lambda self: {})
        train(tmp_path, texts)
    train(tmp_path, texts, steps=3)
    train(tmp_path, texts, steps=4)
    told = [event["message"] for event in of(events, "note") if "no record of what it learned from" in event["message"]]
    assert len(told) == 1
    assert list(going_on.newest(str(tmp_path / "runs" / "run"))[1][KEY]["files"]) == [*seen(tmp_path, texts).seen["files"]]


@pytest.mark.slow("trains twice")
def test_other_paths_are_a_change_of_settings(tmp_path, texts, events):
    train(tmp_path, texts)
    other = texts.rename(tmp_path / "elsewhere")
    (other / "5.txt").write_text("more " * 10)
    train(tmp_path, other, steps=3)
    assert of(events, "first_step")[-1]["step"] == 3


def test_another_tokenizer_is_refused_whatever_the_setting(tmp_path, texts):
    found = seen(tmp_path, texts, on_change="continue")
    meta = meta_of(found, tmp_path, texts)
    meta[KEY]["tokenizer"] = "of other files"
    problem = found.problem(meta, pytest.fail)[0]
    assert problem.startswith("the files of data.tokenizer are others")
    assert "on_change" not in problem


def test_of_data_of_ones_own_the_number_of_examples_is_known(tmp_path, texts):
    made = arguments(tmp_path, texts)
    meta = meta_of(Identity(made, (range(96), range(4)), reads_files=False), tmp_path, texts)
    assert Identity(made, (range(96), range(4)), reads_files=False).problem(meta, pytest.fail)[0] == ""
    problem = Identity(made, (range(64), range(4)), reads_files=False).problem(meta, pytest.fail)[0]
    assert "there were 96 examples and 4 held out, and there are 64 examples and 4 held out" in problem
    meta["arguments"]["data"]["sequence_length"] = 8  # another length gives other examples
    assert Identity(made, (range(64), range(4)), reads_files=False).problem(meta, pytest.fail)[0] == ""


def with_units(tmp_path, texts, **units):
    made = arguments(tmp_path, texts)
    return dataclasses.replace(made, evaluation=dataclasses.replace(made.evaluation, units=units))


def test_the_data_of_other_validation_units_is_compared_too(tmp_path, texts):
    (asked := tmp_path / "asked.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    made = with_units(
        tmp_path, texts, sums=UnitConfig(exact_match=ExactMatchConfig(paths=(str(asked),))), own=UnitConfig(dataset="a:b")
    )

    def there(count=9, made=made):
        return Identity(made, (range(96),), reads_files=True, units={"own": range(count), "sums": range(count)})

    (before := there())._digest({})
    meta = meta_of(before, tmp_path, texts)
    meta["arguments"]["evaluation"] = json.loads(json.dumps(dataclasses.asdict(made.evaluation)))
    assert there().problem(meta, pytest.fail)[0] == ""
    assert "evaluation.units.own: there were 9 examples, and there are 8 examples" in there(8).problem(meta, pytest.fail)[0]
    with open(asked, "a") as file:
        file.write('{"question": "1 + 2", "answer": "3"}\n')
    problem = there().problem(meta, pytest.fail)[0]
    assert "learned from other data: evaluation.units.sums: asked.jsonl has 37 bytes more at its end" in problem
    others = with_units(
        tmp_path, texts, own=UnitConfig(dataset="c:d")
    )  # units that have changed themselves are changes of settings
    assert there(8, others).problem(meta, pytest.fail)[0] == ""
    assert identity._summary(there(8).seen) != identity._summary(there(9).seen)  # the hosts differ in it
    made = with_units(tmp_path, texts, own=UnitConfig(dataset=f"{__name__}:seven"))
    assert BaseTrainer(made, *text_windows(made)).batching.identity.seen["units"] == {"own": 7}


def seven(arguments):
    examples = text_windows(arguments)[0]
    return [examples[index] for index in range(7)]


@pytest.mark.parametrize(
    ("counts", "is_shared", "fits"), [((96, 96), True, True), ((96, 64), True, False), ((96, 64), False, True)]
)
def test_hosts_that_read_other_data_say_so(tmp_path, texts, monkeypatch, counts, is_shared, fits):
    made = arguments(tmp_path, texts)
    others = [Identity(made, (range(count),), reads_files=False) for count in counts]
    answers = [{"problem": "", "absent": "", "seen": identity._summary(other.seen)} for other in others]
    monkeypatch.setattr(multihost, "all_hosts", lambda topic, value: answers)
    if fits:
        others[0].check({}, pytest.fail, is_shared=is_shared)
        return
    with pytest.raises(
        DataUnavailableError, match="host 1 reads other data than host 0: 64 examples there, 96 examples on host 0"
    ):
        others[0].check({}, pytest.fail, is_shared=is_shared)


def test_of_very_many_files_the_names_are_compared(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(identity, "MANY", 3)
    meta = meta_of(seen(tmp_path, texts), tmp_path, texts)
    assert (meta[KEY]["files"], meta[KEY]["many"]["files"]) == ({}, 4)
    edit(texts)
    assert seen(tmp_path, texts).problem(meta, pytest.fail)[0] == ""
    add(texts)
    assert "the names of its files are others (4 files then, 5 files now)" in seen(tmp_path, texts).problem(meta, pytest.fail)[0]


def test_files_of_one_name_in_several_folders_are_all_compared(tmp_path, texts):
    other = tmp_path / "other"
    shutil.copytree(texts, other)
    made = arguments(tmp_path, texts)
    both = dataclasses.replace(made, data=dataclasses.replace(made.data, paths=(str(texts), str(other))))
    found = Identity(both, (), reads_files=True)
    assert len(found.seen["files"]) == 8
    assert len({*found._paths.values()}) == 8


def test_of_images_what_lies_beside_them_is_no_error(tmp_path, texts):
    (texts / "metadata.jsonl").write_text("{}")
    (texts / "a.zip").write_text("")
    made = arguments(tmp_path, texts)
    assert len(Identity(made, (), reads_files=True, reads_records=False).seen["files"]) == 6


def test_of_a_large_file_a_part_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 10)
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(4000))
    whole, read = digest_of(str(path), 4000), []
    monkeypatch.setattr(identity.ByteRanges, "read", lambda self, start, stop: read.append(start) or b"")
    digest_of(str(path), 4000)
    assert len(read) == 2 + 4
    assert {0, 3990} <= set(read)
    monkeypatch.undo()
    assert whole != digest_of(str(path), 4000)


@pytest.mark.parametrize(("more", "said"), [(0, "0.txt has other contents"), (5, "0.txt had 160 bytes, and has 165, others")])
def test_an_object_of_a_bucket_with_another_tag_is_another_one_and_is_not_read(tmp_path, texts, more, said):
    found = seen(tmp_path, texts)
    found._paths = dict.fromkeys(found._paths, "s3://nobody/has/this")
    found._digest({})
    meta = meta_of(found, tmp_path, texts)
    assert {about["digest"] for about in meta[KEY]["files"].values()} == {""}
    assert found.problem(meta, pytest.fail)[0] == ""
    found.seen["files"]["0.txt"] = {"num_bytes": 160 + more, "changed": "another tag"}
    assert said in found.problem(meta, pytest.fail)[0]


def test_a_checkpoint_does_not_wait_for_what_was_not_read_yet(tmp_path, texts):
    made = arguments(tmp_path, texts)
    found = Identity(made, text_windows(made), reads_files=True)
    assert {about["digest"] for about in found.recorded()[KEY]["files"].values()} == {""}
    found.check({}, pytest.fail, is_shared=True)
    until = time.monotonic() + PATIENCE_S
    while any(not about["digest"] for about in found.recorded()[KEY]["files"].values()):
        assert time.monotonic() < until
        time.sleep(0.01)


def drawn(dice, texts):
    """Writes random files, and returns what they are made of."""
    for path in texts.iterdir():
        path.unlink()
    for number in range(dice.randrange(1, 8)):
        name = f"{number}.{dice.choice(('txt', 'md', 'text'))}"
        (texts / name).write_text(dice.choice(WORDS) * dice.randrange(8, 400))
    return sorted(texts.iterdir())


def changed(dice, path):
    """Changes a file in a random way. Returns what is said of it; empty for a way that changes nothing of its contents."""
    content, said = path.read_bytes(), ""
    match dice.randrange(7):
        case 0:
            path.unlink()
            said = f"{path.name} is gone"
        case 1:
            path.with_name(f"new-{path.name}").write_bytes(content)
            said = f"new-{path.name} is new"
        case 2:
            path.write_bytes(content + b"!" * (more := dice.randrange(1, 99)))
            said = f"{path.name} has {more} bytes more at its end, and the same before them"
        case 3:
            path.write_bytes(content[: (size := dice.randrange(len(content)))])
            said = f"{path.name} had {len(content):,} bytes, and has {size:,}"
        case 4:
            at = dice.randrange(len(content))
            path.write_bytes(content[:at] + b"#" + content[at + 1 :])
            said = f"{path.name} has other contents"
        case 5:
            os.utime(path, ns=(0, dice.randrange(10**18)))
        case _:
            copy = path.with_name(".copy")
            copy.write_bytes(content)
            copy.replace(path)
    return said


def test_each_of_many_random_changes_is_named_and_nothing_else(tmp_path, texts):
    dice = random.Random(fuzz.seed(1))
    for _ in range(fuzz.count(20)):
        files = drawn(dice, texts)
        meta = meta_of(seen(tmp_path, texts), tmp_path, texts)
        expected = {
            line for path in dice.sample(files, dice.randrange(min(len(files), identity.SHOWN))) if (line := changed(dice, path))
        }
        if not any(texts.iterdir()):
            continue
        problem = seen(tmp_path, texts).problem(meta, pytest.fail)[0]
        named = set(problem.removeprefix("the run has learned from other data: ").split("; ")) - {*identity.CONTINUE.split("; ")}
        assert named - {""} == expected
