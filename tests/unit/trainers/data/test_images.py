"""Images on the host: what `preprocessor_config.json` asks for against `transformers`, folders of classes, Parquet, and what is
said of files that are no images."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainers.config import DataConfig, VisionConfig
from trainers.config.arguments import TrainingArguments
from trainers.data.images import ImageProcessor, open_image, read_processor
from trainers.data.sources.images import labelled_images
from trainers.errors import DataError, DataMissingError

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
VIT = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 6, "width": 4},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.3, 0.4],
}


def folder_with(tmp_path, found):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found))
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resample": 3, "rescale_factor": 1 / 128},
        {"do_normalize": False},
        {"do_rescale": False, "do_resize": False},
        {"image_processor_type": "SiglipImageProcessor", "do_convert_rgb": True},
    ],
)
def test_an_image_becomes_the_numbers_that_transformers_makes_of_it(changes, tmp_path):
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    found = VIT | changes
    theirs = SiglipImageProcessorPil if "Siglip" in found["image_processor_type"] else ViTImageProcessorPil
    settings = {name: value for name, value in found.items() if name != "image_processor_type"}
    expected = theirs(**settings)(Image.fromarray(PIXELS), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    made = read_processor(folder_with(tmp_path, found))(Image.fromarray(PIXELS))
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_an_image_of_shades_of_grey_may_be_read_as_one_of_colours_and_the_other_way():
    grey, colours = ImageProcessor(None, None, num_channels=1), ImageProcessor(None, None)
    found = colours(PIXELS[..., 0])
    np.testing.assert_allclose(found, np.repeat(PIXELS[..., :1] / 127.5 - 1, 3, 2), atol=1e-6)
    assert grey(PIXELS).shape == (9, 7, 1)


def test_the_size_may_be_one_number(tmp_path):
    assert read_processor(folder_with(tmp_path, VIT | {"size": 5}))(PIXELS).shape == (5, 5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            r"image_processor_type = 'CLIPImageProcessor': expected one",
        ),
        ({"do_center_crop": True}, r"preprocessor_config.json: do_center_crop = true: expected false"),
        ({"size": {"shortest_edge": 4}}, r"size = \{'shortest_edge': 4\}: expected a number of pixels, or height and width"),
    ],
)
def test_a_preparation_that_is_not_understood_is_refused(changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_processor(folder_with(tmp_path, VIT | changes))


def as_bytes(pixels=PIXELS, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no image", "a.png is no image that Pillow knows"), (as_bytes()[:-40], "a.png is damaged: ")],
)
def test_a_file_that_is_no_whole_image_is_named(content, message, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_image(tmp_path / "a.png")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataMissingError, match=r"b\.png cannot be read: No such file"):
        open_image(tmp_path / "b.png")


def arguments(path, **changes):
    vision = VisionConfig(image_size=4, patch_size=2, num_labels=2)
    data = DataConfig(**{"paths": (str(path),), "eval_fraction": 0.25, **changes.pop("data", {})})
    return TrainingArguments(name="t", max_num_steps=1, data=data, **{"vision": vision, **changes})


@pytest.fixture
def folders(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        for number in range(8):
            path = tmp_path / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(as_bytes(np.full((5, 5, 3), 100 * label + number, np.uint8)))
    return tmp_path


def test_folders_are_classes_and_a_part_is_held_out(folders):
    train, held = labelled_images(arguments(folders))
    assert (len(train), len(held)) == (12, 4)
    examples = [part[index] for part in (train, held) for index in range(len(part))]
    shades = {round(float((example["image"][0, 0, 0] + 1) * 127.5)): int(example["label"]) for example in examples}
    assert shades == {100 * label + number: label for label in range(2) for number in range(8)}
    assert {(example["image"].shape, example["label"].dtype) for example in examples} == {((4, 4, 3), np.dtype("int32"))}
    # Not one class after the other.
    labels = [int(train[index]["label"]) for index in range(len(train))]
    assert labels != sorted(labels)


def test_images_are_prepared_as_the_weights_that_training_begins_with_want_them(folders, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    folder_with(begun, VIT | {"size": 3, "do_normalize": False})
    train, _ = labelled_images(arguments(folders, init_from={"path": str(begun)}))
    assert train[0]["image"].shape == (3, 3, 3)
    assert train[0]["image"].min() >= 0


@pytest.mark.parametrize("as_struct", [True, False])
def test_rows_of_parquet(as_struct, tmp_path):
    for part in range(2):
        images = [as_bytes(np.full((5, 5, 3), 10 * part + number, np.uint8)) for number in range(5)]
        column = [{"bytes": image, "path": None} for image in images] if as_struct else images
        table = pa.table({"image": column, "label": [0, 1, 0, 1, 0], "title": ["x"] * 5})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=2)
    train, held = labelled_images(arguments(tmp_path))
    examples = [part[index] for part in (train, held) for index in range(len(part))]
    shades = [round(float((example["image"][0, 0, 0] + 1) * 127.5)) for example in examples]
    labels = [int(example["label"]) for example in examples]
    assert dict(zip(shades, labels, strict=True)) == {10 * part + n: n % 2 for part in range(2) for n in range(5)}
    assert shades[:8] == sorted(shades[:8])


def test_a_row_that_is_no_image_is_named(tmp_path):
    rows = [as_bytes(), as_bytes(), b"no image"]
    pq.write_table(pa.table({"image": rows, "label": [0, 1, 0]}), tmp_path / "a.parquet", row_group_size=2)
    parts = labelled_images(arguments(tmp_path, data={"paths": (str(tmp_path),), "eval_fraction": 0.0}))
    with pytest.raises(DataError, match=r"a\.parquet, row 2 is no image that Pillow knows"):
        parts[0][2]


def test_what_does_not_fit_is_named(folders, tmp_path):
    three = VisionConfig(image_size=4, patch_size=2, num_labels=3)
    with pytest.raises(DataError, match=r"vision.num_labels = 3: data.paths has 2 folders of classes \(cat, dog\)"):
        labelled_images(arguments(folders, vision=three))
    with pytest.raises(DataMissingError, match=r"'.*nowhere' does not exist"):
        labelled_images(arguments(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissingError, match=r"no image in .*empty; expected FOLDER/CLASS/NAME"):
        labelled_images(arguments(tmp_path / "empty"))
    (folders / "loose.png").write_bytes(as_bytes())
    with pytest.raises(DataError, match=r"loose\.png is in no folder of a class"):
        labelled_images(arguments(folders))
    columns = tmp_path / "columns.parquet"
    pq.write_table(pa.table({"picture": [1], "label": [0]}), columns)
    with pytest.raises(DataError, match=r"columns\.parquet has no column image: it has picture, label"):
        labelled_images(arguments(columns))
    labels = tmp_path / "labels.parquet"
    pq.write_table(pa.table({"image": [as_bytes()], "label": [2]}), labels)
    with pytest.raises(DataError, match=r"labels.parquet, row 0 has the label 2: expected an integer from 0 to 1 \(vision"):
        labelled_images(arguments(labels))
