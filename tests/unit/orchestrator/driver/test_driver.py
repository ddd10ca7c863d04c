"""The driver against a gang without Ray, processes or time: nobody who is well is harmed, and every wait ends."""

from __future__ import annotations

import pytest

from orchestrator.driver.ending import Superseded, TrainingFailed
from orchestrator.run_state.requests import Request
from tests.unit import fake_gang
from tests.unit.driving import Launched
from tests.unit.fake_gang import World


def some(values, each):
    """Each so manieth value in `make test`, the others in `make test-all`."""
    slow = pytest.mark.slow("one of many moments")
    return [pytest.param(value, marks=() if number % each == 0 else slow) for number, value in enumerate(values)]


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.violations == []


def finished(launched, world):
    result = launched.run()
    assert (result["stop_reason"], result["steps"]) == ("max_steps", world.max_steps)
    assert world.commits[-1][1] == world.max_steps
    totals = launched.launch.progress.goodput.totals(world.clock())
    assert sum(totals.values()) == pytest.approx(launched.launch.progress.goodput.wall_s(world.clock()))
    return launched.kinds()


def process_of(world, host):
    """Of the newest generation."""
    job = max(world.jobs.values(), key=lambda job: job.generation)
    return job.processes[host]


def kill_machine(world, host):
    process_of(world, host).agent.die()


def test_undisturbed(world):
    launched = Launched(world)
    assert finished(launched, world) == []
    assert world.files["published"] == [5 * n for n in range(1, 13)]
    assert not any(agent.alive for agent in world.agents)


def test_the_console_shows_what_a_host_prints_whose_lines_are_asked_for(world):
    launched = Launched(world, console_hosts=[1])
    printed = {"ev": "printed", "lines": ["hello"], "left_out": 0}
    world.at(4.0, lambda: process_of(world, 1).agent.tell(printed))
    assert finished(launched, world) == []
    assert [agent.orders["shown_lines"] for agent in world.agents] == [0, 100]
    assert [event for event in launched.told() if event["ev"] == "printed"] == [{**printed, "host": 1}]


def test_many_skipped_batches_are_one_incident_and_a_few_lines(world):
    launched = Launched(world)
    skip = {"ev": "anomaly", "kind": "non_finite", "loss": None, "expected": None, "action": "skip", "restored_step": None}

    def tell():
        for batch in range(3, 40):
            process_of(world, 0).agent.tell({**skip, "batch_index": batch, "skipped_batches": [batch]})

    world.at(4.0, tell)
    assert finished(launched, world) == ["non_finite"]
    assert [event["incident"]["step"] for event in launched.told() if event["ev"] == "incident"] == [3]
    notes = [event["message"] for event in launched.told() if event["ev"] == "note" and "not finite" in event["message"]]
    assert [note.partition(" in ")[2] for note in notes] == [f"{n} batches, 3 to {n + 2}" for n in (2, 4, 8, 16, 32)]
    (kept,) = launched.launch.progress.incidents
    assert kept.evidence["skipped_batches"] == [*range(3, 40)]


def test_a_process_is_killed(world):
    launched = Launched(world)
    steps = []
    for tenth in range(500):
        world.at(0.1 * tenth, lambda: steps.append(launched.launch.progress.step))
    world.at(4.0, lambda: process_of(world, 1).agent.end_process(told=True))
    assert finished(launched, world) == ["process_crash"]
    (incident,) = launched.launch.progress.incidents
    trained = [step for step in steps if step is not None]
    (back,) = (at for at in range(1, len(trained)) if trained[at] < trained[at - 1])
    assert incident.resumed_step <= trained[back] < trained[back - 1] <= incident.step, "those that are trained again count again"
    assert (incident.host, incident.action, incident.open) == (1, "restart", False)
    (told,) = [event["incident"] for event in launched.told() if event["ev"] == "recovered"]
    assert told["replayed_steps"] == incident.step - incident.resumed_step > 0


