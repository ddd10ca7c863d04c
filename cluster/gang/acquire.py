"""How a driver gets its gang: it reserves a new one, or adopts the gang of the previous driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.agent.agent import LEASE_S
from cluster.agent.driver_lease import StaleDriver
from cluster.gang.adoption import AdoptError
from cluster.gang.gang import Gang, GangTimeout
from cluster.gang.slice_gang import SliceGang
from cluster.gang.slots import AgentMaker
from cluster.hosts.config import HostsConfig
from cluster.placement.cleanup import clear
from gangway.waits import CheckStop, do_nothing

__all__ = ["AdoptError", "GangTimeout", "StaleDriver", "adopt", "clear", "reserve"]

TRAINING_MODULE = "trainers.worker"
CACHE_DIR = "~/.cache/gangway/compile"
KINDS: Mapping[str, type[Gang]] = {"cpu": Gang, "gpu": Gang, "tpu": SliceGang}


def reserve(
    config: HostsConfig,
    run_name: str,
    *,
    log_dir: str,
    driver_term: int = 0,
    lease_s: float = LEASE_S,
    cache_dir: str = CACHE_DIR,
    module: str = TRAINING_MODULE,
    avoid_nodes: Sequence[str] = (),
    timeout_s: float | None = None,
    check_stop: CheckStop = do_nothing,
) -> Gang:
    """Reserves the machines of the gang and starts an agent on each: at least `min_hosts`, all of those or none.

    More slots, up to `num_hosts` and for spares, are asked for at the same time. After at most `config.wait_for_max_s` the gang
    begins with those that are there. `run_name` must be unique among the runs of the cluster. The logs are copied to `log_dir`, a
    folder that the machines share, or a URL. `~` in `cache_dir` is expanded on each machine. Raises GangTimeout if the machines
    are not there within `timeout_s` (default: the configuration's), and what `check_stop` raises, which is called at least once a
    second. After an exception nothing is left reserved.
    """
    maker = AgentMaker(
        config, run_name, driver_term=driver_term, lease_s=lease_s, log_dir=log_dir, cache_dir=cache_dir, module=module
    )
    gang = KINDS[config.kind](maker, avoid_nodes)
    try:
        gang.take_hosts(config.start_timeout_s if timeout_s is None else timeout_s, check_stop)
    except BaseException:  # an interrupt, too, must leave nothing reserved
        gang.release()
        raise
    return gang


def adopt(
    config: HostsConfig,
    run_name: str,
    record: Mapping[str, Any],
    *,
    log_dir: str,
    driver_term: int,
    lease_s: float = LEASE_S,
    cache_dir: str = CACHE_DIR,
    module: str = TRAINING_MODULE,
    check_stop: CheckStop = do_nothing,
) -> Gang:
    """Takes over the agents of another driver's gang, as `record` describes it, and removes what else the run has in the cluster.

    Slots that are not members and do not answer become pending. `Gang.leads` has the state of each member. Raises AdoptError
    unless all hosts of the newest generation answer: then call `clear` and `reserve`. Raises StaleDriver if a driver with a newer
    term commands the agents. What `check_stop` raises ends the wait; the gang goes on, but its agents obey this driver from now
    on.
    """
    maker = AgentMaker(
        config, run_name, driver_term=driver_term, lease_s=lease_s, log_dir=log_dir, cache_dir=cache_dir, module=module
    )
    gang = KINDS[config.kind](maker)
    gang.take_over(record, check_stop)
    return gang
