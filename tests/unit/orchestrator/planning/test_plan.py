"""What is known of a run before machines are taken: `trainers.planning.estimate` in this process, and its report."""

import errno
import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.hosts import config as hosts_config
from gangway.errors import DataMissingError
from orchestrator.config.job import ConfigError, build, load
from orchestrator.planning import report as job_plan
from orchestrator.planning.child import PlanError
from tests import ROOT
from tests.programs.mistaken import mistake
from tests.saved import saved
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, absent_paths, from_dict
from trainers.config.data import DataConfig
from trainers.planning import estimate

SMALL = {"vocab_size": 256, "width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 48}
CONSTANT = {"name": "adamw", "schedule": {"name": "constant"}}
PARAMETERS = 256 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32) + 32
"""Tied embeddings; per layer: queries and output, keys and values, the gated MLP, two norms; the last norm."""
FACTS = {
    "train_examples": 1000,
    "eval_examples": 50,
    "max_steps": 400,
    "parameters": 1_475_712,
    "num_layers": 4,
    "tokens_per_example": 256,
    "tokens_per_step": 4096,
    "flops_per_step": 39.5e9,
    "checkpoint_bytes": 17_708_600,
    "state_bytes_per_device": 8_854_300,
}


def arguments(**changes) -> TrainingArguments:
    data = {"dataset": f"{__name__}:ten_examples", "sequence_length": 16}
    return from_dict(TrainingArguments, {"name": "x", "max_num_steps": 5, "model": SMALL, "data": data} | changes)


def test_what_is_not_here_is_wrong_if_the_hosts_cannot_have_it_and_else_not_looked_at(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 500)
    found = {"paths": [f"{tmp_path}/*.txt", f"{tmp_path}/*.csv", "gs://b/c"], "template_fields": {"path": "/x/y"}, "columns": {}}
    mixed = {"mixture": [{"name": "one", "paths": ["/nowhere/text/**/*.txt"]}]}
    beside = {"frozen": {"teacher": {"path": "/nowhere/teacher"}}, "init_from": f"{tmp_path}/none/weights"}
    wrong, elsewhere = absent_paths(arguments(data=found | mixed, **beside))
    assert [line.partition(" = ")[0] for line in wrong] == ["data.paths.1"]
    assert [*elsewhere] == ["data.mixture.0.paths.0", "init_from.path", "frozen.teacher.path"]
    # The hosts have what the folder has, and prepared tokens are read in the place of texts.
    made = arguments(data=found | mixed | {"prepared": str(tmp_path), "tokenizer": "bytes"}, **beside)
    wrong, elsewhere = absent_paths(made, str(tmp_path))
    why = f"it does not exist, and the hosts have what this folder has, {tmp_path}; put it there"
    assert wrong == [f"init_from.path = {tmp_path}/none/weights: {why}"]
    assert [*elsewhere] == ["frozen.teacher.path"]
    assert absent_paths(arguments(data={"paths": ["/nowhere"]}))[1]  # in the folder of all folders: it may be a disk of the hosts
    lacking = {"dataset": DataConfig.dataset, "paths": ["/nowhere/text"], "tokenizer": "/nowhere/tokenizer"}
    there = arguments(data=lacking | {"sequence_length": 16})
    assert "does not exist" in "".join(estimate.plan(there, num_devices=1)[0])
    problems, facts = estimate.plan(there, num_devices=1, absent=absent_paths(there)[1])
    assert problems == []
    assert (facts["parameters"], facts["train_examples"]) == (PARAMETERS, None)


class Examples:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"tokens": np.zeros(17, np.int32), "sample_id": np.int32(index)}


def ten_examples(arguments):
    return Examples(), None


def of_two_lengths(arguments):
    return [{"tokens": np.zeros(18 - index % 2, np.int32)} for index in range(10)], None


def columns(arguments):
    return {name: np.zeros((12, 17), np.int32) for name in ("tokens", "labels")}, {"tokens": np.zeros((3, 17), np.int32)}


class Stream:
    num_read = 0

    def __iter__(self):
        for _ in range(10):
            Stream.num_read += 1
            yield {"tokens": np.zeros(17, np.int32)}


def stream(arguments):
    return Stream(), None


def no_examples(arguments):
    raise DataMissingError("data.paths: nothing there")


def away(arguments):
    raise ConnectionRefusedError(errno.ECONNREFUSED, "the data server is away")