def test_what_comes_from_memory_is_progress_and_an_older_generation_does_not_count(world):
    """Three deaths, and one is allowed without progress; there is no checkpoint until the end. The third generation finds nothing
    in memory: from then on what its predecessors have left there is not asked for."""
    world.snapshot, world.save_steps = (0, 0), 1000
    launched = Launched(world, restart={"max_failures": 1, "backoff_initial_s": 0.0, "backoff_max_s": 0.0})
    since = []

    def kill(of, step):
        since.append(process_of(world, 1).orders["snapshots_since"])
        world.snapshot = of, step
        process_of(world, 1).agent.end_process(told=True)

    for at_s, of, step in ((4.0, 0, 8), (6.0, 1, 12), (8.0, 0, 14)):
        world.at(at_s, lambda of=of, step=step: kill(of, step))
    world.at(9.5, lambda: since.append(process_of(world, 1).orders["snapshots_since"]))
    assert finished(launched, world) == ["process_crash"] * 3
    told = [event["incident"] for event in launched.told() if event["ev"] == "recovered"]
    assert [(one["source"], one["resumed_step"]) for one in told] == [("memory", 8), ("memory", 12), ("storage", 0)]
    assert since == [0, 0, 0, 1]


def test_an_agent_dies_and_a_spare_takes_its_place(world):
    launched = Launched(world, spares=1)
    world.at(4.0, lambda: kill_machine(world, 0))
    assert finished(launched, world) == ["host_lost"]
    assert launched.launch.progress.incidents[0].action == "replace"


def test_a_frozen_process_is_a_hang(world):
    launched = Launched(world)
    world.at(4.0, lambda: setattr(process_of(world, 1), "frozen", True))
    assert finished(launched, world) == ["hang"]


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_failure_is_timed_by_the_drivers_clock_whatever_the_hosts_say(world, ahead_s):
    """A clock that was an hour behind had counted the whole generation as time to notice the failure."""
    launched = Launched(world)
    failed_at_s = []

    def crash():
        agent = process_of(world, 1).agent
        agent.ahead_s = ahead_s
        failed_at_s.append(world.clock())
        agent.end_process(told=True)

    world.at(6.3, crash)
    assert finished(launched, world) == ["process_crash"]
    assert launched.launch.progress.incidents[0].failed_at_s == pytest.approx(failed_at_s[0], abs=0.2)


def away(world, host, seconds, unavailable=False):
    agent = process_of(world, host).agent
    agent.out_of_reach_s, agent.unavailable = (world.now_s, world.now_s + seconds), unavailable


@pytest.mark.parametrize("unavailable", [False, True], ids=["no answer", "unavailable"])
def test_an_agent_that_is_out_of_reach_for_a_moment_is_not_given_up(world, unavailable):
    world.max_steps = 150
    launched = Launched(world)
    world.at(4.0, lambda: away(world, 1, 9.0, unavailable))
    assert finished(launched, world) == []


@pytest.mark.slow("drives through many failures")
@pytest.mark.parametrize("unavailable", [False, True], ids=["no answer", "unavailable"])
def test_an_agent_that_stays_out_of_reach_is_given_up(world, unavailable):
    world.max_steps = 2000
    launched = Launched(world, spares=1)
    world.at(4.0, lambda: away(world, 1, 1000.0, unavailable))
    assert finished(launched, world) == ["host_lost"]
    gone_s = launched.launch.progress.incidents[0].failed_at_s - world.clock() + world.now_s
    assert 20.0 < gone_s - 4.0 < 30.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stall_s", [21.0, 90.0])
@pytest.mark.parametrize("effect", some(range(60, 160, 9), each=4))
def test_a_driver_that_stalls_harms_nobody(effect, stall_s):
    """Stuck, or stopped, for longer than any answer may take: what is silent meanwhile is the driver."""
    world = World(max_steps=400)
    launched = Launched(world)
    world.stall_at = {effect: stall_s}
    assert finished(launched, world) == []
    assert world.violations == []


@pytest.mark.parametrize("effect", some(range(130, 136), each=3))
def test_a_driver_that_stalls_while_it_handles_a_failure_gives_up_no_healthy_host(effect):
    world = World(max_steps=200)
    launched = Launched(world)
    world.at(6.0, lambda: process_of(world, 1).agent.end_process(told=True))
    world.stall_at = {effect: 30.0}
    assert finished(launched, world) == ["process_crash"]
    assert world.violations == []


