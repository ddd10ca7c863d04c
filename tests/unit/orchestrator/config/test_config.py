"""Configuration files: what they may say, and the exact words of what is wrong with them."""

import json
import re
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.hosts.config import HostsConfig
from gangway.config import yaml_source
from gangway.config.section import Section, parse_duration_s
from orchestrator import run
from orchestrator.config import job as config
from orchestrator.config.job import ConfigError, DriverConfig, build, load, to_dict, to_yaml
from orchestrator.policies.restart import RestartPolicy
from tests import ROOT
from trainers.config import InitConfig
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, from_dict

SMALL = "max_num_steps: 10\n"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    teacher: str = "none"
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DistillationArguments(TrainingArguments):
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass(frozen=True, kw_only=True)
class ClashingArguments(TrainingArguments):
    hosts: int = 1


class NotADataclass:
    pass


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "job.yaml") -> Path:
        path = Path(name)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def problems(path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(path, overrides)
    assert raised.value.name == str(path)
    return list(raised.value.problems)


def problem(path, *overrides: str) -> str:
    (only,) = problems(path, *overrides)
    return only


# ---------------------------------------------------------------------- what a file may say


def test_a_file_becomes_the_sections_it_names(write, tmp_path):
    path = write("""
        max_num_steps: 1_000
        optimizer: {name: lion, learning_rate: 3e-4}
        data: {paths: [a, b]}
        hosts: {count: 2, devices_per_host: 2}
        driver: {restart: {max_failures: 3}}
        tracking: {mlflow: false}
    """)
    job = load(path)
    assert job.training.max_num_steps == 1000
    assert (job.training.optimizer.name, job.training.optimizer.learning_rate) == ("lion", 3e-4)
    assert job.training.data.paths == ("a", "b")
    assert job.hosts == HostsConfig(count=2, devices_per_host=2)
    assert job.driver == DriverConfig(restart=RestartPolicy(max_failures=3))
    assert not job.tracking.mlflow
    assert type(job.training) is TrainingArguments


def test_a_run_is_named_after_its_file_unless_it_says_otherwise(write, tmp_path):
    assert load(write(SMALL, "fine-tune.yaml")).training.name == "fine-tune"
    assert load(write(SMALL), ["name=other"]).run_dir == str(tmp_path / "runs" / "other")
    assert load(write(SMALL), ["storage=gs://bucket/runs"]).run_dir == "gs://bucket/runs/job"


def test_storage_is_made_absolute_for_processes_that_run_elsewhere(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(write(SMALL), ["storage=here"]).training.storage == str(tmp_path / "here")
    assert load(write(SMALL), ["storage=~/there"]).training.storage == str(tmp_path / "home" / "there")


def test_a_configuration_comes_back_from_its_plain_form(write):
    job = load(write(SMALL), ["hosts.env={A: '1'}", "time_limit=2h30m", "data.paths=[x]"])
    assert build(to_dict(job)) == job
    assert build(json.loads(json.dumps(to_dict(job)))) == job
    job = load(write(SMALL), ["time_limit=2h30m", "data.paths=[x]"])
    assert load(write(to_yaml(job), "again.yaml")) == job


def test_empty_sections_are_the_defaults(write):
    job = load(write(SMALL + "previews:\nhosts: null\ndriver: {restart: ~}\n"))
    assert job.hosts == HostsConfig()
    assert job.driver == DriverConfig()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1.10", "1.10"),
        ("007", "007"),
        ("1e5", "1e5"),
        ("no", "no"),
        ("true", "true"),
        ("2026-01-02", "2026-01-02"),
        ("'5'", "5"),
    ],
)
def test_text_stays_as_it_was_written(write, written, read):
    assert load(write(f"{SMALL}name: {written}\n")).training.name == read
    assert load(write(SMALL), [f"name={written}"]).training.name == read
    assert load(write(SMALL), [f"hosts.env.VALUE={written}"]).hosts.env == {"VALUE": read}