def one_dataset(arguments):
    return Examples()


class BrokenTask:
    def __init__(self, arguments):
        raise KeyError("teacher")


class WrongLoss:
    tokens_per_example = 16

    def __init__(self, arguments):
        from trainers.tasks.causal_lm import CausalLMTask

        self.build_model = CausalLMTask(arguments).build_model

    def flops_per_token(self, num_parameters):
        return 1.0

    def loss(self, model, batch):
        return batch["token"]


class OwnTrainer:
    """Implements the protocol, inherits nothing."""

    def __init__(self, arguments, dataset_train, dataset_eval):
        raise AssertionError("built only on the machines")

    train = evaluate = eval = save_pretrained = configure_model = configure_dataloaders = configure_functions = lambda self: None


class HalfATrainer:
    def train(self):
        pass

    def eval(self):
        pass


class OwnLoaders(BaseTrainer):
    def configure_dataloaders(self):
        return super().configure_dataloaders()


class OwnShapes(BaseTrainer):
    def configure_model(self):
        return super().configure_model()


# ---------------------------------------------------------------------- trainers.planning.estimate


def test_the_numbers_of_a_run():
    problems, facts = estimate.plan(arguments(global_batch_size=8), num_devices=2)
    assert problems == []
    assert facts["parameters"] == PARAMETERS
    assert facts["num_layers"] == 2
    assert facts["tokens_per_step"] == 8 * 16
    assert facts["flops_per_step"] == (6 * PARAMETERS + 6 * 2 * 16 * 32) * 8 * 16
    assert (facts["train_examples"], facts["eval_examples"], facts["max_steps"]) == (10, None, 5)
    moments, counters = 2 * 4 * PARAMETERS, facts["checkpoint_bytes"] - 3 * 4 * PARAMETERS
    assert facts["checkpoint_bytes"] == 4 * PARAMETERS + moments + counters
    assert 0 < counters < 100
    assert facts["state_bytes_per_device"] == facts["checkpoint_bytes"]


def test_the_layers_of_a_model_of_ones_own_are_not_counted():
    _, facts = estimate.plan(arguments(task="tests.programs.tiny:TableTask"), num_devices=1)
    assert facts["parameters"]
    assert "num_layers" not in facts


def test_sharded_state_takes_less_of_each_device():
    whole = estimate.plan(arguments(), num_devices=1)[1]["state_bytes_per_device"]
    _, facts = estimate.plan(arguments(mesh={"data": 1, "fsdp": 4}), num_devices=4)
    assert whole / 4 < facts["state_bytes_per_device"] < whole / 3


MIXTURE = {**SMALL, "family": "mixtral", "num_experts": 6, "experts_per_token": 2}


def test_of_a_mixture_of_experts_a_token_uses_a_part():
    made = arguments(model=MIXTURE, mesh={"data": 1, "expert": -1}, global_batch_size=6)
    problems, facts = estimate.plan(made, num_devices=3)
    assert problems == []
    experts = 2 * 3 * 32 * 48  # two layers
    assert facts["parameters"] == PARAMETERS + 5 * experts + 2 * 32 * 6  # the routers
    assert facts["active_parameters"] == facts["parameters"] - 4 * experts
    assert (facts["num_experts"], facts["experts_per_token"], facts["experts_per_device"]) == (6, 2, 2)
    # Four of the six experts are on other devices, with the moments of their parameters.
    one = estimate.plan(arguments(model=MIXTURE), num_devices=1)[1]
    assert one["state_bytes_per_device"] - facts["state_bytes_per_device"] == 4 * experts * 3 * 4
    assert facts["flops_per_step"] / facts["tokens_per_step"] == one["flops_per_step"] / one["tokens_per_step"]


def test_the_mesh_must_divide_the_experts():
    problems, _ = estimate.plan(arguments(model=MIXTURE, mesh={"data": 1, "expert": 4}), num_devices=4)
    assert problems == ["model: mesh.expert = 4: model.num_experts = 6 is not divisible by it: expected 2"]
    problems, _ = estimate.plan(arguments(mesh={"data": 1, "expert": 2}), num_devices=2)
    assert problems == ["mesh.expert = 2: the model has no experts; use mesh.data or mesh.fsdp for these devices"]
    made = arguments(loss={"load_balancing_weight": 0.01, "router_z_loss_weight": 0.1})
    assert estimate.plan(made, num_devices=1)[0] == [
        "loss.load_balancing_weight = 0.01: a model of the family llama has no experts; leave it out",
        "loss.router_z_loss_weight = 0.1: a model of the family llama has no experts; leave it out",
    ]
    problems, _ = estimate.plan(arguments(model={**MIXTURE, "grouped_product": "nowhere:product"}), num_devices=1)
    assert problems == [
        "model: 'nowhere:product': no module named 'nowhere' (searched from the working directory and PYTHONPATH)"
    ]


