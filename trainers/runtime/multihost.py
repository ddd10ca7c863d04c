"""Agreement between hosts. Every decision that depends on what one host alone knows goes through here, or through the flags of
the train step.

All hosts must call each function in the same order with the same `topic`. The exchange uses the coordination service, on the
host: no device, no compilation. If a host never comes, the others raise after `timeout_s`, with the topic in the message.

Each host sends its value to host 0, and gets all values from host 0. So each host makes two calls, however many hosts there
are. A value that most hosts have in common is sent once.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from gangway.errors import CoordinatorError
from gangway.text import cut
from trainers.jax_internals import distributed
from trainers.runtime.context import current

_counter = itertools.count()
"""The number that makes the keys of each exchange unique. It is the same on all hosts, because all call in the same order."""
_past: list[str] = []
"""On host 0: the keys of exchanges that some host may still be reading. They are deleted once all hosts have come to a later
one."""

FEW = 16
"""Up to this many hosts are waited for one by one, which notices the last one soonest."""
LOOK_EVERY_S = 0.02
"""The delay between two looks while more hosts than FEW are missing."""
GRACE_S = 10.0
"""The other hosts wait this much longer than host 0: host 0 waits for all, and its reply says who is missing."""
DEFAULT_TIMEOUT_S = 1800.0
"""Longer than any limit of a watchdog, which notices more and reports more. Without a watchdog it ends a run that would wait
for ever."""


def all_hosts(topic: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Returns every host's (JSON-able) value, in host order."""
    if jax.process_count() == 1:
        return [value]
    # The topic is in the key: hosts whose calls differ wait for different keys and time out, and never take
    # each other's values.
    prefix = f"agree/{next(_counter)}/{topic}"
    return exchange(_client(), jax.process_index(), jax.process_count(), prefix, topic, value, timeout_s)