def test_anchors_and_merges_work(write):
    path = write("max_num_steps: 10\ndata: &d {pattern: '*.txt'}\n")
    assert load(path).training.data.pattern == "*.txt"
    path = write("max_num_steps: 1\nhosts: {env: &e {A: '1'}}\ndata: {<<: {pattern: '*.md'}, shuffle: false}\n")
    assert (load(path).training.data.pattern, load(path).training.data.shuffle) == ("*.md", False)


def test_arguments_of_ones_own(write):
    path = write(SMALL + f"arguments: {__name__}:DistillationArguments\ndistillation: {{teacher: big}}\n")
    job = load(path, ["distillation.temperature=2"])
    assert isinstance(job.training, DistillationArguments)
    assert job.training.distillation == DistillationConfig(teacher="big", temperature=2.0)
    assert job.arguments_class == f"{__name__}:DistillationArguments"
    assert build(to_dict(job)) == job
    assert problem(path, "distillation.temprature=2") == (
        "override: distillation.temprature: unknown key (found 2); did you mean distillation.temperature?"
    )


def test_keys_of_an_arguments_class_that_is_missing_are_not_called_unknown(write):
    path = write("arguments: nowhere:Thing\nteaching: {teacher: big}\nseed: x\n")
    missing, seed, *_ = problems(path)
    assert "arguments: 'nowhere:Thing': no module" in missing
    assert seed == 'line 3: seed: expected an integer (found "x")'
    assert not any("distillation" in text for text in problems(path))


# ---------------------------------------------------------------------- overrides


def test_overrides_are_typed_and_the_last_one_wins(write):
    overrides = [
        "optimizer.learning_rate=1e-3",
        "seed=1",
        "seed=2",
        "data.shuffle=false",
        "data.paths=[a, b]",
        "evaluation.every_steps=5",
    ]
    training = load(write(SMALL), overrides).training
    assert (training.optimizer.learning_rate, training.seed, training.data.shuffle) == (1e-3, 2, False)
    assert (training.data.paths, training.evaluation.every_steps) == (("a", "b"), 5)


def test_overrides_reach_through_absent_and_empty_sections(write):
    job = load(write(SMALL + "optimizer:\n"), ["optimizer.schedule.warmup_steps=3", "driver.restart.max_failures=0"])
    assert job.training.optimizer.schedule.warmup_steps == 3
    assert job.driver.restart.max_failures == 0


def test_an_override_sets_back_to_nothing_and_replaces_a_whole_section(write):
    path = write("max_num_steps: 10\noptimizer: {max_grad_norm: 2, name: lion, learning_rate: 1}\n")
    assert load(path, ["optimizer.max_grad_norm=null"]).training.optimizer.max_grad_norm is None
    assert load(path, ["optimizer={name: sgd}"]).training.optimizer.learning_rate == 3e-4


@pytest.mark.parametrize("text", ["class Foo: ", "[not a list", "a=b", "", "  two  ", "# hash"])
def test_an_override_of_text_is_taken_as_it_is(write, text):
    assert load(write(SMALL), [f"data.examples={text}"]).training.data.examples == text


def test_a_quoted_override_is_yaml(write):
    assert load(write(SMALL), ['data.pattern="a\\nb "']).training.data.pattern == "a\nb "


def test_overrides_that_make_no_sense(write):
    assert problems(write(SMALL), "seed", "=3", "a..b=1", "seed.x=1", "data.paths.0=x", "seed=[1") == [
        "override 'seed': expected key=value, such as optimizer.learning_rate=3e-4",
        "override '=3': expected key=value, such as optimizer.learning_rate=3e-4",
        "override 'a..b=1': expected key=value, such as optimizer.learning_rate=3e-4",
        'override: seed: expected an integer (found "[1")',
        'override: data.paths: expected a list, such as [a, b] (found {"0": "x"})',
    ]


def test_an_override_into_a_value_that_the_file_gives(write):
    assert problem(write(SMALL + "seed: 1\n"), "seed.x=1") == "override 'seed.x=1': seed is not a section: it has no keys"