def test_rows_that_pad_a_batch_are_reported_if_there_are_any():
    facts = [estimate.plan(arguments(global_batch_size=8), num_devices=n)[1].get("padded_rows_per_step") for n in (1, 3, 4)]
    assert facts == [None, 1, None]


def test_a_schedule_over_epochs_needs_no_number_of_steps():
    epochs = {"max_num_steps": None, "max_num_data_epochs": 3, "optimizer": {"schedule": {"warmup_ratio": 0.5}}}
    assert estimate.plan(arguments(**epochs), num_devices=1)[0] == []
    # Data that is away for now is no problem of the schedule.
    problems, facts = estimate.plan(arguments(**epochs, data={"dataset": f"{__name__}:away"}), num_devices=1)
    assert (problems, facts["max_steps"]) == ([], None)
    (problem,), _ = estimate.plan(arguments(max_num_steps=None, time_limit="1h"), num_devices=1)
    assert "does not know where to end: set optimizer.schedule.decay_steps, max_num_steps or max_num_data_epochs" in problem


def test_epochs_and_steps_end_a_run_whichever_comes_first():
    assert estimate.plan(arguments(max_num_steps=None, max_num_data_epochs=3), num_devices=1)[1]["max_steps"] == 2  # 30 / 16
    assert estimate.plan(arguments(max_num_steps=1, max_num_data_epochs=3), num_devices=1)[1]["max_steps"] == 1
    assert estimate.plan(arguments(max_num_steps=None, time_limit="1h"), num_devices=1)[1]["max_steps"] is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trainer": "trainers.nothing:Trainer"}, "trainer: 'trainers.nothing:Trainer': no module named 'trainers.nothing'"),
        (
            {"trainer": "trainers.base:BaseTrainr"},
            "trainer: 'trainers.base:BaseTrainr': module trainers.base has no 'BaseTrainr'; did you mean BaseTrainer?",
        ),
        ({"trainer": f"{__name__}:HalfATrainer"}, "it lacks evaluate, save_pretrained, configure_model, configure_dataloaders"),
        ({"task": f"{__name__}:Missing"}, f"task: '{__name__}:Missing': module {__name__} has no 'Missing'"),
        ({"task": f"{__name__}:BrokenTask"}, f"task: KeyError: 'teacher' ({__file__}, line "),
        ({"task": f"{__name__}:WrongLoss"}, f"model: KeyError: 'token' ({__file__}, line "),
        ({"task": "tests.programs.mistaken:WrongShapesTask"}, f" ({mistake(0)})"),
        ({"optimizer": {"name": "adamv"}}, "optimizer.name = 'adamv': expected one of adamw"),
        ({"optimizer": {"schedule": {"name": "cosin"}}}, "optimizer.schedule.name = 'cosin': expected one of constant"),
        ({"optimizer": {"schedule": {"warmup_steps": 9}}}, "optimizer.schedule.warmup_steps = 9: expected less than the 5 steps"),
        ({"data": {"dataset": f"{__name__}:no_examples"}}, "data.paths: nothing there"),
        ({"data": {"dataset": f"{__name__}:one_dataset"}}, "returned Examples: expected (train, eval)"),
        (
            {"data": {"dataset": f"{__name__}:of_two_lengths", "sequence_length": 17}},
            "override build_data_collate_info to cut and fill up what varies in length",
        ),
        ({"recorders": ["json:NoRecorder"]}, "recorders: 'json:NoRecorder': module json has no 'NoRecorder'"),
        ({"evaluation": {"every_steps": 5}}, "evaluation.every_steps: there is no held-out data to evaluate on"),
    ],
)
def test_what_cannot_run_is_reported_before_machines_are_taken(changes, expected):
    (problem,), _ = estimate.plan(arguments(**changes), num_devices=1)
    assert expected in problem


