"""Files of pairs, and of texts with labels, that are short and of different lengths: every fifth chosen completion is longer, and
every fourth prompt is empty."""

from __future__ import annotations

import json

import numpy as np

LABELS = ("low", "middle", "high")


def pairs(num_records: int, seed: int, longest: int = 12) -> list[dict]:
    numbers = np.random.default_rng(seed)

    def text(first: int) -> str:
        return "".join(chr(97 + number) for number in numbers.integers(0, 20, numbers.integers(first, longest)))

    return [
        {
            "prompt": f"{number}{text(0)}" if number % 4 else "",
            "chosen": text(2) * (4 if number % 5 == 4 else 1) + "y",
            "rejected": text(2) + "n",
        }
        | {"ref_chosen_logps": -1.0 - number % 7, "ref_rejected_logps": -0.5 - number % 5}
        for number in range(num_records)
    ]


def labelled(num_records: int, seed: int) -> list[dict]:
    return [
        {"text": pair["rejected"][2:], "label": LABELS[number % 3]}
        for number, pair in enumerate(pairs(num_records, seed, longest=9))
    ]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