def from_host0(topic: str, value: Any = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Returns host 0's (JSON-able) value; what the other hosts pass is ignored."""
    if jax.process_count() == 1:
        return value
    # The same counter as in `all_hosts`: the two kinds of exchange may alternate, but in the same order everywhere.
    key = f"agree/{next(_counter)}/{topic}"
    client = _client()
    if jax.process_index() == 0:
        # Host 0 does not wait here: it may be several exchanges ahead when the others read.
        client.key_value_set(key, json.dumps(value))
        # Not deleted now, for the others have not read it yet; `exchange` deletes it.
        _past.append(key)
        return value
    return _get(client, key, topic, 0, timeout_s)


def to_host0(topic: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any] | None:
    """Returns every host's (JSON-able) value, in host order, on host 0; None on the others. For values that are large."""
    # As the others would be sent: JSON makes lists of tuples.
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    prefix = f"agree/{next(_counter)}/{topic}"
    client = _client()
    if jax.process_index() > 0:
        client.key_value_set(f"{prefix}/of/{jax.process_index()}", text)
        return None

    def get(key: str, missing: int, left_s: float) -> Any:
        return _get(client, key, topic, missing, left_s, timeout_s)

    values = gather(client, f"{prefix}/of", range(1, jax.process_count()), get, timeout_s)
    # At once, for no other host reads them.
    client.key_value_delete(prefix)
    return [json.loads(text), *(values[host] for host in range(1, jax.process_count()))]


def every_host(topic: str, condition: bool, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Returns True if `condition` holds on all hosts."""
    # `bool`: JSON has no NumPy booleans.
    return all(all_hosts(topic, bool(condition), timeout_s))


def note_from_host0(message: str) -> None:
    """Sends a note that all hosts have, once."""
    if jax.process_index() == 0:
        current().note(message)


def barrier(topic: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    all_hosts(topic, True, timeout_s)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise CoordinatorError("several hosts, but this process has not joined: call trainers.runtime.distributed.join first")
    return client


def exchange(client: Any, host: int, num_hosts: int, prefix: str, topic: str, value: Any, timeout_s: float) -> list[Any]:
    """Does one host's part in `all_hosts`."""
    if host > 0:
        client.key_value_set(f"{prefix}/of/{host}", json.dumps(value))
        reply = _get(client, f"{prefix}/all", topic, 0, timeout_s + GRACE_S)
        if "problem" in reply:
            raise CoordinatorError(reply["problem"])
        return unpack(reply, num_hosts)

    def get(key: str, missing: int, left_s: float) -> Any:
        return _get(client, key, topic, missing, left_s, timeout_s)

    try:
        values = gather(client, f"{prefix}/of", range(1, num_hosts), get, timeout_s)
    except CoordinatorError as error:
        # The others wait for this reply: so they raise now, and with the name of the host that is missing.
        client.key_value_set(f"{prefix}/all", json.dumps({"problem": cut(str(error))}))
        raise
    values[0] = json.loads(json.dumps(value))  # as the others get it: JSON makes lists of tuples
    client.key_value_set(f"{prefix}/all", json.dumps(pack(values)))
    # All hosts have come to this exchange: none still reads an earlier one.
    for key in _past:
        client.key_value_delete(key)
    _past[:] = [prefix]
    return [values[index] for index in range(num_hosts)]


def gather(
    client: Any, folder: str, hosts: Iterable[int], get: Callable[[str, int, float], Any], timeout_s: float
) -> dict[int, Any]:
    """Returns the values that these hosts have set below `folder`, by host. `get(key, host, timeout_s)` waits for one value,
    and raises what its caller wants raised for a host that does not come."""
    missing, values = list(hosts), dict[int, Any]()
    deadline_s = time.monotonic() + timeout_s
    while missing:
        if len(missing) > FEW:
            # One call for all that have come so far: thousands of single calls would be the slowest part of an exchange.
            present = {int(key.rpartition("/")[2]): json.loads(text) for key, text in client.key_value_dir_get(f"{folder}/")}
            values |= {host: present[host] for host in missing if host in present}
            missing = [host for host in missing if host not in present]
        if missing:
            # With few missing, block on one: this needs no polling, and the others arrive meanwhile and cost
            # nothing to read.
            host = missing.pop(0)
            # At least 1 ms: after the deadline a host that has come already must still be read.
            values[host] = get(f"{folder}/{host}", host, max(0.001, deadline_s - time.monotonic()))
        if len(missing) > FEW:
            time.sleep(LOOK_EVERY_S)
    return values


def pack(values: Mapping[int, Any]) -> dict[str, Any]:
    """Returns `values` by host as one document, with the value that most hosts have in common only once."""
    texts = {host: json.dumps(value) for host, value in values.items()}
    common = Counter(texts.values()).most_common(1)[0][0]
    first = next(host for host, text in texts.items() if text == common)
    return {"common": values[first], "own": {host: values[host] for host, text in texts.items() if text != common}}


def unpack(packed: Mapping[str, Any], num_hosts: int) -> list[Any]:
    # JSON has made strings of the keys.
    return [packed["own"].get(str(host), packed["common"]) for host in range(num_hosts)]


def _get(client: Any, key: str, topic: str, host: int, left_s: float, timeout_s: float | None = None) -> Any:
    """Waits `left_s`. The error names `timeout_s`, the time of the whole exchange."""
    try:
        return json.loads(client.blocking_key_value_get(key, int(left_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        waited_s = left_s if timeout_s is None else timeout_s
        raise CoordinatorError(f"no answer from host {host} on {topic!r} within {waited_s:.0f} s: {error}") from error


def first_problem(problems: list[str]) -> str:
    """Returns the first that is not empty, with its host if there are several hosts."""
    for host, problem in enumerate(problems):
        if problem:
            return f"host {host}: {problem}" if len(problems) > 1 else problem
    return ""


def of_host0(problem: str) -> str:
    """Returns a problem of host 0, with its host if there are several hosts."""
    return first_problem([problem, *[""] * (jax.process_count() - 1)])


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an error; of a long message the beginning and the end, where the cause is."""
    # Orbax wraps what went wrong; the cause says more than the wrapper.
    cause = error.__cause__ or error
    text = (str(cause).strip().splitlines() or [""])[0].partition(" [tensorstore_spec")[0]
    return f"{type(cause).__name__}: {text if len(text) <= 300 else f'{text[:120]} ... {text[-170:]}'}"


PATIENCE_S = 60.0
"""How long a host that has failed waits for the others: if they have not failed too, they wait for it in a collective."""


class StageError(Exception):
    """A stage has failed on some host; one line says on which, and why."""


def in_stages(topic: str, *stages: Callable[[Any], Any]) -> Any:
    """Returns what the last stage returned. Raises StageError on all hosts if a stage fails on one of them.

    Each stage gets what the one before it returned, and begins when no host has failed in that one. All hosts must call this.
    What may fail on one host alone must not share a stage with a collective. If a collective itself fails on one host, the
    others cannot know: that host raises its error.
    """
    value: Any = None
    for number, stage in enumerate(stages):
        # Not raised at once: first the others must learn that they shall not begin the next stage.
        failure: Exception | None = None
        try:
            value = stage(value)
        except Exception as error:  # whatever it is: the caller reports it, and training goes on
            failure = error
        # Every host calls this after each stage, also the one that failed: otherwise the others would wait for
        # it in the next stage.
        if problem := _problem_of_all(f"{topic}, stage {number}", failure):
            raise StageError(problem)
    return value


def _problem_of_all(topic: str, failure: Exception | None) -> str:
    if failure is None:
        return first_problem(all_hosts(topic, ""))
    try:
        return first_problem(all_hosts(topic, one_line(failure), PATIENCE_S))
    except CoordinatorError:
        # The others are in a collective and cannot agree on anything: this host's own error ends it.
        raise failure from None