# ---------------------------------------------------------------------- what is wrong, in words


def test_all_errors_are_reported_at_once_in_the_order_of_the_file(write):
    path = write("""\
        name: a b
        max_num_steps: abc
        optimizer:
          learnig_rate: 1e-3
          betas: [0.9]
          schedule: {warmup_steps: -1}
        data: {sequence_length: 1, eval_fraction: 2}
        mesh: 3
        hosts: {knd: cpu}
        global_batch_size: 0
        trakcing: {}
        """)
    assert problems(path, "driver.restart.max_failures=-1", "dtype=bf16") == [
        "line 1: name = 'a b': expected letters, digits, '.', '_' and '-', starting with a letter or digit",
        'line 2: max_num_steps: expected an integer (found "abc")',
        "line 4: optimizer.learnig_rate: unknown key (found 0.001); did you mean optimizer.learning_rate?",
        "line 5: optimizer.betas: expected 2 values (found [0.9])",
        "line 6: optimizer.schedule.warmup_steps = -1: expected at least 0",
        "line 7: data.sequence_length = 1: expected at least 2",
        "line 7: data.eval_fraction = 2.0: expected 0 <= eval_fraction < 1",
        "line 8: mesh: expected a section with keys among slice, pipeline, data, fsdp, expert, context, tensor (found 3)",
        'line 9: hosts.knd: unknown key (found "cpu"); did you mean hosts.kind?',
        "line 10: global_batch_size = 0: expected at least 1",
        "line 11: trakcing: unknown key (found {}); did you mean tracking?",
        "override: driver.restart.max_failures = -1: expected 0 or more",
        'override: dtype: expected one of float32, bfloat16, float16 (found "bf16"); did you mean bfloat16?',
    ]


def test_a_mesh_that_is_to_be_found_is_found_by_a_command(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("mesh: auto\nmax_num_steps: 3\n")
    (problem,) = problems(path)
    assert "`gangway plan CONFIG --meshes` tries those that the hosts allow, and proposes one" in problem


def test_the_message_has_a_line_for_each_problem(write):
    with pytest.raises(ConfigError) as raised:
        load(write("seed: x\nmax_num_steps: 0\n"))
    assert str(raised.value) == (
        'job.yaml: 2 problems\n  line 1: seed: expected an integer (found "x")\n  line 2: max_num_steps = 0: expected at least 1'
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate: 1", "learning_rate: unknown key (found 1); did you mean optimizer.learning_rate?"),
        ("warmup_steps: 1", "did you mean optimizer.schedule.warmup_steps or profile.warmup_steps?"),
        ("per_device_train_batch_size: 1", "unknown key (found 1); did you mean global_batch_size?"),
        ("num_train_epochs: 1", "unknown key (found 1); did you mean max_num_data_epochs?"),
        ("optimizer: {lr: 1}", "optimizer.lr: unknown key (found 1); did you mean optimizer.learning_rate?"),
        ("optimizer: {groups: [{pattern: a, lerning_rate: 1}]}", "(found 1); did you mean optimizer.groups[0].learning_rate?"),
        ("max_steps: 1", "max_steps: unknown key (found 1); did you mean max_num_steps?"),
        (
            "mesh: {zzz: 1}",
            "mesh.zzz: unknown key (found 1); known keys of mesh: slice, pipeline, data, fsdp, expert, context, tensor",
        ),
        ("seed: 1.5", "seed: expected an integer (found 1.5)"),
        ("seed: true", 'seed: expected an integer (found "true")'),
        ("optimizer: {learning_rate: fast}", 'optimizer.learning_rate: expected a number (found "fast")'),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate: expected a finite number (found Infinity)"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate: expected a finite number (found NaN)"),
        ("data: {shuffle: maybe}", 'data.shuffle: expected true or false (found "maybe")'),
        ("data: {paths: text}", 'data.paths: expected a list, such as [a, b] (found "text")'),
        ("data: {paths: [a, [b]]}", 'data.paths[1]: expected text (found ["b"])'),
        ("data: {paths: []}", "data.paths = []: expected at least one file or folder"),
        ("hosts: {env: [A]}", "hosts.env: expected a section of keys and values (found a list)"),
        ("hosts: {kind: gpus}", 'hosts.kind: expected one of cpu, gpu, tpu (found "gpus"); did you mean gpu?'),
        ("trainer: my.module", "trainer = 'my.module': expected package.module:Name"),
        ("task: a b:c", "task = 'a b:c': expected package.module:Name"),
        ("data: {dataset: d}", "data.dataset = 'd': expected package.module:Name"),
        ("time_limit: 3 hours", "time_limit: duration '3 hours': expected seconds or numbers with units"),
        ("arguments: nowhere:Thing", "arguments: 'nowhere:Thing': no module named 'nowhere'"),
        (f"arguments: {__name__}:Missing", f"arguments: '{__name__}:Missing': module {__name__} has no 'Missing'"),
        (f"arguments: {__name__}:NotADataclass", "expected a dataclass that extends TrainingArguments"),
        (f"arguments: {__name__}:ClashingArguments", "has a field 'hosts': that key has a meaning already"),
        ("model: {width: 7}", "model.width = 7: expected an even number of channels for each of the 4 heads (num_heads)"),
        ("model: {num_heads: 0}", "model.num_heads = 0: expected at least 1"),
    ],
)
def test_one_wrong_line(write, line, expected):
    found = problem(write(SMALL + line + "\n"))
    assert expected in found
    assert found.startswith("line 2: ")


