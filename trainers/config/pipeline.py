"""What models and batches must be like whose layers are divided into the stages of a pipeline (`mesh.pipeline`). Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gangway.config.section import Section, require_none, too_small
from trainers.config.mesh import PIPELINE, nearest_multiples, num_replicas

MICROBATCHES_PER_STAGE = 4
"""How many micro-batches there are at most for each stage, if nobody says how many: the stages then rest for less than a fifth of
the time, and each product still has many rows."""
REPEATS = 2
"""How often each micro-batch goes round the stages with the interleaved schedule, if nobody says how often."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """How examples go through the stages of `mesh.pipeline`."""

    schedule: Literal["gpipe", "interleaved"] = "gpipe"
    """`gpipe`: each stage has layers that follow each other, and each micro-batch goes through the stages once (Huang et al.,
    2019). `interleaved`: each stage has several groups of layers that do not follow each other, and each micro-batch goes round
    the stages as often (Narayanan et al., 2021, section 2.2; a circular pipeline). The stages rest for less of the time, and
    weights are exchanged between them in each step. Evaluations go by `gpipe`."""

    microbatches: int | None = None
    """Into how many parts the examples of a step (of one of `accumulation_steps`) are divided, which follow each other through
    the stages. With P stages and M parts the stages rest for (P - 1) / (M + P - 1) of the time. null: as many as divide them, up
    to 4 for each stage. With the interleaved schedule there are at least as many as stages."""
    repeats: int | None = None
    """How often each micro-batch goes round the stages with the interleaved schedule: so many groups of layers has each stage.
    With R repeats the stages rest for (P - 1) / (M R + P - 1) of the time. null: 2 (1 with `gpipe`)."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "microbatches")
        if self.schedule == "gpipe" and self.repeats is not None:
            yield f"repeats = {self.repeats}: expected null with schedule = gpipe, which has none; set schedule to interleaved"
        elif self.repeats is not None and self.repeats < 2:
            yield f"repeats = {self.repeats}: expected at least 2; set schedule to gpipe for 1"

    @property
    def num_repeats(self) -> int:
        """How often each micro-batch goes through all stages."""
        return 1 if self.schedule == "gpipe" else self.repeats or REPEATS


def rows_of_pipeline(sizes: Mapping[str, int], rows: int) -> int:
    """Returns how many of `rows` examples go through one pipeline on a mesh with these axis sizes, which all replicas of it
    share. Each replica has at least one, and all have as many: missing ones are padded."""
    replicas = num_replicas(sizes)
    return -(-rows // replicas) * sizes.get(PIPELINE, 1)


def microbatches(stages: int, rows: int, asked: int | None = None) -> int:
    """Returns how many micro-batches `rows` examples of one pipeline are divided into: as many as were asked for, if that divides
    them, which it need not in an evaluation."""
    if asked is not None and rows % asked == 0:
        return asked
    return max(number for number in range(1, MICROBATCHES_PER_STAGE * stages + 1) if rows % number == 0)


def num_turns(stages: int, count: int, repeats: int) -> int:
    """Returns how many turns `count` micro-batches take."""
    return count * repeats + stages - 1


def resting(stages: int, count: int, repeats: int) -> float:
    """Returns the share of the time in which a stage has no micro-batch."""
    return (stages - 1) / num_turns(stages, count, repeats)


def problems(arguments: Any, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields why the layers of a run cannot be divided into stages, or its examples into micro-batches. `arguments` is a
    `TrainingArguments`."""
    stages, asked = sizes.get(PIPELINE, 1), arguments.pipeline.microbatches
    if stages == 1:
        yield from _problems_without_stages(arguments.pipeline)
        return
    if arguments.vision is not None:
        yield (
            f"mesh.pipeline = {stages}: the layers of an encoder (vision) are not divided into stages; use mesh.fsdp or "
            "mesh.tensor for these devices"
        )
    if arguments.optimizer.offload == "host":
        yield (
            f"optimizer.offload = 'host': expected none with mesh.pipeline = {stages}, where each device has other layers: "
            "no loop brings their moments one by one; mesh.fsdp divides them, too"
        )
    if arguments.lora is not None and arguments.lora.dropout:
        yield (
            f"lora.dropout = {arguments.lora.dropout}: expected 0 with mesh.pipeline = {stages}, where each micro-batch would "
            "drop the same values"
        )
    if arguments.model.pretrained is None and arguments.pipeline.num_repeats > 1:
        yield from _problems_of_groups(arguments.model.num_layers, stages, arguments.pipeline.num_repeats)
    rows = rows_of_pipeline(sizes, arguments.micro_batch_size)
    fits = [number for number in range(1, rows + 1) if rows % number == 0]
    if asked is not None and rows % asked:
        yield (
            f"pipeline.microbatches = {asked}: expected a divisor of {rows} ({_listed(fits)}), the sequences of one pipeline: "
            f"global_batch_size {arguments.global_batch_size} / accumulation_steps {arguments.accumulation_steps}, divided over "
            f"{num_replicas(sizes) // stages} pipelines"
        )
    elif asked is not None and arguments.pipeline.num_repeats > 1 and asked < stages:
        enough = [number for number in fits if number >= stages]
        yield (
            f"pipeline.microbatches = {asked}: expected at least {stages}, the stages, with pipeline.schedule = interleaved: the "
            f"first stage goes on with what the last one has sent; of {rows} sequences of one pipeline the nearest numbers that "
            f"fit are {_listed(enough[:2])}"
        )


def _problems_without_stages(config: PipelineConfig) -> Iterator[str]:
    if config.microbatches is not None:
        yield f"pipeline.microbatches = {config.microbatches}: expected null with mesh.pipeline = 1, which has no stages"
    if config.schedule != "gpipe":
        yield f"pipeline.schedule = {config.schedule}: expected gpipe with mesh.pipeline = 1, which has no stages"


def _problems_of_groups(layers: int, stages: int, repeats: int) -> Iterator[str]:
    divisors = [number for number in range(1, layers + 1) if layers % number == 0]
    groups = stages * repeats
    if layers % groups:
        of_stages = [number for number in divisors if number > 1 and layers % (number * repeats) == 0]
        of_repeats = [number // stages for number in divisors if number > stages and number % stages == 0]
        yield (
            f"pipeline.repeats = {repeats}: {layers} layers are not {groups} equal groups, {repeats} for each stage; "
            f"the nearest numbers that fit are {_listed(nearest_multiples(layers, groups))} (model.num_layers), "
            f"{_listed(_nearest(of_stages, stages)) or 'none'} (mesh.pipeline), and "
            f"{_listed(_nearest(of_repeats, repeats)) or 'none'} (pipeline.repeats)"
        )


def _nearest(numbers: Sequence[int], asked: int) -> list[int]:
    return sorted(sorted(numbers, key=lambda number: abs(number - asked))[:2])


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