@pytest.mark.slow("drives through many failures")
def test_a_driver_that_stalls_for_longer_than_the_lease_goes_on_with_new_agents(world):
    world.max_steps = 3000
    launched = Launched(world)
    world.stall_at = {100: 150.0}
    assert finished(launched, world) == ["host_lost"]
    assert len(world.agents) > 2


def test_storage_that_hangs_costs_no_step(world):
    world.max_steps = 300
    launched = Launched(world)
    world.at(3.0, lambda: setattr(world, "storage_free_s", 25.0))
    world.at(4.0, lambda: process_of(world, 1).agent.end_process(told=True))
    assert finished(launched, world) == ["process_crash"]
    assert launched.launch.progress.incidents[0].total_s < 2.0


@pytest.mark.sampled(15)
@pytest.mark.parametrize("effect", some([*range(1, 60, 3), *range(60, 140)], each=3))
def test_a_driver_may_die_before_anything_it_does(effect):
    """Its successor takes the gang over, or clears it away; checkpoints can be committed again; nothing is trained twice."""
    world = World()
    launched = Launched(world)
    world.die_at = {effect}
    world.at(5.0, lambda: process_of(world, 1).agent.end_process(told=True) if world.jobs else None)
    kinds = finished(launched, world)
    assert world.violations == []
    assert kinds.count("process_crash") <= 1
    assert launched.num_drivers == 2


def test_after_an_adoption_checkpoints_are_committed_under_the_new_driver(world):
    launched = Launched(world)
    world.die_at = {100}
    assert finished(launched, world) == ["driver_lost"]
    assert launched.launch.progress.incidents[0].action == "adopt"
    assert len(world.jobs) == 1
    assert world.commits == [(0, step) for step in range(10, 61, 10)]


def test_nothing_is_published_twice_after_an_adoption(world):
    launched = Launched(world)
    world.die_at = {80, 130}
    finished(launched, world)
    published = world.files["published"]
    assert sorted(set(published)) == [5 * n for n in range(1, 13)]
    lines = [event for event in launched.told() if event["ev"] == "metrics"]
    assert len({event["step"] for event in lines}) == 12


def test_budgets_outlive_a_driver(world):
    """The failures that its predecessor counted are the next one's too."""
    launched = Launched(world, restart={"max_failures": 2})

    def kill_again():
        job = max(world.jobs.values(), key=lambda job: job.generation, default=None)
        if job is not None and not any(process.done for process in job.processes.values()):
            job.processes[0].agent.end_process(told=True)
        if world.now_s < 60:
            world.at(0.5, kill_again)

    world.at(1.5, kill_again)
    world.die_at = {80}
    with pytest.raises(TrainingFailed, match="failures without a new checkpoint"):
        launched.run()
    assert launched.num_drivers == 2
    assert launched.kinds().count("process_crash") == 3


def test_a_superseded_driver_stops_at_once_and_leaves_the_gang_alone(world):
    launched = Launched(world)
    driver = launched.start_driver()

    def take_over():
        world.driver_term += 1
        launched.lost.set()

    world.at(4.0, take_over)
    with pytest.raises(Superseded):
        driver.run()
    assert all(agent.alive for agent in world.agents)
    assert world.now_s < 5.0


@pytest.mark.parametrize(
    ("when_s", "doing"),
    [(0.5, "machines are being reserved"), (3.0, "before the first step")],
    ids=["reserving", "starting"],
)
def test_a_request_to_stop_is_heard_in_every_wait(world, monkeypatch, when_s, doing):
    launched = Launched(world)
    monkeypatch.setattr(fake_gang, "COMPILE_S", 100.0)
    world.at(when_s, lambda: launched.board.request_stop("interrupted"))
    with pytest.raises(TrainingFailed, match=doing):
        launched.run()
    assert world.now_s < when_s + 2.0
    assert not any(agent.alive for agent in world.agents)


def request(kind):
    return Request(kind=kind, launch_id="launch", by="a user", at_s=0.0)


