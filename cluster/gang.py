"""The gang: one host agent on each machine of a run.

Hosts sit on seats. The hosts that a run cannot do without share one placement group, all of them or none; each further seat, for
a host that may come later or for a spare, has a group of its own, so that a missing one holds nothing up. TPU hosts sit on whole
slices (`slices.py`), each on the machine whose worker id is the host's place in its slice. Agents and groups outlive their
driver: the next one adopts them, or clears them away, or they leave by themselves when their lease ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from cluster import groups
from cluster.agent import LEASE_S
from cluster.capacity import explain_missing
from cluster.lease import StaleDriver
from cluster.leftovers import clear, find_agent
from cluster.places import Place, Places, living_nodes, place_of
from cluster.seats import AgentMaker, Seat
from cluster.topology import (
    HostsConfig,
    compile_cache_dir,
    devices_per_host,
    num_hosts,
    slice_of,
    strategy,
)

__all__ = ["AdoptError", "Gang", "GangTimeout", "Seat", "StaleDriver", "adopt", "clear", "living_nodes", "reserve"]

TRAINING_MODULE = "trainers.worker"
CACHE_DIR = "~/.cache/gangway/compile"
AGENT_START_TIMEOUT_S = 60.0
"""For a Ray actor to answer once its place is reserved."""
ADOPT_TIMEOUT_S = 10.0
"""For the agents of a gang that is to be adopted."""
PROBE_INTERVAL_S = 2.0
"""How often agents that are no members are asked whether they are there, which also renews their lease."""
REPLACEMENT_INTERVAL_S = 2.0
"""How often an agent that has died is replaced."""
PROBE_TIMEOUT_S = 10.0
"""For an agent that had answered before; later it counts as not available."""
RELEASE_TIMEOUT_S = 5.0


class GangTimeout(Exception):
    """The machines of the gang were not to be had in time; the message says what is missing."""


class AdoptError(Exception):
    """What an earlier driver left is not a gang that could go on; the message says why."""


def reserve(
    config: HostsConfig,
    run_name: str,
    *,
    log_dir: str,
    epoch: int = 0,
    lease_s: float = LEASE_S,
    cache_dir: str = CACHE_DIR,
    module: str = TRAINING_MODULE,
    avoid_nodes: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Gang:
    """Takes the machines of the gang and starts an agent on each: at least `min_hosts`, all of those or none.

    More seats, up to `num_hosts` and for spares, are asked for at once; after at most `config.wait_for_max_s` the gang begins
    with what there is of them. `run_name` must be unique among the cluster's runs. `log_dir` is a local folder of each machine
    (or one they share); `~` in `cache_dir` is the machine's. Raises GangTimeout, with nothing left reserved, if the machines are
    not there within `timeout_s` (default: the configuration's).
    """
    maker = AgentMaker(config, run_name, epoch=epoch, lease_s=lease_s, log_dir=log_dir, cache_dir=cache_dir, module=module)
    gang = Gang(maker, avoid_nodes)
    try:
        gang._take_hosts(config.start_timeout_s if timeout_s is None else timeout_s)
    except BaseException:  # an interrupt too must leave nothing behind
        gang.release()
        raise
    return gang


def adopt(
    config: HostsConfig,
    run_name: str,
    record: Mapping[str, Any],
    *,
    log_dir: str,
    epoch: int,
    lease_s: float = LEASE_S,
    cache_dir: str = CACHE_DIR,
    module: str = TRAINING_MODULE,
) -> Gang:
    """Takes the lead of the agents that another driver's gang had when it wrote `record`, and removes what else the run has in
    the cluster. Seats that are no members and do not answer become pending ones; `leads` says what each member is at.

    Raises AdoptError unless all members answer, with one generation: `clear` and `reserve` then. Raises StaleDriver if a driver
    with a newer epoch leads them.
    """
    maker = AgentMaker(config, run_name, epoch=epoch, lease_s=lease_s, log_dir=log_dir, cache_dir=cache_dir, module=module)
    gang = Gang(maker)
    gang._adopt(record)
    return gang


class Gang:
    """The seats of a run and who sits there. Made by `reserve` or `adopt`. Not for several threads at a time.

    The driver calls `refresh` about once a second: it keeps the lease of those agents that nothing else is asked of.
    """

    def __init__(self, maker: AgentMaker, avoid_nodes: Sequence[str] = ()):
        self.config, self.run_name, self.epoch = maker.config, maker.run_name, maker.epoch
        self.seats: list[Seat] = []
        self.members: list[Seat] = []
        """In host order: `members[i]` is JAX's process i."""
        self.leads: list[dict[str, Any]] = []
        """After `adopt`: what the agent of each member said when this driver took the lead (`HostAgent.lead`)."""
        self._maker, self._avoid_nodes = maker, tuple(avoid_nodes)
        self._places = Places(self.config, self.run_name, self.epoch)
        self._preparation: dict[str, Any] | None = None

    @property
    def agents(self) -> list[Any]:
        """The members' actor handles in host order."""
        return [seat.agent for seat in self.members]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """What each member's agent last said of itself, in host order: host_ip, node_id, pid, ..."""
        return [seat.description or {} for seat in self.members]

    def slice_of(self, host: int) -> int:
        """The TPU slice that a host belongs to; 0 elsewhere."""
        return slice_of(self.config, host) if self.config.kind == "tpu" else 0

    def orders(self, host: int) -> dict[str, Any]:
        """What the machines add to the orders of a host's training process."""
        config = self.config
        return {
            "local_device_ids": list(range(devices_per_host(config))) if config.kind == "gpu" else None,
            "slice": self.slice_of(host),
            # By rank, not by seat: whoever takes a host's place finds the programs of that place compiled.
            "cache_dir": compile_cache_dir(config, host, self._maker.cache_dir) if config.kind == "cpu" else None,
        }

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a member's agent in this driver's name; returns Ray's reference to the answer."""
        return self.ask(self.members[host], method, *args, **kwargs)

    def ask(self, seat: Seat, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same for any seat."""
        return getattr(seat.agent, method).remote(*args, epoch=self.epoch, **kwargs)

    def prepare(self, preparation: dict[str, Any]) -> None:
        """Starts the standbys of all agents, those of later included, without waiting for any.

        A `go` that follows at once waits for a first preparation, but may still take a standby made with an earlier one.
        """
        self._preparation = preparation
        for seat in self.seats:
            self.ask(seat, "prepare", preparation)

    def record(self) -> dict[str, Any]:
        """What another driver needs to adopt this gang, JSON-able. It changes with `set_members`, `lose`, `fill_vacant` and
        `refresh`."""
        return {
            "hosts": dataclasses.asdict(self.config),
            "coordinator_ip": self._maker.coordinator_ip,
            "seats": [seat.record() for seat in self.seats],
            "members": [seat.number for seat in self.members],
            **self._places.record(),
        }

    # ------------------------------------------------------------------ who sits where

    def set_members(self, seats: Iterable[Seat]) -> None:
        """Makes these the gang, in this order. Raises ValueError if one is not available, or comes twice."""
        seats = list(seats)
        for seat in seats:
            if not seat.available:
                raise ValueError(f"seat {seat.number} of run {self.run_name!r} is not available: no agent has answered there")
        if len(set(seats)) < len(seats):
            raise ValueError(f"a seat comes twice among {[seat.number for seat in seats]}")
        self.members = seats
        for seat in seats:
            seat.lost = False

    def refresh(self) -> list[Seat]:
        """The seats that are available now. Never waits.

        One whose agent has died gets a new one, unless it is a member that is not lost yet: that is for `lose`. Raises
        StaleDriver if a newer driver leads the agents.
        """
        for seat in self.seats:
            self._probe(seat)
        asked = {seat.probe: seat for seat in self.seats if seat.probe is not None}
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else ():
            self._take_answer(asked[ref], ref)
        return [seat for seat in self.seats if seat.available]

    def wait_available(self, count: int, timeout_s: float) -> list[Seat]:
        """Waits until so many seats are available, members included, at most `timeout_s`; returns those that are."""
        groups.wait_until(lambda: len(self.refresh()) >= count, timeout_s)
        return [seat for seat in self.seats if seat.available]

    def lose(self, seat: Seat, avoid_nodes: Sequence[str] = (), *, fill: bool = True) -> None:
        """Ends the agent of a seat, whatever is left of it, and asks for a new one (without `fill`: `fill_vacant` will); until
        that answers, the seat is pending.

        It sits in the same place; if that is on one of the machines to avoid, or its machine is gone, in one that was left and
        has a machine, or in a group of its own that avoids them. Called without machines to avoid, it may come back to one that
        it had to avoid. A TPU host always sits in the same place: to leave a slice, release the gang and reserve another one.
        """
        ray.kill(seat.agent)
        seat.description, seat.probe, seat.lost = None, None, True
        node_id = seat.place.node_id()
        moving_helps = avoid_nodes or seat.avoid_nodes or self._places.vacant
        elsewhere = node_id in avoid_nodes or (node_id is None and moving_helps)
        if elsewhere and self.config.kind != "tpu":
            seat.place = self._places.exchange(seat.place, seat.number, avoid_nodes)
        seat.vacant, seat.avoid_nodes = True, tuple(avoid_nodes)
        if fill:
            self.fill_vacant()

    def fill_vacant(self) -> None:
        """Asks for an agent on every seat that has been left without one."""
        for seat in self.seats:
            if seat.vacant:
                self._fill(seat)

    def put_up_with_any(self) -> bool:
        """Lets seats without an agent come back to the machines that they were to avoid. False if there are none."""
        kept_away = [seat for seat in self.seats if not seat.available and seat.avoid_nodes]
        for seat in kept_away:
            self.lose(seat)
        return bool(kept_away)

    def release(self) -> None:
        """Ends all agents, and with them their processes, and gives the machines back; not if a newer driver leads them."""
        asked = [self.ask(seat, "shutdown") for seat in self.seats if seat.available]
        for ref in ray.wait(asked, num_returns=len(asked), timeout=RELEASE_TIMEOUT_S)[0] if asked else ():
            try:
                ray.get(ref)
            except StaleDriver:
                self.seats, self.members = [], []
                self._places.forget()
                return
            except ray.exceptions.RayActorError:  # gone before
                pass
        for seat in self.seats:
            ray.kill(seat.agent)
        self._places.give_all_back()
        self.seats, self.members = [], []

    # ------------------------------------------------------------------ taking machines

    def _take_hosts(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        try:
            places = self._places.take_base(deadline_s, self._avoid_nodes)
        except TimeoutError as error:
            raise self._explained(timeout_s) from error
        nodes = groups.node_ids(places[0].group)
        self._maker.coordinator_ip = next(node.ip for node in living_nodes() if node.node_id == nodes[0])
        base = [self._add_seat(place) for place in places]
        further = num_hosts(self.config) - len(base)
        avoid = [*self._avoid_nodes, *(nodes.values() if self._spread() else ())]
        optional = [self._add_seat(self._places.ask_for_one(len(self.seats), avoid)) for _ in range(further + self.config.spares)]
        begin = [*base, *self._placed(optional, further)]
        self._wait_for_answers(begin, max(deadline_s, time.monotonic() + AGENT_START_TIMEOUT_S))
        self.set_members(begin)

    def _placed(self, seats: Sequence[Seat], count: int) -> list[Seat]:
        """At most `count` of these seats for which Ray finds room while the start waits for them."""

        def found() -> list[Seat]:
            return [seat for seat in seats if groups.is_created(seat.place.group)]

        if count:
            groups.wait_until(lambda: len(found()) >= count, self.config.wait_for_max_s)
        return found()[:count]

    def _explained(self, timeout_s: float) -> GangTimeout:
        why = explain_missing(self.config, living_nodes(), self._avoid_nodes)
        return GangTimeout(f"the hosts of run {self.run_name!r} could not be had within {timeout_s:g} s: {why}")

    # ------------------------------------------------------------------ agents

    def _add_seat(self, place: Place) -> Seat:
        seat = Seat(len(self.seats), place, "", None)
        self._fill(seat)
        self.seats.append(seat)
        return seat

    def _fill(self, seat: Seat) -> None:
        seat.name, seat.agent = self._maker.create(seat.place, seat.number)
        seat.vacant = False
        seat.probe, seat.next_probe_s = self.ask(seat, "describe"), time.monotonic() + PROBE_INTERVAL_S
        if self._preparation is not None:
            self.ask(seat, "prepare", self._preparation)

    def _wait_for_answers(self, seats: Sequence[Seat], deadline_s: float) -> None:
        try:
            found = ray.get([seat.probe for seat in seats], timeout=max(0.0, deadline_s - time.monotonic()))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise GangTimeout(f"an agent of run {self.run_name!r} did not start: {error}") from error
        for seat, description in zip(seats, found, strict=True):
            seat.description, seat.probe = description, None

    def _probe(self, seat: Seat) -> None:
        if seat.vacant:
            return
        now_s = time.monotonic()
        if seat.probe is None and now_s >= seat.next_probe_s:
            seat.probe, seat.next_probe_s = self.ask(seat, "describe"), now_s + PROBE_INTERVAL_S
        elif seat.available and now_s > seat.next_probe_s + PROBE_TIMEOUT_S:
            seat.description = None  # it will be available again if it ever answers
        elif not seat.available and now_s >= seat.next_search_s and self._is_for_refresh(seat):
            seat.next_search_s = now_s + PROBE_INTERVAL_S
            self._go_where_room_is(seat)

    def _go_where_room_is(self, seat: Seat) -> None:
        """The groups of a run compete for a machine that comes: a place that was left may have got the one a seat waits for."""
        if self._places.vacant and seat.place.node_id() is None:
            avoid = {*seat.avoid_nodes, *(self._taken(seat) if self._spread() else ())}
            if self._places.vacant_elsewhere(avoid) is not None:
                self.lose(seat, tuple(avoid))

    def _is_for_refresh(self, seat: Seat) -> bool:
        """Whether its agent is replaced by `refresh`, and not only by `lose`."""
        return seat.lost or seat not in self.members

    def _taken(self, seat: Seat) -> list[str]:
        """The machines on which the other seats' agents are."""
        return [other.node_id for other in self.seats if other.node_id is not None and other is not seat]

    def _take_answer(self, seat: Seat, ref: Any) -> None:
        try:
            seat.description, seat.probe = ray.get(ref), None
        except ray.exceptions.RayActorError:
            seat.description = None
            # At once, but not all the time, should none live there.
            if self._is_for_refresh(seat) and time.monotonic() >= seat.next_replacement_s:
                seat.next_replacement_s = time.monotonic() + REPLACEMENT_INTERVAL_S
                self.lose(seat)
            return
        taken = self._taken(seat)
        if self._spread() and seat.place.alone and seat.node_id in taken:
            self.lose(seat, taken)

    def _spread(self) -> bool:
        return strategy(self.config) == "STRICT_SPREAD"

    # ------------------------------------------------------------------ adopting

    def _adopt(self, record: Mapping[str, Any]) -> None:
        if record["hosts"] != dataclasses.asdict(self.config):
            raise AdoptError("the configuration of the hosts is another one now")
        self._maker.coordinator_ip = record["coordinator_ip"]
        self._places.recall(record)
        living = groups.living()
        dead = []
        for about in record["seats"]:
            seat = Seat(about["number"], place_of(about), about["name"], None, avoid_nodes=tuple(about["avoid_nodes"]))
            self.seats.append(seat)
            seat.agent = find_agent(seat.name)
            if seat.agent is None:
                dead.append(seat)
            else:
                seat.probe, seat.next_probe_s = seat.agent.lead.remote(self.epoch), time.monotonic() + PROBE_INTERVAL_S
        by_number = {seat.number: seat for seat in self.seats}
        self.members = [by_number[number] for number in record["members"]]
        asked = [seat.probe for seat in self.members if seat.probe is not None]
        ray.wait(asked, num_returns=len(asked), timeout=ADOPT_TIMEOUT_S)
        self.leads = [self._lead_of(host, seat) for host, seat in enumerate(self.members)]
        generations = [lead["generation"] for lead in self.leads]
        if len(set(generations)) != 1 or generations[0] is None:
            raise AdoptError(f"the hosts are not in one generation: {generations}")
        names = {info["name"] for key, info in living.items() if key in record["groups"]}
        clear(self.run_name, keep={*names, *(seat.name for seat in self.seats)})
        for seat in dead:
            if seat.place.group.id.hex() not in living:
                seat.place = self._places.ask_for_one(seat.number, self._avoid_nodes)
            self._fill(seat)

    def _lead_of(self, host: int, seat: Seat) -> dict[str, Any]:
        if seat.probe is None:
            raise AdoptError(f"the agent of host {host} is gone")
        try:
            seat.description = ray.get(seat.probe, timeout=0)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise AdoptError(f"the agent of host {host} does not answer: {error}") from error
        seat.probe = None
        assert seat.description is not None
        return seat.description
