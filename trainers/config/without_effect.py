"""Settings that change nothing: those that other settings or the task leave without a use, and those that nobody has read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gangway.config.section import default_of
from trainers.config.arguments import TrainingArguments

READ_BY_TASK_OR_DATA = {
    "model": None,
    "vision": None,
    "loss": None,
    "preference": None,
    "classification": None,
    "distillation": None,
    "data": (
        *("paths", "pattern", "format", "encoding", "columns", "examples", "on_malformed", "prepared"),
        *("sequence_length", "eval_fraction", "truncation", "packing"),
    ),
}
"""Sections, and their fields (None: all), that only the task, the data or the trainer's own methods read: whether they do is seen
by watching."""


BY_MAGNITUDE = ("final_sparsity", "begin_step", "end_step", "every_steps")
"""The settings of pruning that a pruner of one's own may read, too, but need not."""


@dataclass(frozen=True)
class Rule:
    section: str
    fields: Collection[str] | None
    """None: all of the section."""
    unused: Callable[[TrainingArguments], bool]
    why: str


RULES = (
    Rule(
        "previews",
        ("every_steps", "num_tokens", "greedy", "temperature", "top_k", "top_p"),
        lambda arguments: not arguments.previews.prompts,
        "there are no previews.prompts",
    ),
    Rule(
        "previews",
        ("temperature", "top_k", "top_p"),
        lambda arguments: arguments.previews.greedy,
        "previews.greedy takes the likeliest token",
    ),
    Rule(
        "previews",
        ("top_k", "top_p"),
        lambda arguments: not arguments.previews.greedy and arguments.previews.temperature == 0,
        "previews.temperature = 0 takes the likeliest token",
    ),
    Rule(
        "evaluation",
        ("after_step", "after_epochs"),
        lambda arguments: not arguments.evaluation.scheduled,
        "nothing calls for evaluations before the end; set evaluation.every_steps or every_epochs",
    ),
    Rule(
        "evaluation",
        ("score",),
        lambda arguments: not arguments.evaluation.scheduled and not arguments.evaluation.at_start,
        "the only evaluation is the one at the end, so nothing is compared; set evaluation.every_steps or every_epochs",
    ),
    Rule(
        "checkpoint",
        ("save_after_step", "save_after_epochs"),
        lambda arguments: arguments.checkpoint.save_steps is None and arguments.checkpoint.save_epochs is None,
        "it is about checkpoint.save_steps and save_epochs, and neither is set",
    ),
    Rule(
        "optimizer",
        ("master_weights",),
        # A task of one's own may have a model of other types.
        lambda arguments: arguments.param_dtype == "float32" and arguments.task.startswith("trainers."),
        "the parameters are float32, and lose no updates",
    ),
    Rule("loss_scale", None, lambda arguments: arguments.dtype != "float16", "only dtype float16 scales the loss"),
    Rule(
        "pruning",
        BY_MAGNITUDE,
        lambda arguments: arguments.pruning.pattern is None and arguments.pruning.pruner is None,
        "no pruning.pattern says what to prune",
    ),
    Rule(
        "distributions",
        None,
        lambda arguments: arguments.distributions.pattern is None,
        "no distributions.pattern says of which parameters",
    ),
    Rule(
        "profile",
        ("skip_steps", "wait_steps", "repeat"),
        lambda arguments: arguments.profile.record_steps is None,
        "no profile.record_steps says how many steps to record",
    ),
    Rule(
        "anomalies",
        ("spike_zscore", "spike_warmup_steps"),
        lambda arguments: arguments.anomalies.loss_spike == "off",
        "anomalies.loss_spike is off",
    ),
    Rule(
        "anomalies",
        ("skip_before",),
        lambda arguments: "rollback" not in (arguments.anomalies.loss_spike, arguments.anomalies.non_finite),
        "no anomaly is answered by a rollback",
    ),
    Rule(
        "data",
        ("overlong",),
        lambda arguments: arguments.data.packing != "fit" and not (arguments.data.mixture and arguments.data.packing is None),
        "it is about packing fit, and about a mixture whose documents have a row each",
    ),
    Rule("data", ("retry_backoff_s",), lambda arguments: arguments.data.retries == 0, "data.retries is 0"),
)
"""Settings that others leave without a use. What a value alone shows to be wrong is an error of its section."""


def by_rules(arguments: TrainingArguments) -> Iterator[str]:
    """Yields a line for each setting that another setting leaves without a use. Values that are the defaults are not listed."""
    listed = set()
    for rule in RULES:
        if rule.unused(arguments):
            for name in changed(arguments, rule.section, rule.fields):
                if (rule.section, name) not in listed:
                    listed.add((rule.section, name))
                    yield line(arguments, rule.section, name, rule.why)


def of_previews(arguments: TrainingArguments, task: Any) -> Iterator[str]:
    """Yields the lines of the settings of previews, for a task that cannot generate. `prompts: []` asks for none."""
    if not (hasattr(task, "encode") and hasattr(task, "decode")) and arguments.previews.prompts:
        for name in changed(arguments, "previews", None):
            yield line(arguments, "previews", name, f"{type(task).__name__} generates nothing: it has no encode and decode")


def unread(arguments: TrainingArguments, read: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yields the lines of the settings that nothing has read. `read`: the names by section, as `watched` gives them."""
    for section, fields in READ_BY_TASK_OR_DATA.items():
        if section not in read:
            continue  # the run has none
        for name in changed(arguments, section, fields):
            if name not in read[section]:
                why = f"neither task {arguments.task} nor data.dataset {arguments.data.dataset} has read it"
                yield line(arguments, section, name, why)


def line(arguments: TrainingArguments, section: str, name: str, why: str) -> str:
    value = getattr(getattr(arguments, section), name)
    # A section in a section, and what is too long for a line, go without the value.
    shown = "" if dataclasses.is_dataclass(value) or len(repr(value)) > 40 else f" = {value!r}"
    return f"{section}.{name}{shown} has no effect: {why}"


def changed(arguments: TrainingArguments, section: str, names: Collection[str] | None) -> list[str]:
    """Returns the fields of a section (`names` of them; None: all) whose values are not the defaults."""
    config = getattr(arguments, section)
    return [
        item.name
        for item in dataclasses.fields(config)
        if (names is None or item.name in names) and getattr(config, item.name) != default_of(item)
    ]


@contextlib.contextmanager
def watched(arguments: TrainingArguments) -> Iterator[dict[str, set[str]]]:
    """Yields the names of the fields of READ_BY_TASK_OR_DATA that are read from `arguments` inside, by section. For one thread
    and one process that ends soon: meanwhile reading from all sections of these classes is slower."""
    present = (section for section in READ_BY_TASK_OR_DATA if getattr(arguments, section) is not None)
    read: dict[str, set[str]] = {section: set() for section in present}
    of = {id(getattr(arguments, section)): names for section, names in read.items()}
    classes = {type(getattr(arguments, section)) for section in read}

    def reading(config: Any, name: str) -> Any:
        if (names := of.get(id(config))) is not None:
            names.add(name)
        return object.__getattribute__(config, name)

    # On the classes: an object of a class of its own would equal no section any more.
    for cls in classes:
        cls.__getattribute__ = reading  # type: ignore[method-assign,assignment]
    try:
        yield read
    finally:
        for cls in classes:
            del cls.__getattribute__
