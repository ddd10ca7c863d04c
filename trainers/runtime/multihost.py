"""What one host alone knows, agreed on by all: every such decision goes through here, or through the flags of the train step.

All hosts must call each function in the same order with the same `topic`. They talk through the coordination service, on the
host: no device, no compilation. A host that never comes makes the others raise after `timeout_s`, naming the topic.

Each host tells host 0 and hears from host 0 what all have told, so thousands of hosts cost each of them two calls. What most of
them say alike is sent once.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax._src import distributed

from trainers.errors import CoordinatorError

_counter = itertools.count()
"""Makes each exchange's keys unique: the same on all hosts because all call in the same order."""
_past: list[str] = []
"""On host 0: the keys of exchanges that some host may still be reading. Once all have come to a later one, they go."""

FEW = 16
"""So many hosts are waited for one by one, which is the quickest way to hear of the last one."""
LOOK_EVERY_S = 0.02
"""While more than that are missing."""
GRACE_S = 10.0
"""Host 0, which waits for all, knows who is missing: the others wait for that a little longer."""
DEFAULT_TIMEOUT_S = 1800.0
"""Longer than any limit of a watchdog, which sees more and says more; without one it ends a run that would wait for ever."""


def all_hosts(topic: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Every host's (JSON-able) value, in host order."""
    if jax.process_count() == 1:
        return [value]
    prefix = f"agree/{next(_counter)}/{topic}"
    return exchange(_client(), jax.process_index(), jax.process_count(), prefix, topic, value, timeout_s)


def from_host0(topic: str, value: Any = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Host 0's (JSON-able) value; what the others pass is ignored."""
    if jax.process_count() == 1:
        return value
    key = f"agree/{next(_counter)}/{topic}"
    client = _client()
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        _past.append(key)
        return value
    return _get(client, key, topic, 0, timeout_s)


def every_host(topic: str, condition: bool, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """True if `condition` holds on all hosts."""
    return all(all_hosts(topic, bool(condition), timeout_s))


def barrier(topic: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    all_hosts(topic, True, timeout_s)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise CoordinatorError("several hosts, but this process has not joined: call trainers.runtime.distributed.join first")
    return client


def exchange(client: Any, host: int, num_hosts: int, prefix: str, topic: str, value: Any, timeout_s: float) -> list[Any]:
    """One host's part in `all_hosts`."""
    if host > 0:
        client.key_value_set(f"{prefix}/of/{host}", json.dumps(value))
        reply = _get(client, f"{prefix}/all", topic, 0, timeout_s + GRACE_S)
        if "problem" in reply:
            raise CoordinatorError(reply["problem"])
        return unpack(reply, num_hosts)

    def get(key: str, missing: int, left_s: float) -> Any:
        return _get(client, key, topic, missing, left_s, timeout_s)

    try:
        told = gather(client, f"{prefix}/of", range(1, num_hosts), get, timeout_s)
    except CoordinatorError as error:
        client.key_value_set(f"{prefix}/all", json.dumps({"problem": str(error)}))
        raise
    told[0] = json.loads(json.dumps(value))  # as the others will have it
    client.key_value_set(f"{prefix}/all", json.dumps(pack(told)))
    for key in _past:
        client.key_value_delete(key)
    _past[:] = [prefix]
    return [told[of] for of in range(num_hosts)]


def gather(
    client: Any, folder: str, hosts: Iterable[int], get: Callable[[str, int, float], Any], timeout_s: float
) -> dict[int, Any]:
    """What these hosts have told below `folder`, each by its number. `get(key, host, timeout_s)` waits for one, and raises what
    its caller wants raised for a host that does not come."""
    missing, found = list(hosts), dict[int, Any]()
    deadline_s = time.monotonic() + timeout_s
    while missing:
        if len(missing) > FEW:
            there = {int(key.rpartition("/")[2]): json.loads(text) for key, text in client.key_value_dir_get(f"{folder}/")}
            found |= {host: there[host] for host in missing if host in there}
            missing = [host for host in missing if host not in there]
        if missing:
            host = missing.pop(0)
            found[host] = get(f"{folder}/{host}", host, max(0.001, deadline_s - time.monotonic()))
        if len(missing) > FEW:
            time.sleep(LOOK_EVERY_S)
    return found


def pack(values: Mapping[int, Any]) -> dict[str, Any]:
    """`values` by host, with what most hosts say alike only once."""
    texts = {host: json.dumps(value) for host, value in values.items()}
    common = Counter(texts.values()).most_common(1)[0][0]
    first = next(host for host, text in texts.items() if text == common)
    return {"common": values[first], "own": {host: values[host] for host, text in texts.items() if text != common}}


def unpack(packed: Mapping[str, Any], num_hosts: int) -> list[Any]:
    return [packed["own"].get(str(host), packed["common"]) for host in range(num_hosts)]


def _get(client: Any, key: str, topic: str, host: int, left_s: float, timeout_s: float | None = None) -> Any:
    """Waits `left_s`; `timeout_s` of them in all are told of."""
    try:
        return json.loads(client.blocking_key_value_get(key, int(left_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        waited_s = left_s if timeout_s is None else timeout_s
        raise CoordinatorError(f"no answer from host {host} on {topic!r} within {waited_s:.0f} s: {error}") from error


def first_problem(problems: list[str]) -> str:
    """The first that is not empty, with its host where there are several."""
    found = ((host, problem) for host, problem in enumerate(problems) if problem)
    return next((f"host {host}: {problem}" if len(problems) > 1 else problem for host, problem in found), "")


def of_host0(problem: str) -> str:
    """With its host where there are several."""
    return first_problem([problem, *[""] * (jax.process_count() - 1)])


def one_line(error: BaseException) -> str:
    """What it is and what it says; of a long text the beginning and the end, where the cause stands."""
    cause = error.__cause__ or error
    text = (str(cause).strip().splitlines() or [""])[0].partition(" [tensorstore_spec")[0]
    return f"{type(cause).__name__}: {text if len(text) <= 300 else f'{text[:120]} ... {text[-170:]}'}"


PATIENCE_S = 60.0
"""Of a host that has failed, for the others: they wait for it in a collective if they have not failed too."""


def in_stages(topic: str, *stages: Callable[[Any], Any]) -> tuple[Any, str]:
    """(what the last stage returned, ""), or (None, what went wrong on the first host that failed).

    Each stage gets what the one before it returned, and begins when no host has failed in that one. All hosts must call this.
    What may fail on one host alone belongs in another stage than a collective. Where a collective itself fails on one host, the
    others can never know: that host raises its error.
    """
    value: Any = None
    for number, stage in enumerate(stages):
        failure: Exception | None = None
        try:
            value = stage(value)
        except Exception as error:  # whatever it is: the caller reports it, and training goes on
            failure = error
        if problem := _problem_of_all(f"{topic}, stage {number}", failure):
            return None, problem
    return value, ""


def _problem_of_all(topic: str, failure: Exception | None) -> str:
    if failure is None:
        return first_problem(all_hosts(topic, ""))
    try:
        return first_problem(all_hosts(topic, one_line(failure), PATIENCE_S))
    except CoordinatorError:
        raise failure from None
