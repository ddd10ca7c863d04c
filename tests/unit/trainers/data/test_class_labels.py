"""The labels of classes: which class a value stands for, which are refused before training, and which names an export has."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from gangway.errors import DataError
from gangway.storage.opening import place_of
from tests.saved import saved
from tests.unit.training import arguments as of_training
from trainers.base import BaseTrainer
from trainers.checkpoint import assets, carried, export
from trainers.config import ClassificationConfig, DataConfig, VisionConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import LABELS_FILE
from trainers.data.packed_rows import split as split_documents
from trainers.data.sources.classification import label_of, labelled_texts
from trainers.data.sources.images import labelled_images
from trainers.data.sources.preference import preference_pairs


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Tokens are kept where nobody else keeps some."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.mark.parametrize(
    ("value", "labels", "place"),
    [
        ("b", ["a", "b"], 1),
        (1, ["a", "b"], 1),
        (0, ["a", "b"], 0),
        (1, ["1", "2", "3"], 0),
        ("3", ["1", "2", "3"], 2),
        (-1, ["-1", "1"], 0),
        (1, ["-1", "1"], 1),
        (True, ["false", "true"], 1),
        (False, ["True", "False"], 1),
        (10, ["10", "other"], 0),
    ],
)
def test_the_class_that_a_value_stands_for(value, labels, place):
    assert label_of(value, labels) == place


@pytest.mark.parametrize(
    ("value", "labels", "message"),
    [
        (0, ["1", "2", "3"], r"is 0: expected one of classification\.labels \(1, 2, 3\)$"),
        (2, ["a", "b"], r"is 2: expected .*, or a number from 0 to 1; numbers from 1 on are names: set classification\.labels"),
        (-1, ["a", "b"], r"is -1: expected"),
        ("1", ["a", "b"], r"is '1': .*in CSV all values are texts.*name the classes so: '1'"),
        (True, ["a", "b"], r"is True: expected"),
        (True, ["0", "1"], r"is True: expected"),
        (True, ["true", "TRUE"], r"is True: expected"),
        (1.0, ["a", "b"], r"is 1\.0: expected"),
        (None, ["a", "b"], r"is None: expected"),
        ("B", ["a", "b"], r"is 'B': expected"),
        ("", ["a", "b"], r"is '': expected"),
        ([1], ["a", "b"], r"is \[1\]: expected"),
    ],
)
def test_a_value_that_stands_for_no_class(value, labels, message):
    with pytest.raises(DataError, match=message):
        label_of(value, labels)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(path, packing=None, seed=0, **changes):
    data = DataConfig(paths=(str(path),), eval_fraction=0.25, packing=packing, sequence_length=32)
    made = {"classification": ClassificationConfig(labels=("a", "b")), **changes}
    return TrainingArguments(name="t", max_num_steps=1, data=data, seed=seed, **made)


def texts(dataset):
    """Returns the texts of the rows, in any order."""
    rows = (dataset[index] for index in range(len(dataset)))
    lines = (np.where(row["token_weight"] > 0, row["tokens"], 0) for row in rows)
    return sorted(word for line in lines for word in bytes(line.astype(np.uint8)).replace(b"\0", b" ").split())


@pytest.mark.parametrize("packing", [None, "fit"])
@pytest.mark.parametrize("wrong", [2, "c", 1.5, None, True, "1"])
def test_a_label_that_is_none_is_reported_before_training(tmp_path, packing, wrong):
    records = [{"text": "x", "label": each} for each in (0, 1, 1, wrong)]
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: (column 'label' is |there is no 'label')"):
        labelled_texts(settings(write(tmp_path / "a.jsonl", records), packing))


@pytest.mark.parametrize("kind", ["labels", "pairs"])
def test_of_sorted_data_examples_of_all_classes_are_held_out_the_same_packed_and_apart(tmp_path, kind):
    words = [f"w{number:02}" for number in range(40)]
    records = {
        "labels": [{"text": f"{word} ", "label": int(number >= 20)} for number, word in enumerate(words)],
        "pairs": [{"prompt": f"{word} ", "chosen": "y", "rejected": "n"} for word in words],
    }
    path = write(tmp_path / "a.jsonl", records[kind])
    dataset = labelled_texts if kind == "labels" else preference_pairs
    held = [dataset(settings(path, packing, seed))[1] for packing in (None, "fit") for seed in (0, 1)]
    if kind == "labels":
        first = texts(held[0])
        assert all(texts(each) == first for each in held)
        assert len(first) == 10
        assert {int(word[1:]) >= 20 for word in first} == {True, False}
        assert {int(held[0][index]["label"]) for index in range(10)} == {0, 1}
    chosen = held[0].records.indices.tolist()
    assert all(part.records.indices.tolist() == chosen for part in held[:2])
    assert all(sorted(part.sources[0].indices.tolist()) == chosen for part in held[2:])
    assert {each >= 20 for each in chosen} == {True, False}
    assert split_documents(held[2].sources[0].examples, 0.25)[1].indices.tolist() == chosen  # one rule for all kinds


def image(shade=0):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


def of_images(path, labels=2, **changes):
    vision = VisionConfig(image_size=4, patch_size=2, num_labels=labels)
    data = DataConfig(paths=(str(path),), eval_fraction=0.25)
    return TrainingArguments(name="t", max_num_steps=1, data=data, vision=vision, **changes)


def write_images(path, labels, names=None):
    table = pa.table({"image": [image()] * len(labels), "label": labels})
    if names is not None:
        about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, path)
    return path


def test_of_sorted_images_examples_of_all_classes_are_held_out(tmp_path):
    _, held = labelled_images(of_images(write_images(tmp_path / "a.parquet", [0] * 20 + [1] * 20)))
    assert {int(held[index]["label"]) for index in range(len(held))} == {0, 1}


@pytest.mark.parametrize("labels", [[1, 2], [0, -1], [True, False], ["0", "1"], [0, None], [0.0, 1.0]])
def test_a_label_of_an_image_that_is_none_is_reported_before_training(tmp_path, labels):
    with pytest.raises(DataError, match=r"a\.parquet, row \d has the label .*: expected an integer from 0 to 1"):
        labelled_images(of_images(write_images(tmp_path / "a.parquet", labels)))


def folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / name / f"{number}.png").write_bytes(image())
    return tmp_path


def begun_with(tmp_path, *names):
    tmp_path.mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names)), "label2id": {}}))
    return {"init_from": {"path": str(tmp_path)}}


def test_folders_have_the_numbers_of_a_model_that_has_the_same_classes(tmp_path):
    path = folders(tmp_path / "data", "cat", "dog")
    assert labelled_images(of_images(path))[0].class_names == ("cat", "dog")
    train, _ = labelled_images(of_images(path, **begun_with(tmp_path / "same", "dog", "cat")))
    assert train.class_names == ("dog", "cat")
    names = [train.images.files[int(place)][0].parts[0] for place in train.part]
    assert [int(train[index]["label"]) for index in range(len(train))] == [("dog", "cat").index(name) for name in names]
    others = labelled_images(of_images(path, **begun_with(tmp_path / "others", "tree", "house")))[0]
    assert others.class_names == ("cat", "dog")


def test_rows_of_parquet_have_the_names_that_datasets_has_written(tmp_path):
    path = write_images(tmp_path / "a.parquet", [0, 1, 0, 1], ["cat", "dog"])
    assert labelled_images(of_images(path))[0].class_names == ("cat", "dog")
    assert labelled_images(of_images(write_images(tmp_path / "b.parquet", [0, 1])))[0].class_names == ()
    with pytest.raises(DataError, match=r"vision.num_labels = 3: data.paths has 2 classes \(cat, dog\)"):
        labelled_images(of_images(path, 3))
    with pytest.raises(DataError, match=r"numbers the classes cat, dog, and id2label of init_from = '.*' dog, cat: give"):
        labelled_images(of_images(path, **begun_with(tmp_path / "other", "dog", "cat")))
    both = tmp_path / "both"
    both.mkdir()
    write_images(both / "a.parquet", [0, 1], ["cat", "dog"])
    write_images(both / "b.parquet", [0, 1], ["dog", "cat"])
    with pytest.raises(DataError, match=r"b\.parquet has the classes \['dog', 'cat'\], and .*a\.parquet \['cat', 'dog'\]"):
        labelled_images(of_images(both))


def test_an_export_has_the_names_of_the_classes_of_the_data(tmp_path):
    class Data(list):
        class_names = ("cat", "dog")

    trainer = BaseTrainer(of_training(tmp_path), Data([{"tokens": np.arange(4)}] * 2), None)
    assert trainer.model_assets == {LABELS_FILE: ["cat", "dog"]}
    assets.keep(str(tmp_path / "run"), trainer.model_assets)
    (tmp_path / "out").mkdir()
    assets.copy_into(tmp_path / "out", place_of(saved(tmp_path / "run", 1)))
    assert export._class_names(tmp_path / "out") == {
        "id2label": {"0": "cat", "1": "dog"},
        "label2id": {"cat": 0, "dog": 1},
    }
    assert export._class_names(tmp_path) == {}
    assert carried.labels_of([]) == {}