def test_ones_own_loaders_may_make_batches_of_any_examples():
    changes = {"data": {"dataset": f"{__name__}:of_two_lengths"}, "trainer": f"{__name__}:OwnLoaders"}
    assert estimate.plan(arguments(**changes), num_devices=1)[0] == []


@pytest.mark.parametrize(("batch", "num_read"), [(4, 4), (64, 10)])
def test_of_a_stream_no_more_is_read_than_a_batch_and_than_there_is(batch, num_read):
    Stream.num_read = 0
    changes = {
        "data": {"dataset": f"{__name__}:stream", "sequence_length": 16},
        "global_batch_size": batch,
        "optimizer": CONSTANT,
    }
    assert estimate.plan(arguments(**changes), num_devices=1)[0] == []
    assert Stream.num_read == num_read


def test_the_examples_of_columns_are_their_rows():
    problems, facts = estimate.plan(
        arguments(data={"dataset": f"{__name__}:columns", "sequence_length": 16}, max_num_steps=None, max_num_data_epochs=4),
        num_devices=1,
    )
    assert problems == []
    assert (facts["train_examples"], facts["eval_examples"], facts["max_steps"]) == (12, 3, 3)


SHIPPED = sorted(path for folder in ("configs", "examples", "examples/migrated") for path in (ROOT / folder).glob("*.yaml"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_configuration_that_is_shipped_can_run(path, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"  # a fresh one: ROOT may have runs, and these may lack the one that `init_from` names
    checkout.mkdir()
    for name in ("configs", "examples", "docs", "README.md"):
        (checkout / name).symlink_to(ROOT / name)
    monkeypatch.chdir(checkout)
    config = load(path, [f"storage={tmp_path / 'runs'}"])
    assert estimate.plan(config.training, hosts_config.num_devices(config.hosts))[0] == []


def test_a_data_server_that_is_away_refuses_no_run():
    problems, facts = estimate.plan(arguments(data={"dataset": f"{__name__}:away"}), num_devices=1)
    assert problems == []
    assert facts["doubt"] == f"data: ConnectionRefusedError: [Errno {errno.ECONNREFUSED}] the data server is away"
    assert facts["train_examples"] is None
    assert facts["parameters"] > 0


@pytest.mark.slow("compiles a step for several devices")
def test_what_init_from_names_is_looked_at(tmp_path):
    made = BaseTrainer(
        arguments(
            storage=str(tmp_path), previews={"prompts": []}, data={"dataset": f"{__name__}:ten_examples", "sequence_length": 16}
        ),
        Examples(),
    )
    made.train()
    run = tmp_path / "x"
    problems, facts = estimate.plan(arguments(init_from=str(run)), num_devices=1)
    assert problems == []
    assert facts["init_from"] == f"11 of 11 parameters from {saved(run, 5)} (step 5)"
    (problem,), _ = estimate.plan(arguments(init_from={"path": str(run), "rename": [["embed", "table"]]}), num_devices=1)
    assert "embed is missing there; table is not in the model" in problem
    (problem,), _ = estimate.plan(arguments(init_from=str(tmp_path / "y")), num_devices=1)
    assert problem == f"init_from: there is no {tmp_path}/y"
    (problem,), _ = estimate.plan(arguments(init_from=str(saved(run, 5) / "state")), num_devices=1)
    assert problem.startswith(f"init_from: {saved(run, 5)}/state is no checkpoint")
    # The storage of the hosts need not be seen from here; and what a run began with may be gone by now.
    problems, facts = estimate.plan(arguments(init_from="/not/mounted/run"), num_devices=1)
    assert (problems, facts["doubt"]) == ([], "init_from: there is no /not/mounted/run")
    problems, facts = estimate.plan(arguments(storage=str(tmp_path), init_from=str(tmp_path / "y")), num_devices=1)
    assert (problems, facts.get("init_from"), facts.get("doubt")) == ([], None, None)


def test_all_of_it_at_once():
    data = {"dataset": f"{__name__}:no_examples"}
    problems, _ = estimate.plan(arguments(data=data, task="nowhere:Task", optimizer={"name": "adamv"}), num_devices=1)
    assert [problem.split()[0] for problem in problems] == ["data.paths:", "task:", "optimizer.name"]


def test_a_trainer_of_ones_own_is_not_looked_into():
    problems, facts = estimate.plan(arguments(trainer=f"{__name__}:OwnTrainer"), num_devices=1)
    assert problems == []
    assert "parameters" not in facts


def test_a_model_of_ones_own_has_no_known_place_on_devices():
    problems, facts = estimate.plan(arguments(trainer=f"{__name__}:OwnShapes"), num_devices=1)
    assert problems == []
    assert facts["parameters"] == PARAMETERS
    assert "state_bytes_per_device" not in facts


# ---------------------------------------------------------------------- orchestrator.planning.report


@pytest.fixture
def job():
    return build({"name": "job", "max_num_steps": 400, "hosts": {"count": 2, "spares": 1}, "mesh": {"fsdp": 2}})


@pytest.fixture
def child_answers(monkeypatch):
    """Stands for the child process; returns the requests it got."""
    requests = []

    def answer(returncode=0, stdout="", stderr=""):
        def start(command, *, stdin, env, **files):
            assert command[1:] == ["-m", "trainers.planning.estimate"]
            assert env["JAX_PLATFORMS"] == "cpu"
            requests.append(json.load(stdin))
            files["stdout"].write(stdout)
            files["stderr"].write(stderr)
            return SimpleNamespace(wait=lambda timeout=None: returncode, kill=lambda: None)

        monkeypatch.setattr(subprocess, "Popen", start)
        return requests

    return answer


def test_what_stays_whole_is_told_by_the_dry_run_and_at_the_start(job, child_answers):
    lines = ["mesh.fsdp = 2 does not divide embed = 33", "mesh.fsdp = 2 does not divide embed = 35"]
    child_answers(stdout=json.dumps({"problems": [], "facts": FACTS | {"left_whole": lines}}))
    report = job_plan.check(job)
    assert job_plan.arithmetic(job, report)["not divided"].split("\n#" + " " * 19) == lines
    told = [(event.get("level"), event.get("message")) for event in report.events(job)[1:]]
    assert told == [("warning", line) for line in lines]


def test_the_dry_run_tells_the_flags_of_the_compiler(job, child_answers):
    child_answers(stdout=json.dumps({"problems": [], "facts": FACTS}))
    report = job_plan.check(job)
    assert "compiler flags" not in job_plan.arithmetic(job, report)
    told = job_plan.arithmetic(replace(job, hosts=hosts_config.HostsConfig(kind="gpu", count=2)), report)["compiler flags"]
    assert told == ("--xla_gpu_enable_latency_hiding_scheduler=true (begins exchanges early enough that products hide them)")


def test_the_report_of_a_job(job, child_answers):
    requests = child_answers(stdout=json.dumps({"problems": [], "facts": FACTS}))
    report = job_plan.check(job)
    assert requests[0]["num_devices"] == 2
    assert from_dict(TrainingArguments, requests[0]["arguments"]) == job.training
    assert (report.num_devices, report.num_replicas, report.mesh) == (2, 2, {"data": 1, "fsdp": 2, "expert": 1, "tensor": 1})
    assert job_plan.arithmetic(job, report) == {
        "hosts": "2 cpu (CPU 1 each, packed), 1 spare",
        "devices": "2 hosts x 1 = 2",
        "mesh": "data 1 x fsdp 2 x expert 1 x tensor 1 = 2",
        "global batch": "8 micro-batch x 1 accumulation x 2 replicas = 16 sequences",
        "tokens a step": "16 sequences x 256 = 4,096",
        "parameters": "1,475,712 (1.48 M)",
        "layers": "4, compiled one by one on cpu hosts",
        "attention": "xla (256 tokens are few)",
        "FLOPs a step": "39.5 GFLOP",
        "checkpoint": "17.7 MB (parameters, optimizer state, counters)",
        "state per device": "8.85 MB (gradients and activations come on top)",
        "whole run": "400 steps, 1.64 M tokens, 15.8 TFLOP",
        "training data": "1,000 sequences = 62.5 steps an epoch",
        "held-out data": "50 sequences",
    }
    in_fp8 = replace(job, training=replace(job.training, model=replace(job.training.model, fp8="current")))
    assert job_plan.arithmetic(in_fp8, report)["products"] == (
        "of linear layers in 8 bits (model.fp8): e4m3, gradients e5m2, by current scales; mfu is by the peak of bfloat16"
    )
    for master_weights, told in (("float32", "with master weights of float32; "), ("none", "")):
        optimizer = replace(job.training.optimizer, master_weights=master_weights)
        narrow = replace(job, training=replace(job.training, param_dtype="bfloat16", optimizer=optimizer))
        line = job_plan.arithmetic(narrow, report)["state per device"]
        assert line == f"8.85 MB ({told}gradients and activations come on top)"
    assert report.events(job) == [report.header(job)]
    assert report.header(job) == {
        "ev": "run",
        "name": "job",
        "hosts": 2,
        "devices": 2,
        "parameters": 1_475_712,
        "tokens_per_step": 4096,
        "max_steps": 400,
        "unit": "tokens",
    }


def test_the_report_of_a_mixture_of_experts(child_answers):
    about = {"active_parameters": 295_142, "num_experts": 8, "experts_per_token": 2, "experts_per_device": 4}
    child_answers(stdout=json.dumps({"problems": [], "facts": FACTS | about}))
    job = build({"name": "job", "max_num_steps": 400, "loss": {"load_balancing_weight": 0.01}})
    lines = job_plan.arithmetic(job, job_plan.check(job))
    assert lines["parameters"] == "1,475,712 (1.48 M), of which a token uses 295 k (20%)"
    assert lines["experts"] == (
        "8 in each layer, 2 for each token, 4 on a device, loss.load_balancing_weight 0.01, loss.router_z_loss_weight 0"
    )


@pytest.mark.parametrize(
    ("pipeline", "groups", "count", "share"),
    [
        ({}, "", 8, "11%"),
        ({"microbatches": 2}, "", 2, "33%"),
        ({"schedule": "interleaved"}, ", in 2 groups (pipeline.repeats)", 8, "6%"),
        ({"schedule": "interleaved", "repeats": 4, "microbatches": 2}, ", in 4 groups (pipeline.repeats)", 2, "11%"),
    ],
)
def test_the_report_tells_for_how_long_a_stage_rests(child_answers, pipeline, groups, count, share):
    child_answers(stdout=json.dumps({"problems": [], "facts": {**FACTS, "num_layers": 8}}))
    about = {"name": "job", "max_num_steps": 400, "hosts": {"count": 4}, "mesh": {"pipeline": 2}, "model": {"num_layers": 8}}
    job = build({**about, "pipeline": pipeline})
    assert job_plan.arithmetic(job, job_plan.check(job))["  by stages"] == (
        f"4 layers in each of 2{groups}; {count} micro-batches of {8 // count} (pipeline.microbatches); a stage rests for "
        f"{share} of a step"
    )


def test_what_could_not_be_looked_at_is_reported_first(job, child_answers):
    child_answers(stdout=json.dumps({"problems": [], "facts": {"doubt": "data: ConnectionError: away"}}))
    report = job_plan.check(job)
    assert report.events(job) == [
        report.header(job),
        {
            "ev": "note",
            "level": "warning",
            "message": "starting all the same, the hosts try again: data: ConnectionError: away",
        },
    ]
    assert job_plan.arithmetic(job, report)["not known yet"] == "data: ConnectionError: away"


@pytest.mark.parametrize(("tokens_per_example", "unit"), [(1, "examples"), (2, "tokens"), (None, "tokens")])
def test_examples_that_are_one_thing_each_are_counted_as_such(job, child_answers, tokens_per_example, unit):
    child_answers(stdout=json.dumps({"problems": [], "facts": {**FACTS, "tokens_per_example": tokens_per_example}}))
    report = job_plan.check(job)
    assert report.header(job)["unit"] == unit
    lines = "\n".join(f"{name} {text}" for name, text in job_plan.arithmetic(job, report).items())
    assert ("examples a step" in lines, "tokens a step" in lines) == ((True, False) if unit == "examples" else (False, True))
    assert ("1,000 examples = 62.5 steps" in lines) == (unit == "examples")


def test_where_a_run_goes_on_and_what_has_changed_is_reported_at_the_start(job, child_answers):
    continues = {"step": 6, "notes": ["goes on from step 6", "changed, and harmless: publish_every_steps 1 -> 2"]}
    child_answers(stdout=json.dumps({"problems": [], "facts": {**FACTS, "continues": continues}}))
    report = job_plan.check(job)
    assert report.events(job) == [report.header(job), *({"ev": "note", "message": line} for line in continues["notes"])]
    assert job_plan.arithmetic(job, report)["goes on"] == "; ".join(continues["notes"])


def test_a_dry_run_shows_the_resolved_configuration_and_the_arithmetic(job, child_answers):
    child_answers(stdout=json.dumps({"problems": [], "facts": FACTS}))
    text = job_plan.render(job, job_plan.check(job))
    assert text.startswith("name: job\n")
    assert "max_failures" not in text  # it has its default
    assert text.endswith("# --all             shows the settings that have their defaults, too")
    everything = job_plan.render(job, job_plan.check(job), everything=True)
    assert "\n    max_failures: 10\n" in everything
    assert "--all" not in everything
    assert "\n# mesh              data 1 x fsdp 2 x expert 1 x tensor 1 = 2\n" in text


def test_a_job_whose_trainer_decides_its_model(job, child_answers):
    child_answers(stdout=json.dumps({"problems": [], "facts": {"max_steps": 400}}))
    lines = job_plan.arithmetic(job, job_plan.check(job))
    assert lines["model"] == "decided by the trainer (it implements the protocol by itself)"
    assert "parameters" not in lines


def test_problems_of_the_child_are_errors_of_the_configuration(job, child_answers):
    child_answers(stdout=json.dumps({"problems": ["task: no", "data: no"], "facts": {}}))
    with pytest.raises(ConfigError) as raised:
        job_plan.check(job)
    assert str(raised.value) == "job: 2 problems\n  task: no\n  data: no"


def test_a_child_that_fails_shows_why(job, child_answers):
    child_answers(returncode=1, stderr="Traceback ...\nImportError: no jax")
    with pytest.raises(PlanError, match=r"(?s)exit status 1.*ImportError: no jax"):
        job_plan.check(job)


def test_tpu_slices_are_named(child_answers):
    hosts = {"kind": "tpu", "accelerator": "v4", "topology": "2x2x2", "slices": 2}
    job = build({"name": "pod", "max_num_steps": 1, "hosts": hosts, "global_batch_size": 32})
    child_answers(stdout=json.dumps({"problems": [], "facts": {}}))
    lines = job_plan.arithmetic(job, job_plan.check(job))
    assert lines["hosts"] == "4 tpu (CPU 1, TPU 4 each, on machines of their own, 2 slices 2x2x2 of v4)"
    assert lines["devices"] == "4 hosts x 4 = 16"


def test_parameters_for_trackers_are_flat(job):
    flat = job_plan.parameters(job)
    assert (flat["name"], flat["mesh.fsdp"], flat["driver.restart.max_failures"]) == ("job", 2, 10)
    assert flat["data.paths"] == '["python-stdlib"]'


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 "), (999, "999 "), (1000, "1 k"), (1_475_712, "1.48 M"), (39.5e9, "39.5 G"), (2e21, "2e+03 E")]
)
def test_numbers_with_prefixes(number, text):
    assert job_plan.scaled(number) == text


def held_out_too(arguments):
    return Examples(), Examples()


class AddsMetrics(BaseTrainer):
    def on_evaluation_end(self, state, metrics):
        return state, {**metrics, "bleu": 1.0}


@pytest.mark.parametrize(
    ("metrics", "changes", "problem"),
    [
        (
            ["eval_los"],
            {},
            "evaluation.score.metrics: 'eval_los': expected a metric of an evaluation: eval_loss, .*; did you mean eval_loss",
        ),
        (["eval_loss", "eval_grad_norm"], {}, "'eval_grad_norm': expected"),  # of a train step only
        (["eval_loss", "eval_perplexity", "eval_accuracy"], {}, None),
        (["a_loss"], {"units": {"a": {}}}, None),
        (["eval_loss"], {"units": {"a": {}}}, "'eval_loss': expected a metric of an evaluation: a_loss"),
        (["a_anything"], {"units": {"a": {"task": "tests.programs.tiny:TableTask"}}}, None),
        (["eval_bleu"], {"trainer": f"{__name__}:AddsMetrics"}, None),
    ],
)
def test_a_score_of_a_metric_that_does_not_exist_is_found_before_anything_is_trained(metrics, changes, problem):
    trainer = {name: changes[name] for name in changes.keys() & {"trainer"}}
    evaluation = {
        "score": {"metrics": metrics, "lower_better": True},
        **{name: changes[name] for name in changes.keys() - trainer.keys()},
    }
    data = {"dataset": f"{__name__}:held_out_too", "sequence_length": 16}
    problems, _ = estimate.plan(arguments(evaluation=evaluation, data=data, **trainer), num_devices=1)
    assert len(problems) == (problem is not None), problems
    if problem is not None:
        assert re.search(problem, problems[0])
