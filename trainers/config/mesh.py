"""The sections `mesh` and `pipeline`: the axes, what the devices along an axis share in equal parts, the sizes that fit, and what
models and batches must be like whose layers are divided into stages. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from gangway.config.conversion import CheckedSection
from gangway.config.section import Section, require, too_small
from trainers.config import attention

SLICE = "slice"
"""The mesh axis over the slices, between which the network is slower. A mesh has it only if it is more than 1."""
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes over which examples are divided: each coordinate on them, and on those of the slices and of the pipeline, is one
replica."""
PIPELINE = "pipeline"
"""The mesh axis over which the layers of a model are divided: each coordinate is a stage. A mesh has it only if it is more than
1."""
TENSOR = "tensor"
CONTEXT = "context"
"""The mesh axis over which the tokens of each sequence are divided. A mesh has it only if it is more than 1."""


OPTIONAL = (SLICE, PIPELINE, CONTEXT)
"""Axes that a mesh has only if they are more than 1."""


def num_replicas(sizes: Mapping[str, int]) -> int:
    """Returns how many replicas share the examples on a mesh with these axis sizes."""
    return math.prod(sizes[axis] for axis in batch_axes(sizes))


def batch_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes over which a mesh with these axis sizes divides examples: the slices first, and last the stages of the
    pipeline, which pass the examples of all of them on to each other."""
    return tuple(axis for axis in (SLICE, *BATCH_AXES, PIPELINE) if axis in sizes or axis in BATCH_AXES)


def stage_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes over which the examples within one stage are divided: `batch_axes` without that of the stages."""
    return tuple(axis for axis in batch_axes(sizes) if axis != PIPELINE)


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """The sizes of the mesh axes over all devices of the run. One of them may be -1: it takes what is left."""

    slice: int = 1
    """How many slices the mesh spans: those of TPUs, elsewhere groups of hosts (of one host: of its devices). The network between
    them is slower. Each slice has all parameters (or their shares on the other axes), and its share of the examples."""
    pipeline: int = 1
    """How many stages the layers are divided into. Each stage has its layers alone, and passes what it makes of a few examples
    (`pipeline.microbatches`) on to the next one. All stages work at once, but for the beginning and the end of a step."""
    data: int = -1
    """Each coordinate has all parameters (or its share on the other axes), and its share of the examples."""
    fsdp: int = 1
    """Parameters, gradients and the optimizer's state are divided over this axis, and so are the examples."""
    expert: int = 1
    """The experts of a mixture are divided over this axis, and so are the examples."""
    context: int = 1
    """The tokens of each sequence are divided over this axis, and so are the parameters, as over `fsdp`."""
    tensor: int = 1
    """The matrices of each layer are divided over this axis: heads, the channels of the MLP, the vocabulary."""

    def __post_init__(self):
        sizes = asdict(self)
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh axis {name} = {size}: expected a positive size, or -1 for what is left")
        require(list(sizes.values()).count(-1) <= 1, f"mesh {sizes}: at most one axis may be -1")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Returns the axis sizes for `num_devices` devices, those of `slice`, `pipeline` and `context` only if they are more than
        1. Raises ValueError if they do not multiply to it."""
        sizes = asdict(self)
        fixed = 1
        for size in sizes.values():
            fixed *= size if size != -1 else 1
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if name not in OPTIONAL or size != 1)
        if num_devices % fixed or (-1 not in sizes.values() and fixed != num_devices):
            fits = ", ".join(sizes_that_fit({name: size for name, size in sizes.items() if size != 1}, num_devices))
            raise ValueError(
                f"mesh {shown} does not fit {num_devices} devices: the sizes must multiply to {num_devices}"
                f"{f'; what would fit: {fits}' if fits else ''}; set one axis to -1 to let it take what is left"
            )
        found = {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}
        # Programs of meshes without these axes are those of before there were any.
        return {name: size for name, size in found.items() if name not in OPTIONAL or size > 1}


CHUNKS = 2
"""Of a sequence, for each device of `mesh.context`: an early one and a late one."""
OWN_TASKS = "trainers.tasks."
"""Tasks whose models are those of the sections `model` and `vision`. Any other one's model is asked when it is built."""


class Shared(NamedTuple):
    axis: str
    name: str
    """What is shared, such as `model.num_heads`."""
    number: int
    parts: int = 1
    """How many equal parts each device has."""
    may_change: bool = False
    """Whether another number is as good, and not another model."""
    may_be_common: bool = False
    """Whether devices may have some of it in common: then it is told, and not refused."""


def of_arguments(arguments: Any, sizes: Mapping[str, int]) -> Iterator[Shared]:
    """Yields what a run shares on a mesh with these sizes of its axes, as far as its configuration tells. `arguments` is a
    `TrainingArguments`, of which nothing is read that no axis divides: a key that nobody reads has no effect, and is reported."""
    if sizes.get("context", 1) > 1:
        yield Shared("context", "data.sequence_length", arguments.data.sequence_length, CHUNKS, may_change=True)
    is_given = arguments.model.pretrained is None  # else the folder says it, when it is read
    if is_given and sizes.get("pipeline", 1) > 1:
        yield of_layers(arguments.model)
    if not arguments.task.startswith(OWN_TASKS) or sizes.get("tensor", 1) == sizes.get("expert", 1) == 1:
        return
    vision = arguments.vision
    if vision is not None:
        yield from of_model(vision, "vision")
    # What scores classes of images is an encoder alone.
    if is_given and (vision is None or vision.num_labels is None):
        yield from of_model(arguments.model, "model")


