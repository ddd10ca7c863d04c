"""The orders that a training process gets: a schema for each, which mypy checks where one is made and where one is read.

They travel as JSON lines, so they are dicts. The first is the preparation, the second makes the process a member of a generation
or of a precompilation, and later ones are commands. `read_preparation`, `read_orders` and `read_command` are the doors: an order
that this process does not know, a field that it does not know, a missing one and a wrong type are an OrderError.

`NotRequired` fields may be absent: then the docstring says what holds. A driver and a process may be of different versions of the
code, for a driver adopts a gang that runs. An agent passes orders on, and goes by a few fields of them: `agent_start` and the
doors beside it let every other field pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, cast, get_args, get_type_hints

from gangway.config.section import did_you_mean
from gangway.storage import shapes
from gangway.wire import limits as limits_of

SHOWN = 200
"""How many letters of an order that is not understood are shown."""


class OrderError(ValueError):
    """An order that an agent or a training process does not understand. The message names what is wrong with it."""


class Preparation(TypedDict):
    """The first line: from it the process does all that needs no device."""

    cmd: Literal["prepare"]
    arguments_class: str
    """`package.module:Class`, a `TrainingArguments`."""
    arguments: dict[str, Any]
    snapshot_slots: NotRequired[int]
    """For the agent: for how many snapshots the process gets memory. Absent: for none."""


SNAPSHOT_SOCKET = "SNAPSHOT_FD"
"""The variable with the number of the socket by which a process gets that memory: first its own, and just before its orders what
earlier processes of its host have left."""


class MachineOrders(TypedDict):
    """The part of a host's orders that depends on its machine (`Gang.orders`)."""

    local_device_ids: NotRequired[list[int] | None]
    """The GPUs of this process. Absent or None: all devices."""
    slice: NotRequired[int]
    """The number of its TPU slice. Nothing here goes by it."""
    cache_dir: NotRequired[str | None]
    """The folder of JAX's compile cache. Absent or None: that of the environment."""
    env: NotRequired[dict[str, str]]
    """Variables to set before JAX looks for devices."""


class Member(MachineOrders):
    """Which part of which gang the process is."""

    host: int
    """From 0: JAX's process index."""
    num_hosts: int
    coordinator: str
    """`address:port` of host 0, where nobody has listened before."""


class Start(Member):
    """The process trains."""

    cmd: Literal["start"]
    generation: int
    restore_from: NotRequired[str | None]
    """The checkpoint to begin with. Absent or None: the newest in the folder of checkpoints."""
    program_key: NotRequired[str | None]
    """The name under which compiled programs are kept. Absent or None: they are not kept."""
    stop_at: NotRequired[int | None]
    """The batch index at which to save and stop. Absent or None: the configuration's limits alone."""
    skip_batches: NotRequired[Sequence[int]]
    """Batches whose update is not applied. Absent: none."""
    committed_step: NotRequired[int | None]
    """The highest step that the run ever committed. Absent or None: not known, or none yet."""
    driver_term: NotRequired[int]
    """Absent: 0, no driver."""
    time_used_s: NotRequired[float]
    """The seconds of the `time_limit` that the run has used. Absent: 0."""
    retry_for_s: NotRequired[float]
    """How long a state is held that the storage does not take. Absent: RETRY_FOR_S."""
    snapshots_since: NotRequired[int]
    """The oldest generation whose snapshots in memory may be gone on from. Absent: 0, any."""
    limits: NotRequired[Mapping[str, Any]]
    """For the agent: how long the process may stay without progress."""
    shown_lines: NotRequired[int]
    """For the agent: how many printed lines to show in a second."""


class Precompile(Member):
    """The process compiles the programs of a gang, and ends."""

    cmd: Literal["precompile"]
    program_key: str


class Stop(TypedDict):
    """Save at a step on which all hosts agree, and stop."""

    cmd: Literal["stop"]
    reason: str
    """One of `gangway.stop_reason.StopReason`."""


class Save(TypedDict):
    """Save at a step on which all hosts agree."""

    cmd: Literal["save"]