def test_a_request_in_the_storage_stops_the_run_with_its_state_saved(world):
    world.max_steps = 2000
    launched = Launched(world)
    world.at(6.0, lambda: world.files.update(requests=[request("stop")]))
    result = launched.run()
    assert result["stop_reason"] == "requested"
    assert 6.0 < world.now_s < 12.0
    assert world.commits[-1][1] == result["steps"]


def test_a_request_in_the_storage_lets_all_hosts_save_once_and_the_run_go_on(world):
    world.max_steps = 200
    launched = Launched(world)
    world.at(6.0, lambda: world.files.update(requests=[request("save")]))
    assert finished(launched, world) == []
    assert [host for host, _ in world.save_orders] == [0, 1]
    assert "a user asks this run to save" in [event.get("message") for event in launched.told()]


@pytest.mark.parametrize("where", ["board", "storage"])
def test_a_request_to_stop_is_heard_while_the_run_waits_for_machines(world, where):
    launched = Launched(world)

    def ask():
        if where == "board":
            launched.board.request_stop("interrupted")
        else:
            world.files["requests"] = [request("stop")]

    def lose_one():
        world.can_start_agents = False
        process_of(world, 1).agent.die()

    world.at(4.0, lose_one)
    world.at(50.0, ask)
    with pytest.raises(TrainingFailed, match="the run waits for machines"):
        launched.run()
    assert 50.0 < world.now_s < 53.0
    assert launched.launch.progress.incidents[0].action == "give up"


def backing_off_from_3_s(world):
    """A launch whose second failure without progress is followed by a minute's wait."""

    def kill():
        process_of(world, 1).agent.end_process(told=True)

    world.at(2.0, kill)
    world.at(3.0, kill)
    return Launched(world, restart={"backoff_initial_s": 60.0})


def test_a_request_to_stop_is_heard_while_it_backs_off(world):
    launched = backing_off_from_3_s(world)
    world.at(10.0, lambda: launched.board.request_stop("interrupted"))
    with pytest.raises(TrainingFailed, match="before the next try"):
        launched.run()
    assert world.now_s < 12.0


def test_an_agent_that_dies_while_the_run_backs_off_is_replaced_meanwhile(world):
    launched = backing_off_from_3_s(world)
    world.at(10.0, lambda: process_of(world, 0).agent.die())  # noqa: PLW0108 - at that time
    assert launched.run()["stop_reason"] == "max_steps"
    assert launched.kinds() == ["process_crash", "process_crash"]


def test_a_request_to_stop_saves_first(world):
    launched = Launched(world)
    world.at(4.0, lambda: launched.board.request_stop("interrupted"))
    result = launched.run()
    assert result["stop_reason"] == "interrupted"
    assert world.commits[-1][1] == result["steps"] < world.max_steps


def test_a_checkpoint_that_was_reported_at_the_last_moment_counts(world):
    """A host tells of a save and dies; the driver has not polled it since."""
    launched = Launched(world)

    def save_and_die():
        process = process_of(world, 0)
        other = process_of(world, 1).agent
        process.agent.out_of_reach_s = (world.now_s, world.now_s + 1.0)
        world.commits.append((0, 17))
        process.agent.tell({"ev": "saved", "step": 17, "path": "/checkpoints/17"})
        other.end_process(told=True)

    world.at(3.05, save_and_die)
    finished(launched, world)
    assert launched.launch.progress.history[0].checkpoint_step == 17


def test_orders_say_what_the_run_has_committed_and_who_gives_them(world):
    """A generation that does not find it where the checkpoints are does not begin again at step 0."""
    launched, orders = Launched(world), []

    def look():
        orders.append(process_of(world, 1).agent.orders)

    world.at(3.9, look)
    world.at(4.0, lambda: process_of(world, 1).agent.end_process(told=True))
    world.at(8.0, look)
    assert finished(launched, world) == ["process_crash"]
    before, after = orders
    committed_step = max(step for generation, step in world.commits if generation == before["generation"])
    assert (before["committed_step"], after["committed_step"]) == (None, committed_step)
    assert [order["driver_term"] for order in orders] == [1, 1]
    assert [order["generation"] for order in orders] == [0, 1]