def of_layers(model: Any) -> Shared:
    return Shared("pipeline", "model.num_layers", model.num_layers)


def of_model(config: Any, section: str) -> Iterator[Shared]:
    """Yields what the devices share of each layer. `config` is a `ModelConfig` or a `VisionConfig`."""
    yield Shared("tensor", f"{section}.num_heads", config.num_heads)
    yield Shared("tensor", f"{section}.mlp_width", config.mlp_width)
    # Models with few of them, or one, are divided over more devices all the same.
    yield Shared("tensor", f"{section}.num_kv_heads", getattr(config, "num_kv_heads", config.num_heads), may_be_common=True)
    if (experts := getattr(config, "num_experts", None)) is not None:
        yield Shared("expert", f"{section}.num_experts", experts)


def problems(shared: Iterable[Shared], sizes: Mapping[str, int], num_devices: int | None = None) -> Iterator[str]:
    """Yields a line for each axis of a mesh, with these sizes of its axes, that does not divide what it shares: all that it does
    not divide, and the nearest sizes that divide it, and the number of devices."""
    of_axes: dict[str, list[Shared]] = {}
    for each in shared:
        if not each.may_be_common:
            of_axes.setdefault(each.axis, []).append(each)
    for axis, all_of_axis in of_axes.items():
        size = sizes.get(axis, 1)
        wrong = [each for each in dict.fromkeys(all_of_axis) if each.number % (each.parts * size)]
        if size == 1 or not wrong:
            continue
        # A size of 1 always fits.
        wholes = (each.number // each.parts if each.number % each.parts == 0 else 1 for each in all_of_axis)
        common = math.gcd(*wholes, num_devices or 0)
        expected = f"expected {either(nearest_divisors(common, size))}"
        for each in (each for each in wrong if each.may_change):
            expected += f", or {each.name} = {either(nearest_multiples(each.number, each.parts * size))}"
        by = "it" if wrong[0].parts == 1 else f"{wrong[0].parts} x {size} (so many equal parts for each device)"
        names = " and ".join(f"{each.name} = {each.number}" for each in wrong)
        yield f"mesh.{axis} = {size}: {names} {'is' if len(wrong) == 1 else 'are'} not divisible by {by}: {expected}"


def in_common(shared: Iterable[Shared], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each thing that devices along an axis have in common, because the axis does not divide it."""
    for each in shared:
        if each.may_be_common and each.number % (size := sizes.get(each.axis, 1)):
            line = f"mesh.{each.axis} = {size} does not divide {each.name} = {each.number}"
            yield f"{line}: devices along it have keys and values in common"


def nearest_divisors(number: int, size: int) -> list[int]:
    """Returns the divisors of `number` next to `size`: below it, and above it if there is one."""
    fits = [each for each in range(1, number + 1) if number % each == 0]
    return [*[each for each in fits if each < size][-1:], *[each for each in fits if each > size][:1]]


def nearest_multiples(number: int, of: int) -> list[int]:
    below = number // of * of
    return [*([below] if below else []), below + of]


def either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def sizes_that_fit(given: Mapping[str, int], num_devices: int) -> Iterator[str]:
    """Yields, for each axis of a mesh that does not fit so many devices, the sizes next to its own with which the mesh would, if
    there are any and the other axes stay as they are."""
    fixed = math.prod(size for size in given.values() if size != -1)
    for axis, size in given.items():
        if size == -1 or num_devices % (fixed // size):
            continue
        left = num_devices // (fixed // size)
        if -1 not in given.values():
            yield f"mesh.{axis} = {left}"
        elif left % size:
            yield f"mesh.{axis} = {either(nearest_divisors(left, size))}"


def context_problems(arguments: Any, parts: int) -> Iterator[str]:
    """Yields why `parts` devices cannot share each sequence of a run. `arguments` is a `TrainingArguments`."""
    if parts == 1:
        return
    if arguments.vision is not None:
        yield (
            f"mesh.context = {parts}: tokens of images (vision) attend to each other in both directions, which no attention of "
            "divided sequences knows; use mesh.data or mesh.fsdp for these devices"
        )
    yield from attention.check(arguments.model.attention, arguments.attention_needs._replace(context=parts))


MICROBATCHES_PER_STAGE = 4
"""How many micro-batches there are at most for each stage, if nobody says how many: the stages then rest for less than a fifth of
the time, and each product still has many rows."""
REPEATS = 2
"""How often each micro-batch goes round the stages with the interleaved schedule, if nobody says how often."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(CheckedSection):
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


def pipeline_problems(arguments: Any, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields why the layers of a run cannot be divided into stages, or its examples into micro-batches. `arguments` is a
    `TrainingArguments`."""
    stages, asked = sizes.get(PIPELINE, 1), arguments.pipeline.microbatches
    if stages == 1:
        if asked is not None:
            yield f"pipeline.microbatches = {asked}: expected null with mesh.pipeline = 1, which has no stages"
        if arguments.pipeline.schedule != "gpipe":
            yield f"pipeline.schedule = {arguments.pipeline.schedule}: expected gpipe with mesh.pipeline = 1, which has no stages"
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
