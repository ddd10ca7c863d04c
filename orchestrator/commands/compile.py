"""Compiles the train step of a job for its hosts, which need not be there:
`python -m orchestrator.commands.compile CONFIG [key=value ...]`.

Compiles the step of a run, and tells what a device needs of its memory, what the devices exchange in a step, and which large
arrays each of them has whole.
Nothing is started, and no machine is taken. TPUs need the package `libtpu`, which has their compiler; of GPUs the exchanges are
those that they will have, and the memory is an upper bound.
Exit status: 0 it fits; 1 the compiler itself failed; 2 the configuration is wrong, or the step does not fit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from gangway.config.yaml_source import ConfigError
from gangway.first_line import say
from gangway.program import Parser, command

EXIT_FITS, EXIT_FAILED = 0, 1


@command(ConfigError, is_read=True)
def main(argv: list[str] | None = None) -> int:
    parser = Parser("orchestrator.commands.compile", __doc__.split("\n\n")[1], example="config.yaml model.remat=full")
    parser.add_argument("config", help="a YAML file, such as configs/large/llama3_8b_v5e.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.tensor=4 hosts.topology=8x8")
    options = parser.parse_intermixed_args(argv)
    say(f"compiling {options.config}: nothing is started", stream=sys.stderr)
    # After the first line: this imports much.
    from gangway.config.masking import masked
    from orchestrator.config.job import load
    from orchestrator.planning.child import PlanError

    try:
        config = load(options.config, options.overrides)
        print("\n".join(lines(config.training.name, facts(config))))
    except PlanError as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FITS


def facts(config: Any, room: float | None = None) -> dict[str, Any]:
    """Returns the numbers of the compiled step. `room`: the bytes of a device, for `model.remat: auto`; None: those that its
    figures tell. Raises ConfigError with what is wrong, and PlanError if the compiler failed."""
    from cluster.hosts import compiler_flags
    from cluster.hosts import config as hosts_config
    from cluster.hosts.tpu import topology_name
    from orchestrator.planning import hardware
    from orchestrator.planning.child import TIMEOUT_S, Child
    from trainers.config.model import AUTO, CHOICES

    hosts = config.hosts
    devices: dict[str, Any] = {"kind": hosts.kind, "count": hosts_config.num_devices(hosts)}
    # The compiler alone needs no TPU: it does not ask which one this machine has, and may run twice at once.
    env = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if hosts.kind == "tpu":
        env |= compiler_flags.defaults_env(hosts)
        env |= {name: value for name, value in hosts.env.items() if name == compiler_flags.VARIABLES["tpu"]}
        devices |= {"topology": topology_name(hosts.accelerator, hosts.topology), "slices": hosts_config.max_slices(hosts)}
    else:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices['count']}"
    if room is None and (known := hardware.room(hosts, hardware.of(hosts.kind, hosts.accelerator, None))) is not None:
        room = known.of_device
    tries = len(CHOICES) if config.training.model.remat == AUTO else 1
    with Child("trainers.planning.program", config, {"devices": devices, "room": room}, env, tries * TIMEOUT_S) as child:
        return child.facts()


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a person reads."""
    from orchestrator.planning.report import scaled

    mesh, memory = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items()), found["memory"]
    yield f"{name}: {found['devices']} devices ({found['device_kind']}), mesh {mesh}"
    whole = ", ".join(f"{leaf} ({scaled(size)}B)" for leaf, size in found["whole"].items())
    state = f"{scaled(memory['arguments'])}B for state and batch, the rest for gradients and activations"
    rows = [
        ("data", f"rows of 0 stand for them: {found['stand_in']}" if "stand_in" in found else None),
        ("memory", f"{scaled(memory['peak'])}B of a device at the peak: {state}"),
        ("  of its host", f"{scaled(memory['host'])}B, which it reads and writes in a step" if memory.get("host") else None),
        ("remat", remat(found["remat"]) if "remat" in found else None),
        ("not divided", whole or "no large array"),
        ("exchanged", "by one device in a step:"),
    ]
    yield from (f"{label:<17}{text}" for label, text in rows if text)
    for kind, total in _by_kind(found["exchanged"]).items():
        where = ", ".join(f"{scope} {scaled(size)}B" for scope, size in list(total.items())[:4])
        yield f"  {kind:<18} {scaled(sum(total.values())):>7}B   {where}"
    over = ", ".join(f"{axes} {scaled(size)}B" for axes, size in found["exchanged_over"].items())
    between = sum(size for axes, size in found["exchanged_over"].items() if "slice" in axes.split(" x "))
    rows = [("  over axes", over), ("  between slices", f"{scaled(between)}B, over the slower network" if between else None)]
    yield from (f"{label:<21}{text}" for label, text in rows if text)


def remat(tried: list[Any]) -> str:
    """Returns what `model.remat: auto` comes to, and why."""
    from orchestrator.planning.report import scaled

    *others, (policy, _) = tried
    needs = "; ".join(f"{other}: {'more than there is' if need is None else f'{scaled(need)}B'}" for other, need in others)
    return policy + (f" ({needs})" if needs else "")


def _by_kind(exchanged: list[Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for kind, scope, _, size in exchanged:
        found[kind][scope] = size
    return found


if __name__ == "__main__":
    sys.exit(main())
