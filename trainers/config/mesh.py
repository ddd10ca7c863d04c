"""The section `mesh`: its axes, what the devices along an axis share in equal parts, and the sizes that fit. Free of JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gangway.config.section import Section, require
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
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh axis {name} = {size}: expected a positive size, or -1 for what is left")
        require(list(sizes.values()).count(-1) <= 1, f"mesh {sizes}: at most one axis may be -1")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Returns the axis sizes for `num_devices` devices, those of `slice`, `pipeline` and `context` only if they are more than
        1. Raises ValueError if they do not multiply to it."""
        sizes = dataclasses.asdict(self)
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
