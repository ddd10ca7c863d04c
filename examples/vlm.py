"""A tiny Gemma 3 with images that answers questions about pictures: it reads a picture and a question, and says the answer."""

import numpy as np

from trainers.base import BaseTrainer
from trainers.data.collate import CollateInfo
from trainers.data.images import ImageProcessor

SIDE = 16
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
SHAPES = {"square": lambda y, x: np.maximum(abs(y), abs(x)) < 5, "cross": lambda y, x: np.minimum(abs(y), abs(x)) < 2}
QUESTIONS = ("which colour is it", "which shape has it")


def example(number):
    """The same on every machine. The questions take turns."""
    random = np.random.default_rng(number)
    colour, shape = random.choice(list(COLOURS)), random.choice(list(SHAPES))
    y, x = np.indices((SIDE, SIDE)) - random.integers(5, SIDE - 5, (2, 1, 1))
    picture = np.where(SHAPES[shape](y, x)[..., None], COLOURS[colour], 0).astype(np.uint8)
    question = number % len(QUESTIONS)
    return {"picture": picture, "question": QUESTIONS[question], "answer": (colour, shape)[question]}


def pictures(arguments):
    return [example(number) for number in range(1000)], [example(number) for number in range(1000, 1100)]


class PictureTrainer(BaseTrainer):
    def build_model_assets(self):
        return {"words": ["end", "image", *sorted({*" ".join(QUESTIONS).split(), *COLOURS, *SHAPES})]}

    def build_data_transform(self):
        words, vision, prepare = self.model_assets["words"], self.arguments.vision, ImageProcessor(SIDE, SIDE)

        def transform(example):
            question = [words.index(word) for word in example["question"].split()]
            tokens = [vision.image_token] * vision.tokens_per_image + question + [words.index(example["answer"])]
            # The answer alone is a target.
            weight = np.eye(len(tokens), dtype=np.float32)[-1]
            return {"images": prepare(example["picture"])[None], "tokens": np.array(tokens, np.int32), "token_weight": weight}

        return transform

    def build_data_collate_info(self):
        length = self.arguments.data.sequence_length + 1
        return {"tokens": CollateInfo(length), "token_weight": CollateInfo(length)}

    def freeze_module(self):
        return ("^vision",)

    def build_param_groups(self):
        return [{"pattern": "^projector", "learning_rate": 1e-2, "weight_decay": 0.0}]
