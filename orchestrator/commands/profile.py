"""`python -m orchestrator.commands.profile RUN_DIR|CONFIG`: profiles the next steps of a running run.

To be used on a machine of the run's Ray cluster. The files are for XProf and TensorBoard.
Exit status: 0; 1 when a host could not be profiled; 2 when there is no such run, or it is not running.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from typing import Any

from gangway.first_line import say
from gangway.program import EXIT_FINE, command
from gangway.storage import documents
from gangway.wire.answers import Profiled
from gangway.wire.orders import Profile
from orchestrator.config.locate import REFUSALS, NoRunError, parser_of_run, run_of
from orchestrator.driver import ray_cluster
from orchestrator.run_state.launch import read_gang

EXIT_NOT_ALL = 1
STEPS = 3
TIMEOUT_S = 120.0
CALL_GRACE_S = 15.0
"""How long to wait for the agents beyond the time that they wait themselves."""


@command(*REFUSALS)
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_run("orchestrator.commands.profile", "Profiles a run while it goes on.", example="runs/spirals --steps 5")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"how many to record (default: {STEPS})")
    parser.add_argument("--hosts", type=int, nargs="+", default=[0], metavar="HOST", help="which hosts, from 0 (default: 0)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"default: {TIMEOUT_S:g}")
    options = parser.parse_intermixed_args(argv)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    say(f"looking for the run {options.run}", stream=sys.stderr)
    run = run_of(options.run, options.overrides)
    outcomes = profile(run.url, options.steps, options.hosts, options.timeout)
    for outcome in outcomes:
        print(f"host {outcome['host']}: {outcome['problem'] or outcome['path']}")
    if written := [outcome["path"] for outcome in outcomes if outcome["problem"] is None and outcome["path"]]:
        print(how_to_look(written[0].rsplit("/", 2)[0]))
    return EXIT_FINE if all(outcome["problem"] is None for outcome in outcomes) else EXIT_NOT_ALL


def profile(run_dir: str, steps: int, hosts: Sequence[int], timeout_s: float = TIMEOUT_S) -> list[Profiled]:
    """Profiles these hosts; returns the outcome of each. Raises NoRunError if the run is not running."""
    gang = read_gang(run_dir)
    if gang is None:
        raise NoRunError(f"the run in {run_dir} does not go on now: there is no gang of it")
    connect(gang["address"])
    agents = find_agents(gang["gang"]["slots"])
    if not agents:
        raise NoRunError(f"the run in {run_dir} does not go on now: none of its agents is in the Ray cluster {gang['address']}")
    # The answer is found by this id: profiles that nobody asked for here are events too.
    order: Profile = {"cmd": "profile", "id": uuid.uuid4().hex[:12], "steps": steps}
    silence = "no training process of this host answers"
    found: dict[int | None, Profiled] = {host: {"host": host, "path": None, "problem": silence} for host in hosts}
    found |= {answer["host"]: answer for answer in ask(agents, order, hosts, timeout_s)}
    return [found[host] for host in sorted({*hosts})]


def how_to_look(folder: str) -> str:
    """Returns what people do with the profiles below this folder, `step-N/host-N`."""
    first = f"copy {folder} to a FOLDER of this machine, then " if documents.is_url(folder) else ""
    shown = "FOLDER" if first else folder
    return f"to look at them: {first}xprof --logdir {shown} (pip install xprof), or tensorboard with the same --logdir"


def connect(address: str) -> None:
    """Connects to the Ray cluster of the run. Raises NoRunError."""
    try:
        ray_cluster.join(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoRunError(f"its Ray cluster, {address}, cannot be reached from here ({error}): is the run over?") from error


def find_agents(slots: Sequence[dict[str, Any]]) -> list[Any]:
    from cluster.placement.cleanup import find_agent

    return [agent for agent in (find_agent(slot["name"]) for slot in slots) if agent is not None]


def ask(agents: Sequence[Any], order: Profile, hosts: Sequence[int], timeout_s: float) -> list[Profiled]:
    """Returns the answers of the agents of these hosts. An agent that dies gives no answer."""
    import ray

    # All agents are asked: only an agent itself knows which host of the gang it is.
    calls = [agent.profile.remote(order, list(hosts), timeout_s) for agent in agents]
    answers = []
    for ref in ray.wait(calls, num_returns=len(calls), timeout=timeout_s + CALL_GRACE_S)[0]:
        try:
            answers.append(ray.get(ref))
        except ray.exceptions.RayActorError:
            continue
    return [answer for answer in answers if answer["host"] is not None]


if __name__ == "__main__":
    sys.exit(main())
