"""What the devices of a compiled program exchange, read from the program's text."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
FUSED = "all-reduce-scatter"
"""The compiler for TPUs makes one operation of an all-reduce and the choice of a device's part: a reduce-scatter."""
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(rf"= (?P<shape>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
CALLED = re.compile(r"(?:body|calls|to_apply|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
CONDITION = re.compile(r"condition=%?([\w.-]+)")
KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
BITS = re.compile(r"\d+")
CHAIN = re.compile(r'(channel_id=\d+),.*(chain_id="\d+")')
"""Of what is begun in one place, and gone on with in others, beside the work of a loop."""
SCOPE = re.compile(r'op_name="([^"]*)"')
STRIDED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)*)\}")
GROUP = re.compile(r"\{([\d,]+)\}")
OF_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<over>[^}]*)\}"
)
"""Groups by axes of a mesh that the compiler has made up: its axes, its devices, and over which axes there is an exchange."""
AXIS_OF_MESH = re.compile(r"'([^']+)'=(\d+)")
OVER = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
"""An axis, or a part of it: the size of the parts before it, and its own."""
UNKNOWN = "axes that are not known"
BEGUN_WITH_OPERANDS = ("all-gather", "collective-permute")
"""Where these are begun, their shape has what they are given, too."""
NO_SCOPE = re.compile(r"^(jit|jvp|transpose|vmap|checkpoint|rematted_computation|closed_call|while|body|cond|shard_map)\b|^\W|^$")


class Exchange(NamedTuple):
    kind: str
    scope: str
    """Where in the model, such as `layers/mlp`."""
    times: int
    """How often in a step."""
    bytes: int
    """Of what a device has of them afterwards, times how often."""


def of(text: str) -> list[Exchange]:
    """Returns what one device exchanges in a run of a program, the largest first. A loop counts as often as it is run, if that
    can be seen, else once."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for exchange, _ in _found(text):
        total = totals[exchange.kind, exchange.scope]
        total[0], total[1] = total[0] + exchange.times, total[1] + exchange.bytes
    exchanges = (Exchange(*key, *total) for key, total in totals.items())
    return sorted(exchanges, key=lambda exchange: -exchange.bytes)


def by_axes(text: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes that one device exchanges in a run of a program, the most first, by the axes of the mesh along which the
    devices differ that exchange them: `context`, or `fsdp x context`. `sizes` are those of the axes."""
    totals: dict[str, int] = defaultdict(int)
    for exchange, line in _found(text):
        totals[" x ".join(_axes(line, sizes))] += exchange.bytes
    return dict(sorted(totals.items(), key=lambda total: -total[1]))


def _found(text: str) -> list[tuple[Exchange, str]]:
    """Returns each exchange of a program, and its line."""
    lines = _computations(text)
    calls = {name: [call for line in body for call in _calls(line, lines)] for name, body in lines.items()}
    callers = {called: line for body in lines.values() for line in body for called, _ in _calls(line, lines)}
    times = _times(lines, calls)
    found: list[tuple[Exchange, str]] = []
    chains: dict[str, tuple[Exchange, str]] = {}
    for name, body in lines.items():
        fused = name.startswith(FUSED)  # its caller says where it belongs
        for line in body:
            if (match := INSTRUCTION.search(line)) is None or not times[name]:
                continue
            scope = _scope(callers.get(name, line) if fused else line)
            size = _size(match["shape"], with_operands=bool(match["start"]) and match["kind"] in BEGUN_WITH_OPERANDS)
            exchange = Exchange("reduce-scatter" if fused else match["kind"], scope, times[name], times[name] * size)
            if (chain := CHAIN.search(line)) is None:
                found.append((exchange, line))
            elif (key := " ".join(chain.groups())) not in chains or exchange.times < chains[key][0].times:
                chains[key] = exchange, line
    return [*found, *chains.values()]


