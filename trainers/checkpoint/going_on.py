"""Resuming from a checkpoint with changed settings: which settings differ, and what that means. Without JAX."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gangway.config.masking import masked
from gangway.storage.documents import StorageError
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from gangway.text import shortened
from trainers.checkpoint import layout, manifest
from trainers.config.arguments import TrainingArguments

HARMLESS, ROUNDING, ANOTHER = "harmless", "rounding", "another"
"""What a changed setting does to the training: nothing; nothing but rounding; it is no longer the same experiment."""
WORDS = {
    HARMLESS: "changed, and harmless",
    ROUNDING: "changed, the same up to rounding",
    ANOTHER: "changed, and no longer the same experiment",
}
EFFECTS = {
    **dict.fromkeys(("name", "storage", "time_limit", "kept_programs_gb", "gc_every_steps"), HARMLESS),
    **dict.fromkeys(("publish_every_steps", "publish_every_epochs"), HARMLESS),
    **dict.fromkeys(("recorders", "recorder_folders", "previews", "profile", "distributions", "metrics"), HARMLESS),
    **dict.fromkeys(("evaluation", "checkpoint", "snapshot", "anomalies.skip_before"), HARMLESS),
    **dict.fromkeys(("data.retries", "data.retry_backoff_s", "data.on_change"), HARMLESS),
    # The run goes on from its checkpoint: where it began no longer counts.
    **dict.fromkeys(("init_from", "model.pretrained"), HARMLESS),
    # The weights themselves are compared, wherever they are.
    "lora.base": HARMLESS,
    **dict.fromkeys(("mesh", "model.remat", "model.attention", "model.context_attention", "model.grouped_product"), ROUNDING),
    "optimizer.offload": ROUNDING,
    **dict.fromkeys(("lora.base_dtype", "frozen", "accumulation_steps", "hosts", "devices"), ROUNDING),
}
"""By the longest beginning of a key; all other settings make another experiment of the run."""
END = ("max_num_steps", "max_num_data_epochs")
"""They change nothing but the end of a run, unless its schedule follows them."""
PIECES = "pieces."
"""Keys of `trainers.library`. null stands for an object in memory, of which nothing is known: `fit` and `launch` of one training
differ in it."""
SHOWN = 8


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    now: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.now)}"


def newest(run_folder: str) -> tuple[Place, dict[str, Any]] | None:
    """Returns the newest whole checkpoint of a run that can be seen from here, and its meta; None if there is none."""
    try:
        folder = place_of(run_folder) / "checkpoints"
        for _, kept in sorted(layout.committed_in(folder).items(), reverse=True):
            if layout.is_whole(checkpoint := folder / kept.folder):
                return checkpoint, manifest.read_meta(checkpoint)
    except (OSError, StorageError, manifest.DamagedError):
        return None  # the hosts look again, and say what is wrong
    return None


def changes(meta: Mapping[str, Any], arguments: TrainingArguments, num_devices: int | None = None) -> list[Change]:
    """Returns each setting that differs from those of a checkpoint with this meta. `num_devices`: those that will train; None:
    not known."""
    # As JSON has them: a tuple has become a list there.
    now = dict(_flat(json.loads(json.dumps(masked(asdict(arguments))))))
    before = dict(_flat(meta["arguments"]))
    # A key that only one side has is of another version of the program, or of another class of arguments.
    found = [
        Change(key, before[key], now[key], _effect(key, arguments))
        for key in now
        if key in before and before[key] != now[key] and not (key.startswith(PIECES) and None in (before[key], now[key]))
    ]
    segments = meta.get("lineage") or [{}]
    trained_on = segments[-1].get("num_devices")
    if num_devices is not None and trained_on is not None and trained_on != num_devices:
        found.append(Change("devices", trained_on, num_devices, ROUNDING))
    return found


def of_the_step(arguments: TrainingArguments) -> dict[str, Any]:
    """Returns the settings that a train step may be made from, by their keys: all but those that are harmless, and the ends."""
    settings = dict(_flat(json.loads(json.dumps(masked(asdict(arguments))))))
    return {key: value for key, value in settings.items() if key not in END and _effect(key, arguments) != HARMLESS}


def notes(step: int, found: Iterable[Change]) -> list[str]:
    """Returns lines for a user: where the run goes on, and a line for each kind of change, the gravest last."""
    lines = [f"goes on from step {step}"]
    for effect, words in WORDS.items():
        of_kind = [change for change in found if change.effect == effect]
        if of_kind:
            more = [f"and {len(of_kind) - SHOWN} more"] if len(of_kind) > SHOWN else []
            lines.append(f"{words}: {'; '.join([*map(str, of_kind[:SHOWN]), *more])}")
    if any(change.effect == ANOTHER for change in found):
        lines[-1] += " (to begin a run of its own with them: another name, and init_from for the weights of this one)"
    return lines


def of_run(found: tuple[Place, dict[str, Any]] | None, arguments: TrainingArguments) -> list[str]:
    """Returns what to tell about a run that has what `newest` found; nothing if it begins."""
    if found is None:
        return []
    return notes(found[1]["batch_index"], changes(found[1], arguments))


def _effect(key: str, arguments: TrainingArguments) -> str:
    if key in END:
        schedule = arguments.optimizer.schedule
        follows = schedule.name != "constant" and schedule.decay_steps is None
        return ANOTHER if follows or schedule.warmup_ratio is not None else HARMLESS
    parts = key.split(".")
    beginnings = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((EFFECTS[beginning] for beginning in beginnings if beginning in EFFECTS), ANOTHER)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return shortened(text)
