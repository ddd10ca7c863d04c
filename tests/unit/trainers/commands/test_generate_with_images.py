"""`trainers.generate` with images, and `model.pretrained` of a model that reads images."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.programs.tiny_images import MODEL, VISION
from tests.saved import saved
from tests.unit.trainers.commands.test_generate import asked, rows
from tests.unit.trainers.text.test_tokenizers import SIZE, folder  # noqa: F401  a fixture
from tests.unit.training import arguments
from trainers.base import BaseTrainer
from trainers.checkpoint.hugging_face_out import files_of, plan, write
from trainers.commands.generate import encoded, open_model
from trainers.commands.saved_models import with_model_of
from trainers.export import to_hugging_face
from trainers.models.hf import vision_config
from trainers.models.hf.vision_config import ImageTextConfig
from trainers.models.vlm import ImageTextModel
from trainers.optim.param_groups import parameter_path
from trainers.text import tokenizers

MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
BEGIN, END, IMAGE = SIZE, SIZE + 1, SIZE + 2
PROCESSOR = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 8, "width": 8}, "image_mean": [0.1, 0.2, 0.3]}
TASK = "trainers.tasks.image_text:ImageTextTask"
CONFIG = ImageTextConfig(
    dataclasses.replace(VISION, image_token=IMAGE),
    dataclasses.replace(MODEL, vocab_size=SIZE + 8, num_layers=2, window=6),
)


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):  # noqa: F811
    """A folder of Hugging Face as that of Gemma 3 with images is."""
    from tokenizers import Tokenizer

    path = tmp_path_factory.mktemp("model") / "gemma"
    shutil.copytree(folder, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(SIZE - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(path / "tokenizer.json"))
    about = vision_config.write(CONFIG, max_length=64, dtype="float32")
    (path / "config.json").write_text(json.dumps({**about, "boi_token_index": BEGIN, "eoi_token_index": END}))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    made = nnx.jit(lambda: ImageTextModel(*CONFIG, rngs=nnx.Rngs(0)))()
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(made, nnx.Param)))
    random = np.random.default_rng(0)
    arrays = {
        parameter_path(name): np.asarray(leaf) + 0.3 * random.normal(size=leaf.shape).astype(np.float32) for name, leaf in leaves
    }
    # The likeliest tokens are readable ones.
    words = [tokenizer.decode([token]) for token in range(SIZE)]
    readable = np.array([word.isascii() and word.isalpha() for word in words] + [False] * 8)
    arrays["decoder.unembed"] *= np.where(readable, 1.0, 0.01).astype(np.float32)
    arrays["projector.out"] *= 5.0
    tensors = plan(CONFIG, {name: (array.shape, "float32") for name, array in arrays.items()})
    write(path, files_of(tensors, 1 << 30), arrays.__getitem__)
    return path


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run that begins with the folder and has learned nothing."""
    home = tmp_path_factory.mktemp("run")
    made = BaseTrainer(settings(home, model), [EXAMPLE] * 8, None)
    made.train()
    return Path(made.output.checkpoint_path).parents[1]


EXAMPLE = {
    "tokens": np.array([BEGIN, *[IMAGE] * 4, END, 1, 2, 3], np.int32),
    "images": np.zeros((1, 8, 8, 3), np.float32),
    "token_weight": np.array([0] * 7 + [1, 1], np.float32),
}


