"""The page of what may be imported: the names that users' code reaches, each with its signature and its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from gangway.config.section import Section
from gangway.user_modules import load_object
from tests.pages.docstrings import of_fields, paragraphs

HEAD = """# Python API

What your own code may import. [The library](library.md) shows training from Python, [your own parts](extending.md) the
classes that a configuration names, and [the contract](contract.md) what a trainer must have. `make files` writes this page.
"""


class Part(NamedTuple):
    title: str
    names: tuple[str, ...]
    """`module:Name` each."""


PARTS = (
    Part(
        "Training from Python",
        (
            *("gangway:Training", "gangway:Result", "gangway:launch", "gangway:LaunchError"),
            *("gangway:read", "gangway:TrainingArguments", "gangway:UsageError"),
        ),
    ),
    Part(
        "Trainers",
        (
            *("trainers.base:BaseTrainer", "trainers.protocol:TrainerProtocol", "trainers.protocol:TrainerOutput"),
            *("trainers.protocol:StopReason", "trainers.protocol:CheckpointManagerProtocol", "trainers.loop.hooks:Hooks"),
            "trainers.step.rng:key",
        ),
    ),
    Part(
        "Tasks, losses and metrics",
        (
            *("trainers.protocol:Task", "trainers.protocol:PerExample", "trainers.protocol:Loss"),
            *("trainers.protocol:Sum", "trainers.protocol:Max", "trainers.protocol:Min", "trainers.protocol:Last"),
            *("trainers.protocol:EvaluationMetrics", "trainers.protocol:Pruner", "trainers.tasks.causal_lm:CausalLMTask"),
            *("trainers.tasks.classification:ClassificationTask", "trainers.tasks.preference:PreferenceTask"),
            *("trainers.tasks.reward:RewardTask", "trainers.tasks.distillation:DistillationTask"),
        ),
    ),
    Part(
        "Models",
        (
            *("trainers.models.adapters:from_linen", "trainers.models.adapters:from_functions"),
            *("trainers.models.decoder:Decoder", "trainers.models.attention_kernels:Kernel"),
            "trainers.step.state:initial_parameters",
        ),
    ),
    Part(
        "Data",
        (
            *("trainers.data.collate:CollateInfo", "trainers.data.images:ImageProcessor"),
            *("trainers.data.loader:StepAddressedLoader", "trainers.data.sources.preference:pairs"),
            *("trainers.data.sources.iterable:IterableSource", "trainers.data.prepared:PreparedDocuments"),
        ),
    ),
    Part(
        "Configuration of your own",
        ("gangway.config.section:Section", "gangway.config.section:require"),
    ),
    Part(
        "Callbacks and recorders",
        (
            *("trainers.callbacks:Callback", "trainers.callbacks:RunInfo"),
            *("trainers.callbacks.hugging_face:HuggingFaceExport", "trainers.callbacks.profiler:Profiler"),
            *("trainers.recorders.recorder:Recorder", "trainers.recorders.recorder:About"),
        ),
    ),
    Part(
        "In a training process",
        ("trainers.runtime:current", "trainers.runtime:Runtime", "trainers.runtime:multihost", "trainers.text:tokenizers"),
    ),
)
"""In the order in which they are needed. A test asks for each name that a document or an example imports."""


def page() -> str:
    return "\n".join([HEAD, *(f"## {part.title}\n\n{''.join(map(entry, part.names))}" for part in PARTS)]).rstrip("\n") + "\n"


def entry(path: str) -> str:
    thing, (module, _, name) = load_object(path), path.partition(":")
    shown = f"`{name}{signature(thing)}`" if callable(thing) else ""
    parts = (f"### `{name}`", f"`from {module} import {name}`", shown, paragraphs(thing), "\n".join(members(thing)))
    return "\n\n".join(part for part in parts if part) + "\n\n"


def signature(thing: Any) -> str:
    """Returns the parameters, without their types, whose text differs from one Python to another."""
    if inspect.isclass(thing) and issubclass(thing, Enum | Exception | Section):  # the keys of a section have a page
        return ""
    given = inspect.signature(thing)
    if [each.kind.name for each in given.parameters.values()] == ["VAR_POSITIONAL", "VAR_KEYWORD"]:  # of a protocol
        return ""
    parameters = [each.replace(annotation=each.empty) for each in given.parameters.values()]
    return str(given.replace(parameters=parameters, return_annotation=given.empty))


def members(thing: Any) -> Iterator[str]:
    """Yields a line for each field, and for each public method and property that says something of itself."""
    if inspect.ismodule(thing):
        own = (member for member in vars(thing).values() if getattr(member, "__module__", None) == thing.__name__)
        yield from (line(each.__name__ + signature(each), each) for each in own if not each.__name__.startswith("_"))
    if not inspect.isclass(thing):
        return
    if issubclass(thing, Enum):
        yield from (f"- `{each.name}`" for each in thing)
    if issubclass(thing, Section):
        yield "Its fields are the [keys of a configuration](keys.md)."
        yield ""
    else:
        yield from (f"- `{name}`: {text}" for name, text in of_fields(thing).items() if not name.startswith("_"))
    for name, member in thing.__dict__.items():
        kind = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(kind):
            continue
        shown = (
            name if isinstance(member, property) else f"{name}{signature(kind)}".replace("(self, ", "(").replace("(self)", "()")
        )
        yield line(shown, kind)


def line(shown: str, thing: Any) -> str:
    said = paragraphs(thing).partition("\n\n")[0]
    return f"- `{shown}`" + (f": {said}" if said else "")