def test_nothing_ends_the_run(write):
    assert problem(write("seed: 1\n")) == "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"
    assert problem(write("")) == "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"


def test_what_follows_from_another_error_is_not_reported(write):
    assert problem(write("max_num_steps: many\n")) == 'line 1: max_num_steps: expected an integer (found "many")'


# ---------------------------------------------------------------------- what the sections together get wrong


def test_a_mesh_that_does_not_divide_the_devices(write):
    path = write(SMALL + "mesh: {fsdp: 4}\nhosts: {count: 3, devices_per_host: 2}\n")
    assert problem(path) == (
        "mesh data -1 x fsdp 4 x expert 1 x tensor 1 does not fit 6 devices: the sizes must multiply to 6; what would fit: "
        "mesh.fsdp = 3 or 6; set one axis to -1 to let it take what is left (hosts: 3 x 2 devices)"
    )


@pytest.mark.parametrize(
    ("hosts", "mesh", "expected"),
    [
        ("{count: 4}", "{slice: 2}", None),
        ("{count: 1, devices_per_host: 4}", "{slice: 2}", None),
        (
            "{count: 3, devices_per_host: 4}",
            "{slice: 2}",
            "mesh.slice = 2: expected a divisor of the 3 hosts (1, 3): a slice is whole hosts",
        ),
        (
            "{count: 2, devices_per_host: 4}",
            "{slice: 4}",
            "mesh.slice = 4: expected a divisor of the 2 hosts (1, 2): a slice is whole hosts",
        ),
        ("{kind: tpu, accelerator: v5e, topology: 2x4, slices: 2}", "{slice: 2}", None),
        ("{kind: tpu, accelerator: v5e, topology: 2x4, min_slices: 1, max_slices: 2}", "{slice: -1, data: 1, fsdp: 8}", None),
        (
            "{kind: tpu, accelerator: v5e, topology: 2x4, slices: 2}",
            "{slice: 4}",
            "mesh.slice = 4: expected 2, the slices of 2 hosts, or 1",
        ),
    ],
)
def test_a_mesh_of_other_slices_than_the_hosts_have(write, hosts, mesh, expected):
    path = write(SMALL + f"global_batch_size: 16\nmesh: {mesh}\nhosts: {hosts}\n")
    if expected is None:
        load(path)
    else:
        assert problem(path) == expected


