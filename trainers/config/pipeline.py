"""What models and batches must be like whose layers are divided into the stages of a pipeline (`mesh.pipeline`). Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainers.config.model import PIPELINE, num_replicas
from trainers.config.section import Section, too_small

MICROBATCHES_PER_STAGE = 4
"""How many micro-batches there are at most for each stage, if nobody says how many: the stages then rest for less than a fifth of
the time, and each product still has many rows."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """How examples go through the stages of `mesh.pipeline`: as in GPipe (Huang et al., 2019)."""

    microbatches: int | None = None
    """Into how many parts the examples of a step (of one of `accumulation_steps`) are divided, which follow each other through
    the stages. With P stages and M parts the stages rest for (P - 1) / (M + P - 1) of the time. null: as many as divide them, up
    to 4 for each stage."""

    def __post_init__(self):
        for problem in too_small(self, 1, "microbatches"):
            raise ValueError(problem)


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


def resting(stages: int, count: int) -> float:
    """Returns the share of the time in which a stage has no micro-batch."""
    return (stages - 1) / (count + stages - 1)


def problems(arguments: Any, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields why the layers of a run cannot be divided into stages, or its examples into micro-batches. `arguments` is a
    `TrainingArguments`."""
    stages, asked = sizes.get(PIPELINE, 1), arguments.pipeline.microbatches
    if stages == 1:
        if asked is not None:
            yield f"pipeline.microbatches = {asked}: expected null with mesh.pipeline = 1, which has no stages"
        return
    if arguments.vision is not None:
        yield (
            f"mesh.pipeline = {stages}: the layers of an encoder (vision) are not divided into stages; use mesh.fsdp or "
            "mesh.tensor for these devices"
        )
    if arguments.lora is not None and arguments.lora.dropout:
        yield (
            f"lora.dropout = {arguments.lora.dropout}: expected 0 with mesh.pipeline = {stages}, where each micro-batch would "
            "drop the same values"
        )
    rows = rows_of_pipeline(sizes, arguments.micro_batch_size)
    if asked is not None and rows % asked:
        fits = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
        yield (
            f"pipeline.microbatches = {asked}: expected a divisor of {rows} ({fits}), the sequences of one pipeline: "
            f"global_batch_size {arguments.global_batch_size} / accumulation_steps {arguments.accumulation_steps}, divided over "
            f"{num_replicas(sizes) // stages} pipelines"
        )
