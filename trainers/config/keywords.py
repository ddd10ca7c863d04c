"""The keys of a configuration as keywords of a call, and the arguments of a training that is put together of a model, a loss and
data (`trainers.library`). Free of JAX."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from gangway.config import near_keys
from gangway.config.conversion import CheckedSection
from gangway.config.section import PATH, did_you_mean, not_paths
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments

INSTEAD = {
    **dict.fromkeys(("name", "storage"), "run_dir=FOLDER"),
    **dict.fromkeys(("task", "pieces", "arguments"), "model and loss"),
    **dict.fromkeys(ORCHESTRATOR_SECTIONS, "launch(training, hosts=...)"),
}
"""Keys of a configuration that this has another form for."""

NO_END = "nothing ends this training: give steps or epochs"
WORDS = {"global_batch_size": "batch_size", "max_num_steps": "steps", "max_num_data_epochs": "epochs"}
"""Keys that have another name in the call."""
PHRASES = {
    **WORDS,
    "the examples of data.dataset": "the examples",
    "data.dataset": "data",
    "dataset_eval": "eval_data",
    "optimizer.name": "optimizer",
    "the loss of PiecesTask": "the loss",
    "give dataset_train, or override configure_dataloaders": "give data",
    "; configure_dataloaders may return an iterable of batches in its place": "",
    " in build_data_transform": "",
}
"""What texts for users of a configuration, or of a trainer of their own, say otherwise than those for a call."""


def unknown(name: str, own: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with the name of a setting, a key such as `seed` or `data.shuffle`. `own` are the names that the
    program has beside the keys."""
    hints = get_type_hints(PiecesArguments)
    known = [each for each in (*hints, *own) if each not in INSTEAD]
    top = name.partition(".")[0]
    if top in INSTEAD:
        yield f"{name}: give {INSTEAD[top]} instead"
    elif top not in known:
        inside = [section for section, hint in hints.items() if name in fields(hint)]
        hint = "".join(f"; it is a key of {section}: {section}={{{name!r}: ...}}" for section in inside)
        keys = [WORDS.get(key, key) for key in near_keys.OF_OTHERS.get(name, ()) if key.partition(".")[0] in known]
        hint = hint or (f"; {near_keys.did_you_mean(keys)}" if keys else did_you_mean(name, known))
        yield f"{name}: there is no such setting{hint}"


def as_given(problem: str) -> str:
    """Returns a problem of a configuration in the words of the call."""
    if problem.startswith("nothing ends this run"):
        return NO_END
    phrases = "|".join(map(re.escape, PHRASES))
    return re.sub(rf"(?:(?<![\w.])|(?=\W))({phrases})(?!\w|\.\w)", lambda found: PHRASES[found[0]], problem)


def fields(hint: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(hint)} if dataclasses.is_dataclass(hint) else set()


def put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets the value at `path`. A section is added to the one that is there."""
    *sections, name = path
    for section in sections:
        settings = settings.setdefault(section, {})
    before = settings.get(name)
    settings[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value


def plain(value: Any) -> Any:
    """Returns a section of a configuration, which may be an object, as data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class PiecesConfig(CheckedSection):
    """The pieces by name. null: an object of the process that trains, which no other process can import."""

    model: str | None = None
    """`package.module:Name`: a class of Flax NNX modules, or a function that returns one. It may take `rngs`."""
    loss: str | None = None
    """`package.module:function` (model, batch) -> the loss of each example, as a task's loss returns it."""
    data: str | None = None
    """`package.module:function` () -> the training data, or a folder with a file `NAME.npy` for each column."""
    eval_data: str | None = None
    """The same for the held-out data; null: there is none."""
    callbacks: tuple[str, ...] = ()
    """`package.module:Name` each: a class of callbacks, or a function () that returns one."""

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, *(name for name in ("model", "loss") if getattr(self, name) is not None))
        for name in self.callbacks:
            if not PATH.fullmatch(name):
                yield f"callbacks: {name!r}: expected package.module:Name"


@dataclass(frozen=True, kw_only=True)
class PiecesArguments(TrainingArguments):
    pieces: PiecesConfig = field(default_factory=PiecesConfig)
