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

from gangway.errors import DataError, DataMissingError
from trainers.config import DataConfig, VisionConfig
from trainers.config.arguments import TrainingArguments
from trainers.data.images import ImageProcessor, open_image, read_processor
from trainers.data.sources.images import labelled_images

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
        {"resample": 0},
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


def test_null_is_as_if_it_were_left_out(tmp_path):
    nothing = dict.fromkeys(("resample", "image_mean", "image_std", "rescale_factor"))
    assert read_processor(folder_with(tmp_path, VIT | nothing)) == ImageProcessor(6, 4)


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
        ({"do_thumbnail": True}, r"do_thumbnail = true: expected false"),
        ({"image_mean": []}, r"image_mean = \[\]: expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, r"image_std = \[0.5, 0, 0.5\]: expected three numbers, none of them 0"),
        ({"image_std": [0.5, "1", 0.5]}, r"image_std = .*: expected three numbers"),
        ({"resample": 7}, r"resample = 7: expected one of Pillow's numbers, 0 to 5"),
        ({"rescale_factor": "1/255"}, r"rescale_factor = '1/255': expected a number"),
        ({"size": 0}, r"size = 0: expected a number of pixels"),
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


def saved(image, kind, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return np.asarray(open_image("a", file.getvalue()).convert("RGB"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_upright_as_its_exif_says(kind, orientation):
    shades = np.kron(np.array([[0, 80], [160, 240], [40, 200]], np.uint8), np.ones((8, 8), np.uint8))
    turns = {2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: np.transpose, 7: lambda a: np.rot90(a, 2).T}
    turns |= {6: lambda a: np.rot90(a, -1), 8: np.rot90}
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = saved(Image.fromarray(shades), kind, exif=exif)[..., 0]
    expected = turns.get(orientation, np.asarray)(shades)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.astype(int), expected, atol=12)  # JPEG and WebP lose some


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey_are_scaled_to_8(kind):
    shades = np.array([[0, 257, 32896, 65535]], np.uint16)
    np.testing.assert_array_equal(saved(Image.fromarray(shades), kind)[0, :, 0], [0, 1, 128, 255])
    np.testing.assert_allclose(ImageProcessor(None, None, 1)(shades)[0, :, 0], [-1, -0.992157, 0.003922, 1], atol=1e-5)


def test_numbers_whose_range_nothing_says_are_refused(tmp_path):
    for shades, why in ((np.ones((2, 2), np.float32), "floating-point numbers"), (np.ones((2, 2), np.int32), "32 bits")):
        Image.fromarray(shades).save(tmp_path / "a.tiff")
        with pytest.raises(DataError, match=rf"a\.tiff cannot be read: its shades are .*{why}.*: save it with 8 or 16 bits"):
            open_image(tmp_path / "a.tiff")
        with pytest.raises(DataError, match=r"an image cannot be read: it is an array of .*expected uint8"):
            ImageProcessor(None, None)(shades)
    with pytest.raises(DataError, match=r"it is an array uint8\[2, 2, 7\]: expected \[height, width, colours\]"):
        ImageProcessor(None, None)(np.zeros((2, 2, 7), np.uint8))


def test_what_is_transparent_is_over_white_as_transformers_has_it():
    from transformers.image_transforms import convert_to_rgb

    clear = np.dstack([np.zeros((2, 2, 3), np.uint8), np.array([[0, 128], [255, 64]], np.uint8)])
    image = Image.fromarray(clear)
    np.testing.assert_array_equal(saved(image, "PNG"), convert_to_rgb(image, return_numpy=True))
    np.testing.assert_array_equal(saved(image.convert("LA"), "PNG"), convert_to_rgb(image.convert("LA"), return_numpy=True))
    palette = Image.fromarray(np.array([[0, 1], [1, 2]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    np.testing.assert_array_equal(saved(palette, "PNG")[0], [[255, 0, 0], [0, 255, 0]])
    np.testing.assert_array_equal(saved(palette, "PNG", transparency=0)[0], [[255, 255, 255], [0, 255, 0]])
    one_bit = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    np.testing.assert_array_equal(saved(one_bit, "PNG")[0, :, 0], [0, 255])


def test_an_image_one_pixel_wide_keeps_its_sides():
    assert ImageProcessor(None, None)(np.zeros((5, 1, 3), np.uint8)).shape == (5, 1, 3)
    assert ImageProcessor(None, None, 1)(np.zeros((1, 5, 1), np.uint8)).shape == (1, 5, 1)


@pytest.mark.parametrize("place", range(0, 70, 7))
def test_a_byte_that_is_wrong_is_reported_as_damage_or_changes_shades_only(place):
    content = bytearray(as_bytes(np.full((5, 5, 3), 9, np.uint8)))
    content[place] ^= 0xFF
    try:
        open_image("a.png", bytes(content))
    except DataError as error:
        assert str(error).startswith("a.png ")  # noqa: PT017 - an image may be read, too


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


def test_files_that_are_left_out_are_counted(folders, events):
    (folders / "cat" / "notes.txt").write_text("no image")
    labelled_images(arguments(folders))
    pq.write_table(pa.table({"image": [as_bytes()] * 4, "label": [0, 1, 0, 1]}), folders / "a.parquet")
    labelled_images(arguments(folders))
    assert [event["message"] for event in events] == [
        f"data.paths {folders}: 1 of 17 files are no images and are left out",
        f"data.paths {folders}: 17 of 18 files are no .parquet and are left out",
    ]


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


@pytest.mark.parametrize("place", [45, 51, 60])
def test_a_png_whose_pixels_are_damaged_is_an_error(tmp_path, place):
    """Pillow reads it with other pixels, and says nothing."""
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
    Image.fromarray(pixels).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    assert np.array_equal(np.asarray(open_image("whole.png", content)), pixels)
    with pytest.raises(DataError, match=r"damaged\.png is damaged"):
        open_image("damaged.png", content[:place] + b"NaN" + content[place:])