def test_what_does_not_fit_together_is_reported_with_the_rest(write):
    path = write(SMALL + "global_batch_size: 3\nhosts: {count: 4}\nsede: 1\n")
    assert [text.partition(" (")[0] for text in problems(path)] == [
        "line 4: sede: unknown key",
        "global_batch_size 3 / accumulation_steps 1 = 3 sequences for 4 replicas",
    ]
    assert [text.partition(" (")[0] for text in problems(path, "hosts.count=many")] == [
        "line 4: sede: unknown key",
        "override: hosts.count: expected an integer",
    ]


def test_more_replicas_than_sequences(write):
    path = write(SMALL + "global_batch_size: 6\naccumulation_steps: 2\nhosts: {count: 4}\n")
    assert problem(path) == (
        "global_batch_size 6 / accumulation_steps 2 = 3 sequences for 4 replicas (data 4 x fsdp 1 x expert 1): expected at "
        "least one sequence for each; set global_batch_size to 8 or more, use fewer accumulation_steps, or fewer devices "
        "(hosts: 4 x 1 devices)"
    )
    assert load(write(SMALL + "global_batch_size: 6\nhosts: {count: 4}\n"))  # padded


def test_a_batch_that_does_not_divide_into_micro_batches(write):
    path = write(SMALL + "global_batch_size: 10\naccumulation_steps: 4\n")
    assert problem(path) == "line 2: global_batch_size = 10: expected a multiple of accumulation_steps (4)"


def test_tpus_cannot_be_compiled_for_beside_their_process(write):
    path = write(SMALL + "hosts: {kind: tpu, accelerator: v4, topology: 2x2x2}\ndriver: {precompile: true}\nmesh: {data: -1}\n")
    assert problem(path) == (
        "driver.precompile = true: expected null or false with hosts.kind = tpu, whose devices are one process's at a time"
    )
    assert load(path, ["driver.precompile=null"]).driver.precompile is None


def test_a_storage_path_with_a_file_in_the_way(write, tmp_path):
    Path("taken").write_text("")
    assert problem(write(SMALL), "storage=taken/runs") == (
        f"storage: {tmp_path}/taken/runs/job cannot be made: {tmp_path}/taken is a file; "
        "set storage=PATH to a folder or bucket that this user and every host can write to"
    )


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ("az://bucket/runs", "az:// is not known; a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX is expected"),
        ("s3a://bucket/runs", "s3a:// is not known: write s3://bucket/runs/job"),
        ("gs://bucket/runs?project=a", r"it has a query \(\?project=a/job\), which a bucket does not take"),
    ],
)
def test_a_url_that_is_no_storage(write, storage, why):
    with pytest.raises(ConfigError, match=f"storage: .*: {why}"):
        load(write(SMALL), [f"storage={storage}"])


def test_a_storage_path_without_permission(write, tmp_path, monkeypatch):
    monkeypatch.setattr(config.os, "access", lambda path, mode: False)  # Permissions do not hold for root.
    assert problem(write(SMALL)) == (
        f"storage: {tmp_path}/runs/job cannot be written: no permission to write to {tmp_path}; "
        "set storage=PATH to a folder or bucket that this user and every host can write to"
    )