class Profile(TypedDict):
    """Record the next steps of this host. The answer is the event `profile` with this id."""

    cmd: Literal["profile"]
    id: str
    steps: int


class TakenOver(TypedDict):
    """The driver of this term has taken the gang over. It commits by that term from now on."""

    cmd: Literal["taken_over"]
    driver_term: int


Command = Stop | Save | Profile | TakenOver
SAVE: Save = {"cmd": "save"}


def stop(reason: str) -> Stop:
    """Returns the command to save and stop for this reason."""
    return {"cmd": "stop", "reason": str(reason)}


def taken_over(driver_term: int) -> TakenOver:
    """Returns the command to go by the term of a new driver."""
    return {"cmd": "taken_over", "driver_term": driver_term}


def read_preparation(message: Any) -> Preparation:
    """Returns the message as a preparation. Raises OrderError."""
    return cast(Preparation, _checked(message, (Preparation,)))


def read_orders(message: Any) -> Start | Precompile:
    """Returns the message as the orders of a member. Raises OrderError."""
    return cast("Start | Precompile", _checked(message, (Start, Precompile)))


def read_command(message: Any) -> Command:
    """Returns the message as a command for a process that trains. Raises OrderError."""
    return cast(Command, _checked(message, get_args(Command)))


def _checked(message: Any, schemas: Sequence[type]) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("cmd"), str):
        raise OrderError(f"not an order: expected an object with `cmd`, found {message!r:.{SHOWN}}")
    by_name = {get_args(get_type_hints(schema)["cmd"])[0]: schema for schema in schemas}
    name = message["cmd"]
    if name not in by_name:
        known = f"expected {' or '.join(by_name)}{did_you_mean(name, by_name)}"
        raise OrderError(f"there is no order {name[:SHOWN]!r} at this point: {known}. {_WAY_OUT}")
    fields = get_type_hints(by_name[name])
    if unknown := [field for field in message if field not in fields]:
        hint = did_you_mean(str(unknown[0]), fields) or f"; the fields are {', '.join(fields)}"
        raise OrderError(f"the order {name!r} has no field {str(unknown[0])[:SHOWN]!r}{hint}. {_WAY_OUT}")
    if problem := shapes.problem(by_name[name], message):
        raise OrderError(f"the order {name!r}: {problem}. {_WAY_OUT}")
    return message


IN_GANG = frozenset({"generation", "host", "num_hosts"})
"""What the orders of a host say that belongs to a gang."""
_FOR_AGENT = IN_GANG | {"limits", "shown_lines"}


def agent_start(orders: Any) -> tuple[Start, limits_of.Limits]:
    """Returns the orders of `Start`, as far as an agent goes by them, and the limits in them. Of a process that belongs to no
    gang, the host and the number of hosts may be absent: no driver can adopt it, and it cannot be profiled. Raises OrderError."""
    present = orders.keys() if isinstance(orders, Mapping) else ()
    _refuse("start", shapes.problem(Start, orders, only=_FOR_AGENT.intersection(present) | {"generation"}))
    try:
        return cast(Start, orders), limits_of.read(orders.get("limits", {}))
    except ValueError as error:
        raise OrderError(f"the order 'start': limits: {error}") from error


def agent_command(message: Any) -> Command:
    """Returns a line for a process that trains: the process alone checks more of it. Raises OrderError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("cmd"), str):
        raise OrderError(f"the order 'order': expected an object with `cmd`, found {message!r:.{SHOWN}}")
    return cast(Command, message)


def agent_profile(message: Any) -> Profile:
    """Returns the message as the command to profile, whose answer has its id. Raises OrderError."""
    _refuse("profile", shapes.problem(Profile, message, only=frozenset({"id"})))
    return cast(Profile, agent_command(message))


def _refuse(order: str, problem: str) -> None:
    if problem:
        raise OrderError(f"the order {order!r}: {problem}")


_WAY_OUT = "If the code was changed under a run that goes on, stop the run and start it again: all its hosts need the same code"
