"""Supervised fine-tuning on prompts and completions: the loss counts the completion only."""

import numpy as np

from trainers.base import BaseTrainer
from trainers.data.collate import CollateInfo


def sums(arguments):
    numbers = np.random.default_rng(0).permutation(10_000)[:2048]
    rows = [{"prompt": f"{n // 100} + {n % 100} = ", "completion": f"{n // 100 + n % 100}."} for n in numbers]
    return rows[:-128], rows[-128:]  # training data, held-out data


class SFTTrainer(BaseTrainer):
    def build_data_transform(self):
        encode = self.task.encode

        def with_weights(row):
            prompt, completion = encode(row["prompt"]), encode(row["completion"])
            return {
                "tokens": np.array(prompt + completion, np.int32),
                "token_weight": np.array([0] * len(prompt) + [1] * len(completion), np.float32),
            }

        return with_weights

    def build_data_collate_info(self):
        length = self.arguments.data.sequence_length + 1  # the last token is only a target
        return {"tokens": CollateInfo(length), "token_weight": CollateInfo(length)}