def test_loading_leaves_nothing_behind(write, tmp_path):
    load(write(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


# ---------------------------------------------------------------------- files that are no configuration


def test_a_file_that_is_missing(write):
    write(SMALL, "quickstart.yaml")
    assert problem("quikstart.yaml") == "no such file; did you mean quickstart.yaml?"
    assert problem("zzz.yaml") == "no such file; . has quickstart.yaml"
    assert problem("nowhere/zzz.yaml") == "no such file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "line 2, column 2: not YAML: expected ',' or ']', but got ':' while parsing a flow sequence"),
        ("a: b: c\n", "line 1, column 5: not YAML: mapping values are not allowed here"),
        (
            "a:\n\t- b\n",
            "line 2, column 1: not YAML: found character '\\t' that cannot start any token while scanning for the next token",
        ),
        ("- a\n- b\n", "expected keys and values, such as `seed: 1` (found list)"),
        ("just text\n", "expected keys and values, such as `seed: 1` (found str)"),
        ("a: !python/object:os.system x\n", "line 1, column 4: not YAML: could not determine a constructor for the tag"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not YAML: but found another document expected a single document in the stream"),
        ("a: &x [*x]\n", "line 1: a[0] is an alias of what it lies in"),
        ("a: \0\n", "not YAML: unacceptable character"),
    ],
)
def test_text_that_is_not_a_mapping(write, text, expected):
    assert problem(write(text)).startswith(expected)


def test_a_key_given_twice(write):
    assert problems(write("seed: 1\nmax_num_steps: 5\nseed: 2\ndata:\n  pattern: a\n  pattern: b\n")) == [
        "line 3: seed: given twice, first in line 1; keep one of them",
        "line 6: data.pattern: given twice, first in line 5; keep one of them",
    ]


def test_a_folder_and_a_file_of_bytes(write, tmp_path):
    assert problem(tmp_path) == "is a folder: expected a YAML file"
    Path("bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert problem("bytes.yaml") == "is not text in UTF-8 (byte 3)"


# ---------------------------------------------------------------------- trainers.config.arguments by itself


def test_from_dict_reads_what_yaml_gives():
    training = from_dict(
        TrainingArguments, {"name": "x", "max_num_steps": 1e3, "optimizer": {"learning_rate": "3e-4"}, "mesh": None}
    )
    assert (training.max_num_steps, training.optimizer.learning_rate, training.mesh.fsdp) == (1000, 3e-4, 1)
    assert from_dict(TrainingArguments, to_dict_of(training)) == training


def to_dict_of(training: TrainingArguments) -> dict:
    job = build({"name": "x", "max_num_steps": 1000})
    data = to_dict(job)
    return {key: data[key] for key in data if key not in ORCHESTRATOR_SECTIONS} | {"storage": training.storage}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"optimizer": {"lr": 1}}, "optimizer.lr: unknown key (found 1); did you mean optimizer.learning_rate?"),
        ({"seed": "x"}, 'seed: expected an integer (found "x")'),
        ({"seed": True}, 'seed: expected an integer (found "true")'),
        ({"dtype": "half"}, 'dtype: expected one of float32, bfloat16, float16 (found "half")'),
        ({"data": {"paths": "here"}}, 'data.paths: expected a list, such as [a, b] (found "here")'),
        ({"model": 3}, "model: expected a section with keys among pretrained, family, "),
    ],
)
def test_from_dict_refuses(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict(TrainingArguments, {"name": "x", "max_num_steps": 1} | data)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("45s", 45), ("30m", 1800), ("2h30m", 9000), ("1d12h", 129600), (5, 5)]
)
def test_durations(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "m5", "1h 3", "-5s", "1.5.2h"])
def test_durations_that_are_none(text):
    with pytest.raises(ValueError, match="expected seconds or numbers with units"):
        parse_duration_s(text)


# ---------------------------------------------------------------------- whatever comes in


keys = st.sampled_from(
    ["seed", "name", "data", "hosts", "mesh", "optimizer", "paths", "schedule", "env", "betas", "x", "restart"]
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=4), st.just("1e-3"))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8)


@settings(max_examples=150)
@given(
    data=st.dictionaries(st.sampled_from([*TrainingArguments.__dataclass_fields__, *ORCHESTRATOR_SECTIONS, "arguments"]), values)
)
def test_any_data_is_a_configuration_or_an_error_in_words(data):
    with suppress(ConfigError):  # Nothing else may come out.
        job = build(data | {"max_num_steps": 1, "storage": "/tmp"})
        assert build(to_dict(job)) == job


@settings(max_examples=150)
@given(text=st.text(alphabet="ab:[]{}&*!|>'\"-#,? \n\t1.\0~", max_size=30))
def test_any_text_is_read_or_an_error_in_words(text):
    with suppress(ConfigError):
        assert isinstance(yaml_source.parse(text, "text").data, dict)


