"""What `mlflow.pyfunc.load_model` loads of a model that Gangway has exported or registered: texts in, texts or labels out.

Needs no MLflow, and nothing of a cluster. Dimensions: B texts, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gangway import user_modules
from gangway.errors import UsageError
from trainers.checkpoint.export import from_safetensors
from trainers.checkpoint.mlflow_model import CLASSIFIER_FILE, PARAMS
from trainers.commands import generate
from trainers.config import PreviewConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.hf_files import has_tokenizer
from trainers.data.padded import padded
from trainers.data.sources.classification import LabelledEncoder
from trainers.step.loss import in_mode
from trainers.step.state import abstract_model
from trainers.tasks.classification import ClassificationTask
from trainers.text import tokenizers

ROWS = 16
"""The texts at once."""


def _load_pyfunc(path: str) -> LanguageModel | Classifier:
    """Returns what predicts with the model in this folder: the name and the argument are MLflow's."""
    with user_modules.named_by_data(path):  # whoever registered the model has written what it names
        return Classifier(Path(path)) if Path(path, CLASSIFIER_FILE).is_file() else LanguageModel(path)


class LanguageModel:
    """Continues texts."""

    def __init__(self, folder: str):
        self._opened = generate.open_model(folder)

    @cached_property
    def _generator(self) -> Any:
        return generate.load(self._opened, PreviewConfig(prompts=()), Namespace(stop=(), seed=0, chat=False), ROWS)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """Returns the continuation of each text, without the text. `model_input` is a text, several, or a table with one column;
        `params` may have those of `trainers.checkpoint.mlflow_model.PARAMS`: `temperature` 0 takes the likeliest token, `top_k` 0
        and `top_p` 1 leave none out, and `stop` is a text that ends a continuation. Raises UsageError for other input."""
        texts, asked = texts_of(model_input), asked_for(params)
        if not texts:
            return []
        options = Namespace(chat=False, system=None, max_new_tokens=asked["max_new_tokens"])
        prompts = [generate.encoded(self._opened, text, options) for text in texts]
        draws = asked["temperature"] > 0
        sampling = PreviewConfig(
            prompts=(),
            num_tokens=asked["max_new_tokens"],
            temperature=asked["temperature"],
            top_k=asked["top_k"] or None if draws else None,
            top_p=asked["top_p"] if draws and asked["top_p"] < 1 else None,
        )
        changes = {"sampling": sampling, "seed": asked["seed"], "stop": tuple(filter(None, [asked["stop"]]))}
        generator = dataclasses.replace(self._generator, rows=min(ROWS, len(texts)), **changes)
        return [found.text for found in generator.all(prompts)]


class Classifier:
    """Tells the classes of texts."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        path = folder / CLASSIFIER_FILE
        with safe_open(path, "np") as file:
            recorded = json.loads(file.metadata()["arguments"])
        known = {item.name for item in dataclasses.fields(TrainingArguments)}
        arguments = from_dict(TrainingArguments, {name: value for name, value in recorded.items() if name in known})
        if has_tokenizer(kept := path.with_suffix(".assets")):
            arguments = dataclasses.replace(arguments, data=dataclasses.replace(arguments.data, tokenizer=str(kept)))
        self._data, self._labels = arguments.data, arguments.classification.labels
        self._encoder = LabelledEncoder(tokenizers.of(arguments))
        task = ClassificationTask(arguments)
        parts, *_ = abstract_model(task, arguments.seed)
        self._params = from_safetensors(path)
        self._logits = jax.jit(
            lambda params, batch: task.predictions(in_mode(parts.merge(params), training=False), batch)["logits"]
        )

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """Returns the label of each text: a name of `classification.labels`. `model_input` is a text, several, or a table with
        one column. A text is cut as in training (`data.truncation`). Raises UsageError for other input."""
        if params:
            raise UsageError(f"params = {dict(params)}: a classifier has none; leave them out")
        labels: list[str] = []
        texts = texts_of(model_input)
        for start in range(0, len(texts), ROWS):
            some = texts[start : start + ROWS]
            rows = [self._row(text) for text in (*some, *[some[0]] * (ROWS - len(some)))]  # one shape: compiled once
            batch = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "token_weight")}
            best = np.asarray(self._logits(self._params, batch)).argmax(-1)
            labels += [self._labels[number] for number in best[: len(some)]]
        return labels

    def _row(self, text: str) -> Mapping[str, np.ndarray]:
        (document,) = self._encoder.encode([{"text": text}])
        return padded(document, self._data.sequence_length, self._data.truncation)


def texts_of(given: Any) -> list[str]:
    """Returns the texts in what MLflow hands on: a text, a list, an array, or a table of pandas with one column. Raises
    UsageError that names what else was found."""
    if isinstance(given, str):
        return [given]
    columns = list(getattr(given, "columns", ()))
    if len(columns) > 1:
        raise UsageError(f"the input has the columns {', '.join(map(repr, columns))}: expected one, with texts")
    found = given[columns[0]] if columns else given
    texts = found.tolist() if hasattr(found, "tolist") else list(found)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(f"text {number} of the input is {text!r}: expected a text")
    return texts


def asked_for(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns all of `PARAMS`, with those that are given. Raises UsageError for one that is none."""
    given = dict(params or {})
    if unknown := [name for name in given if name not in PARAMS]:
        raise UsageError(f"params[{unknown[0]!r}] = {given[unknown[0]]!r}: expected one of {', '.join(PARAMS)}")
    return {name: type(default)(given.get(name, default)) for name, (_, default) in PARAMS.items()}