def settings(home, pretrained, **changes):
    given = {
        "task": TASK,
        "model": {"pretrained": str(pretrained)},
        "data": {"sequence_length": 8},
        "optimizer": {"learning_rate": 1e-30, "schedule": {"name": "constant"}},
        "previews": {"prompts": []},
        "global_batch_size": 8,
        "max_num_steps": 1,
    }
    return arguments(home, **given | changes)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(1)
    for name, brightest in {"a": 30, "b": 255}.items():
        Image.fromarray(random.integers(brightest // 2, brightest, (20, 30, 3), np.uint8)).save(path / f"{name}.png")
    (path / "broken.png").write_bytes((path / "a.png").read_bytes()[:90])
    (path / "text.png").write_text("this is no picture")
    return path


@pytest.mark.slow("generates with whole models")
def test_each_prompt_has_its_image_or_all_have_one(model, pictures, capsys):
    options = [model, "--max-new-tokens", 6, "--image", pictures / "a.png"]
    prompts = ["--prompt", "the gang", "--prompt", "a"]
    both = rows(capsys, *options, *prompts)
    assert rows(capsys, *options, *prompts[2:]) == both[1:]
    other = rows(capsys, *options, "--image", pictures / "b.png", *prompts)
    assert other[0] == both[0]
    assert other[1]["text"] != both[1]["text"]
    assert rows(capsys, model, "--max-new-tokens", 6, *prompts[2:])[0]["text"] not in (both[1]["text"], other[1]["text"])


@pytest.mark.slow("generates with whole models")
def test_a_run_that_began_with_the_folder_answers_as_the_folder_does(model, run, pictures, capsys, tmp_path):
    options = ["--max-new-tokens", 6, "--image", pictures / "a.png", "--image", pictures / "b.png", "--prompt", "the gang"]
    text = asked(capsys, model, *options).out
    assert asked(capsys, run, *options).out == text
    to_hugging_face(saved(run, 1), tmp_path / "out")
    assert asked(capsys, tmp_path / "out", *options).out == text
    assert open_model(str(run)).images == open_model(str(model)).images
    assert open_model(str(run)).images.processor.mean == (0.1, 0.2, 0.3)
    # Its window is that of the decoder's file, and not of `data.sequence_length`.
    assert open_model(str(run)).window == 64


@pytest.mark.parametrize(
    ("text", "num_images", "read"),
    [
        ("hi", 0, "hi"),
        ("hi", 1, "\n\n{image}\n\nhi"),
        ("see <start_of_image> hi", 1, "see \n\n{image}\n\n hi"),
        ("<start_of_image>hi<start_of_image>", 2, "\n\n{image}\n\nhi\n\n{image}\n\n"),
    ],
)
def test_images_are_where_the_prompt_has_their_mark_or_at_its_beginning(model, text, num_images, read):
    opened, tokenizer = open_model(str(model)), tokenizers.load(str(model))
    whole = read.format(image="<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>")
    options = argparse.Namespace(chat=False, system=None, max_new_tokens=4)
    assert encoded(opened, text, options, num_images) == tokenizer.encode(whole)
    options.chat = True
    assert encoded(opened, text, options, num_images) == tokenizer.encode(f"<|user|>{whole}<|assistant|>")


def test_without_a_mark_the_tokens_of_the_image_come_first(model):
    opened = open_model(str(model))
    opened = dataclasses.replace(opened, images=dataclasses.replace(opened.images, mark=None))
    options = argparse.Namespace(chat=False, system=None, max_new_tokens=4)
    assert encoded(opened, "hi", options, 2) == [IMAGE] * 8 + encoded(opened, "hi", options, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["none.png"], "none.png cannot be read: No such file or directory; is it there, and yours to read?"),
        (["broken.png"], "broken.png is damaged"),
        (["text.png"], "text.png is no image that Pillow knows"),
        (["a.png", "b.png", "--prompt", "b", "--prompt", "c"], "--image is given 2 times, and there are 3 prompts"),
        (["a.png", "--prompt", "<start_of_image><start_of_image>"], "has 2 places for images (<start_of_image>), and gets 1"),
        (
            ["a.png", "--prompt", "x<image_soft_token>"],
            f"the prompt has 5 tokens {IMAGE} (vision.image_token): expected 4, those",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_the_weights_are_read(model, pictures, capsys, tmp_path, options, said):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        shutil.copy(path, copy)
    words = [word for name in options for word in (["--image", pictures / name] if name.endswith(".png") else [name])]
    printed = asked(capsys, copy, "--prompt", "a", *words, status=2)
    assert said in printed.err
    assert printed.out == ""
    assert "compiling" not in printed.err


def test_a_place_without_an_image_and_an_image_of_another_size(model, pictures, capsys, tmp_path):
    said = asked(capsys, model, "--prompt", "<start_of_image>hi", status=2).err
    assert "has 1 places for images (<start_of_image>), and gets 0 images (--image)" in said
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": {"height": 4, "width": 8}}))
    said = asked(capsys, copy, "--image", pictures / "a.png", "--prompt", "hi", status=2).err
    assert "a.png has 4 x 8 pixels after preprocessor_config.json: expected 8 x 8 (vision.image_size)" in said


def test_an_evaluation_of_the_folder_has_its_encoder(model, tmp_path):
    given = settings(tmp_path, model, model={}, vision={"family": "siglip"})
    theirs = with_model_of(str(model), given)
    assert (theirs.vision, theirs.model.width) == (CONFIG.vision, CONFIG.model.width)


def test_other_settings_beside_a_pretrained_model_with_images(model, tmp_path):
    made = BaseTrainer(settings(tmp_path, model, vision={"remat": "full"}), [EXAMPLE] * 8, None)
    assert made.arguments.vision == dataclasses.replace(CONFIG.vision, remat="full")
    with pytest.raises(ValueError, match=r"vision: the folder of model.pretrained .* says it; leave out all of it but remat"):
        BaseTrainer(settings(tmp_path, model, vision={"family": "siglip"}), [EXAMPLE] * 8, None)
    with pytest.raises(ValueError, match=rf"is a model with images, and task = .* reads texts alone: set task: {TASK}"):
        BaseTrainer(settings(tmp_path, model, task="trainers.tasks.causal_lm:CausalLMTask"), [EXAMPLE] * 8, None)