@settings(max_examples=150)
@given(
    key=st.sampled_from(["seed", "data", "data.paths", "hosts.env.A", "mesh.x.y", "data.pattern", ""]), text=st.text(max_size=12)
)
def test_any_override_is_applied_or_an_error_in_words(key, text):
    source = yaml_source.parse("max_num_steps: 1\nname: x\n", "text")
    yaml_source.override(source, [f"{key}={text}"])
    assert bool(source.problems) == (key == "")


# ---------------------------------------------------------------------- init_from


def test_a_pretrained_model_is_that_of_its_folder(write, tmp_path):
    folder = ROOT / "tests" / "unit" / "data" / "parity" / "qwen3"
    (tmp_path / "qwen3").symlink_to(folder)
    config = load(write(SMALL), ["model={pretrained: qwen3}"])
    training = config.training
    assert (training.model.family, training.model.head_dim, training.model.pretrained) == ("qwen3", 16, None)
    assert training.init_from == InitConfig(path=str(tmp_path / "qwen3"))
    assert build(to_dict(config)) == config
    other = load(write(SMALL), ["model={pretrained: qwen3}", "init_from=/elsewhere"]).training
    assert other.init_from == InitConfig(path="/elsewhere")


def test_a_pretrained_model_with_images_has_an_encoder_and_needs_its_task(write):
    folder = ROOT / "tests" / "unit" / "data" / "parity_vision" / "gemma3"
    task = "task=trainers.tasks.image_text:ImageTextTask"
    training = load(write(SMALL), [f"model={{pretrained: {folder}}}", task]).training
    assert (training.model.family, training.vision.family, training.vision.tokens_per_image) == ("gemma3", "siglip", 9)
    assert training.init_from == InitConfig(path=str(folder))
    told = problem(write(SMALL), f"model={{pretrained: {folder}}}")
    assert "is a model with images, and task = 'trainers.tasks.causal_lm:CausalLMTask' reads texts alone: set task" in told
    told = problem(write(SMALL), f"model={{pretrained: {folder}}}", task, "vision={family: siglip}")
    assert f"vision: the folder of model.pretrained ({folder}) says it; leave out all of it but remat" in told


def test_a_pretrained_folder_that_is_not_there_or_not_understood_is_reported_with_its_line(write, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "bloom"}')
    for folder, why in (("gone", "No such file or directory"), ("odd", "model_type = 'bloom': expected one of llama")):
        told = problem(write(SMALL), f"model={{pretrained: {tmp_path / folder}}}")
        assert f"model.pretrained = '{tmp_path / folder}'" in told
        assert why in told


def test_init_from_may_be_a_path_or_a_section(write, tmp_path):
    short = load(write(SMALL + "init_from: runs/a"))
    assert short.training.init_from.path == str(tmp_path / "runs" / "a")
    assert build(to_dict(short)) == short
    assert load(write(SMALL), ["init_from=runs/a"]).training.init_from == short.training.init_from
    assert load(write(SMALL), ["init_from.path=runs/a"]).training.init_from == short.training.init_from
    assert load(write(SMALL + "init_from: 2024"), []).training.init_from.path == str(tmp_path / "2024")
    assert load(write(SMALL + "init_from: null")).training.init_from is None
    section = load(write(SMALL + "init_from: {path: a, include: [embed], rename: [[x, y]], strict: false}")).training.init_from
    assert (section.include, section.rename, section.strict) == (("embed",), (("x", "y"),), False)
    alone = from_dict(TrainingArguments, {"name": "x", "max_num_steps": 1, "init_from": "runs/a"})
    assert alone.init_from.path == "runs/a"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{include: [embed]}", "init_from.path: missing; it has no default"),
        ("{path: a, inclde: [embed]}", 'init_from.inclde: unknown key (found ["embed"]); did you mean init_from.include?'),
        ("gcs://bucket/run", "init_from.path = 'gcs://bucket/run': expected a folder or file, local or mounted, or s3://"),
        (
            "{path: a, exclude: ['(']}",
            "init_from.exclude = '(': expected a regular expression (missing ), unterminated subpattern",
        ),
        (
            "{path: a, rename: [[a, '\\2']]}",
            "init_from.rename = ['a', '\\\\2']: expected a regular expression and its replacement",
        ),
    ],
)
def test_what_is_wrong_with_init_from(write, section, expected):
    (problem,) = problems(write(SMALL + f"init_from: {section}"))
    assert expected in problem