def _axes(line: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields the axes along which the devices differ that exchange something."""
    groups = _groups(line, math.prod(sizes.values()))
    if groups is None:
        yield UNKNOWN
        return
    for axis, places in zip(sizes, np.unravel_index(groups, tuple(sizes.values())), strict=True):
        if (places != places[:, :1]).any():
            yield axis


def _groups(line: str, number: int) -> np.ndarray | None:
    """Returns int[groups, devices]: which devices exchange something, by their places in the mesh. None if the line says it in a
    form that is not known here."""
    if (found := OF_MESH.search(line)) is not None:
        return _groups_of_mesh(found, number)
    if (strides := STRIDED.search(line)) is not None:
        shape, dims, order = ([int(size) for size in (part or "").split(",") if size] for part in strides.groups())
        return np.arange(number).reshape(dims).transpose(order or None).reshape(shape)
    listed = LISTED.search(line)
    if listed is None and "replica_groups=" in line:
        return None
    groups = [[int(device) for device in group.split(",")] for group in GROUP.findall(listed[1])] if listed else []
    return np.array(groups or [list(range(number))])


def _groups_of_mesh(found: re.Match[str], number: int) -> np.ndarray:
    devices = np.arange(number)
    if found["dims"]:
        order = [int(each) for each in found["order"].split(",")] if found["order"] else None
        devices = devices.reshape([int(size) for size in found["dims"].split(",")]).transpose(order)
    over = {name: (int(before or 1), int(size or 0)) for name, before, size in OVER.findall(found["over"])}
    shape, exchanging = list[int](), list[int]()
    for name, whole in ((name, int(size)) for name, size in AXIS_OF_MESH.findall(found["axes"])):
        before, size = over.get(name, (1, 1))
        size = size or whole
        if name in over:
            exchanging.append(len(shape) + 1)
        shape += [before, size, whole // before // size]
    rest = [place for place in range(len(shape)) if place not in exchanging]
    group = math.prod(shape[place] for place in exchanging)
    return devices.reshape(shape).transpose([*rest, *exchanging]).reshape(-1, group)


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation, by its name."""
    lines: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith(" ") and (match := COMPUTATION.match(line)):
            name = "ENTRY" if line.startswith("ENTRY") else match[1]
            lines[name] = []
        elif name and line.startswith(" "):
            lines[name].append(line)
    return lines


def _calls(line: str, lines: dict[str, list[str]]) -> list[tuple[str, int]]:
    """Returns what a line calls, and how often."""
    names = [name.strip(" %{}") for names in CALLED.findall(line) for name in names.split(",")]
    return [(name, _trips(line, lines)) for name in names]


def _trips(line: str, lines: dict[str, list[str]]) -> int:
    """Returns how often a loop is run: the compiler for CPUs writes it down; else a loop over layers or parts of a batch compares
    its counter with a constant."""
    if known := KNOWN_TRIPS.search(line):
        return int(known[1])
    condition = CONDITION.search(line)
    limits = {int(limit) for text in lines.get(condition[1], ()) for limit in CONSTANT.findall(text)} if condition else set()
    return limits.pop() if len(limits) == 1 else 1


def _times(lines: dict[str, list[str]], calls: dict[str, list[tuple[str, int]]]) -> dict[str, int]:
    """Returns how often each computation is run. Callers come after what they call, as XLA writes them."""
    times = dict.fromkeys(lines, 0) | {"ENTRY": 1}
    for name in reversed(lines):
        for called, trips in calls[name]:
            if called in times:
                times[called] += times[name] * trips
    return times


def _scope(line: str) -> str:
    match = SCOPE.search(line)
    # The first of several that became one.
    parts = re.sub(r"\w+\(|\)", "/", match[1].split(":")[0]).split("/")[:-1] if match else []
    return "/".join(dict.fromkeys(part for part in parts if not NO_SCOPE.match(part) and part != "train_step")) or "step"


def _size(text: str, *, with_operands: bool) -> int:
    """Returns the bytes of all arrays of a shape: several exchanges of one kind may have become one."""
    arrays = [shape for shape in SHAPE.findall(text) if not (with_operands and shape[0] == "u32" and not shape[1])]
    return sum(map(_bytes, arrays[len(arrays) // 2 :] if with_operands else arrays))


def _bytes(shape: tuple[str, str]) -> int:
    dtype, sizes = shape
    bits = int(found[0]) if (found := BITS.search(dtype)) else 8
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
