"""Classifies errors of other libraries: those of the runtime by their text, those of networks and stores by type or status.

None of these libraries is imported for it: an error is recognized by the names of its classes, its status, or its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

RuntimeKind = Literal["out_of_memory", "device", "link", "collateral", "user", "runtime"]
Outside = Literal["transient", "mistake"]

CRASHED = "Fatal Python error: "
"""How Python's faulthandler begins to tell of a process that a signal ends; its stack follows."""
OUT_OF_MEMORY_SIGNS = ("resource_exhausted", "out of memory")

BROKEN_DEVICE = re.compile(
    # CUDA, by the driver's names and in the words of its API
    r"cuda_error_(ecc_uncorrectable|illegal_address|illegal_instruction|misaligned_address|invalid_address_space|invalid_pc"
    r"|hardware_stack_error|launch_failed|launch_timeout|nvlink_uncorrectable|contained)"
    r"|uncorrectable (ecc|nvlink) error|illegal memory access|unspecified launch failure|unhandled cuda error"
    r"|nvrm: xid|fallen off the bus"
    r"|hiperror(illegaladdress|launchfailure|eccnotcorrectable)"
    # TPU
    r"|core halted unexpectedly|accelerator device halted|observed errors are: \[(hardware|network|power)"
    r"|fatal error received from hardware"
)
"""Searched in a message, or in the last lines of a process that the runtime has aborted."""
NO_DEVICE = re.compile(
    r"unable to initialize backend|backend '\w+' failed to initialize|tpu initialization failed|tpu is already in use"
    r"|failed to get global tpu topology|no visible gpu devices|no supported devices found"
    r"|cuda_error_(no_device|device_unavailable|system_not_ready|unknown)"
)
"""Searched in a message only: a machine without accelerators logs such lines without being broken."""
LINK = re.compile(r"nccl.*unhandled system error", re.DOTALL)
"""A fault of the links between devices, of this host or of another: the message does not say which."""
LOST_PEER = re.compile(
    r"gloo|connection closed by peer|connection reset|coordination|heartbeat|nccl|deadline_exceeded"
    r"|failed to connect to all addresses"
)
OTHER_LAUNCH = re.compile("different launch id")
"""A TPU was halted because the program of another host is not the one that it expected."""
CALLBACK = re.compile(r"callback error")
"""A Python function that the program calls from the device has raised an error."""
RUNTIME_STATUSES = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", "ABORTED", "CANCELLED", "DATA_LOSS"})
"""The statuses of errors of the machine or the runtime. All others are errors of the program."""


def runtime_kind(error: BaseException) -> RuntimeKind | None:
    """Returns the kind of an error that JAX has raised about a device or between hosts; None for any other error.

    JAX raises one type for all of these; only the message says which it is.
    """
    message = str(error).lower()
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
        # When JAX finds no device it raises a plain RuntimeError.
        is_about_backend = isinstance(error, RuntimeError) and "backend" in message and NO_DEVICE.search(message)
        if not is_about_backend:
            return None
    for kind, signs in RUNTIME_SIGNS:
        # In lower case: libraries and drivers spell such texts differently.
        if signs.search(message):
            return kind
    return "runtime" if str(error).partition(":")[0] in RUNTIME_STATUSES else "user"


RUNTIME_SIGNS: tuple[tuple[RuntimeKind, re.Pattern[str]], ...] = (
    ("user", CALLBACK),
    ("out_of_memory", re.compile("|".join(OUT_OF_MEMORY_SIGNS))),
    ("collateral", OTHER_LAUNCH),
    ("device", BROKEN_DEVICE),
    ("link", LINK),
    ("collateral", LOST_PEER),
    ("device", NO_DEVICE),
)
"""The patterns in the order in which they are searched: the first match counts."""


def broken_device_in(lines: Any) -> str | None:
    """Returns the first of these lines that reports a broken device; None if none does."""
    return next((line for line in lines if BROKEN_DEVICE.search(line.lower())), None)


def outside(error: BaseException) -> Outside | None:
    """Returns whether the error came from outside the program: a network, a file system, a store. None if nothing says so.

    `transient`: it may go away by itself. `mistake`: it may, but looks like a wrong path, name or permission. The errors that
    it was raised from count too.
    """
    kinds = (_outside(cause) for cause in _chain(error))
    return next((kind for kind in kinds if kind is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, and those that it was raised from, or while they were handled."""
    visited: list[BaseException] = []  # a chain may be circular
    cause: BaseException | None = error
    while cause is not None and cause not in visited:
        visited.append(cause)
        yield cause
        # As Python prints a chain: an explicit cause takes the place of the context.
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _outside(error: BaseException) -> Outside | None:
    if isinstance(error, MISSING):
        return "mistake"
    status = _status(error)
    if status is not None:
        return "transient" if status in PASSING_STATUSES or (isinstance(status, int) and status >= 500) else "mistake"
    types = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(error).__mro__}
    listed = any(name in TRANSIENT_TYPES.get(module, ()) for module, name in types)
    if listed or isinstance(error, ConnectionError | TimeoutError):
        # Libraries also raise such types for a malformed URL, and derive them from ValueError.
        return "mistake" if isinstance(error, ValueError) else "transient"
    # An OSError without a number comes from a library and not from the system: a damaged image, say.
    return "transient" if isinstance(error, OSError) and error.errno is not None else None


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError)
TRANSIENT_TYPES: Mapping[str, frozenset[str]] = {
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "azure": frozenset({"ServiceRequestError", "ServiceResponseError"}),
    "botocore": frozenset({"HTTPClientError", "ConnectionError", "IncompleteReadError"}),
    "google": frozenset({"TransportError", "RetryError"}),
    "grpc": frozenset({"RpcError"}),
    "http": frozenset({"HTTPException"}),
    "httpcore": frozenset({"NetworkError", "TimeoutException", "ProtocolError"}),
    "httpx": frozenset({"TransportError"}),
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError", "RetryError"}),
    "urllib": frozenset({"URLError"}),
    "urllib3": frozenset({"HTTPError"}),
}
"""The classes by package; classes that inherit from them count too."""
PASSING_STATUSES = frozenset(
    {408, 425, 429, "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN"}
)


def _status(error: BaseException) -> int | str | None:
    """Returns the status of an HTTP or gRPC error, wherever its library keeps it."""
    response = _attribute(error, "response")
    if isinstance(response, Mapping):  # boto
        return _http_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    code = _attribute(error, "code")
    if callable(code) and any(cls.__module__.partition(".")[0] == "grpc" for cls in type(error).__mro__):
        return _attribute(code(), "name")
    candidates = [code, *(_attribute(source, name) for source in (error, response) for name in ("status_code", "status"))]
    return next((status for value in candidates if (status := _http_status(value)) is not None), None)


def _http_status(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and 400 <= value < 600 else None


def _attribute(of: Any, name: str) -> Any:
    """Returns the attribute; None if there is none, or if reading it raises: nothing may prevent the report of an error."""
    try:
        return getattr(of, name, None)
    except Exception:  # a property of any library's
        return None