GIVEN = """
max_num_steps: 5
model: {width: 32}
optimizer: {learning_rate: 0.0003, schedule: {warmup_steps: 3}, groups: [{pattern: a, frozen: true}]}
hosts: {count: 2, env: {KEY: secret}}
driver: {restart: {max_failures: 3}}
evaluation: {units: {far: {max_batches: 2}}}
init_from: {path: /runs/other}
"""


def test_what_differs_from_the_defaults_is_found_in_all_sections(write):
    made = load(write(GIVEN), ["seed=0", "previews.num_tokens=9"])
    found = yaml.safe_load(config.given_yaml(made))
    assert found.pop("storage") == made.training.storage
    assert found.pop("init_from")["path"] == "/runs/other"
    assert found.pop("evaluation")["units"]["far"]["max_batches"] == 2
    (group,) = found["optimizer"].pop("groups")
    assert (group["pattern"], group["frozen"]) == ("a", True)
    assert found == {
        "name": "job",
        "max_num_steps": 5,
        "model": {"width": 32},
        "optimizer": {"schedule": {"warmup_steps": 3}},  # the rate is the default
        "previews": {"num_tokens": 9},
        "hosts": {"count": 2, "env": {"KEY": "***"}},
        "driver": {"restart": {"max_failures": 3}},
    }


def test_the_file_of_a_run_gives_the_same_configuration_and_asks_for_secrets(write, tmp_path):
    made = load(write(GIVEN))
    path = tmp_path / "config.yaml"
    path.write_text(config.resolved_yaml(made))
    with pytest.raises(ConfigError, match=r"hosts\.env\.KEY: masked, for it had a secret; give hosts\.env\.KEY=VALUE"):
        load(path)
    assert load(path, ["hosts.env.KEY=secret"]) == made
    for name in ("tiny", "quickstart"):
        made = load(ROOT / "configs" / f"{name}.yaml", [f"storage={tmp_path}"])
        path.write_text(config.resolved_yaml(made))
        assert load(path) == made
    hard = ("1e5", "0o17", "no", "1:30", "a\x85b", "a\u2028b", "\n", "  a\n\n\n b \n", "<<", "---\nb", "# a", "\x1b", "'")
    made = load(ROOT / "configs" / "tiny.yaml", [f"previews.prompts={json.dumps(hard)}", f"storage={tmp_path}"])
    fields = {f"field{number}": text for number, text in enumerate(hard)}
    made = config.build({**config.to_dict(made), "data": {"template_fields": fields}})
    path.write_text(config.resolved_yaml(made))
    assert load(path) == made
    path.write_text(config.resolved_yaml(made).replace("recorder_folders: {}", "recorder_folders: {jsonl: 's3://***@bucket/a'}"))
    with pytest.raises(ConfigError, match=r"recorder_folders\.jsonl: masked"):
        load(path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--learning_rate", "1e-3"],
            "unrecognized arguments: --learning_rate 1e-3; settings are given as key=value: optimizer.learning_rate=1e-3\n",
        ),
        (["--per-device-train-batch-size=8"], "key=value: global_batch_size=8\n"),
        (["--hosts.count=2", "--seed=1"], "key=value: hosts.count=2 seed=1\n"),
        (["--zzz"], "key=value, such as optimizer.learning_rate=1e-3\n"),
    ],
)
def test_an_option_that_is_a_setting_is_reported_as_one(words, told, capsys):
    with pytest.raises(SystemExit):
        run.parse(["job.yaml", *words])
    assert told in capsys.readouterr().err
