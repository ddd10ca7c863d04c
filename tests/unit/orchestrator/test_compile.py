"""`python -m orchestrator.commands.compile`, and the configurations of real sizes, compiled for the devices that they are for."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings

import pytest

from cluster.agent.child_process import child_env
from cluster.hosts import compiler_flags
from gangway.program import EXIT_REFUSED
from orchestrator.commands import compile as command
from orchestrator.config.job import load
from orchestrator.planning.child import Child
from tests import ROOT
from tests.programs import real_size

COMPILER = ROOT / "build" / "tpu" / "libtpu" / "libtpu.so"
GB = 10**9
MEMORY_BYTES = {"v5e": 16 * 2**30, "v6e": 32 * 2**30, "v5p": 95 * 2**30, None: 80 * GB}
"""Of a chip; None: an H100."""
LLAMA3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LARGE = {
    "llama3_8b_v5e": (8.03e9, 1),
    "llama3_8b_slices_v5e": (8.03e9, 1),
    "llama3_8b_stages_v5e": (8.03e9, 1),
    "llama3_70b_v5p": (70.6e9, 4),
    "llama3_8b_finetune_v6e": (8.03e9, 1),
    "llama3_8b_lora_v5e": (8.03e9, 1),
    "qwen3_30b_a3b_v6e": (30.5e9, 8),
    "llama3_8b_h100": (8.03e9, 1),
    "llama3_8b_long_v5p": (8.03e9, 1),
    "llama3_8b_long_h100": (8.03e9, 1),
}
"""The weights of each, and over how many devices a layer's weights stay divided while they are used."""
CHEAPEST = "llama3_8b_h100"


@pytest.fixture
def compiler(monkeypatch):
    # The least effort takes a third of the time. Memory and exchanges are the same within some percent.
    monkeypatch.setenv("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1")
    if COMPILER.exists():
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(COMPILER))
    elif importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compiler for TPUs is not installed: `make build/tpu`")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return tmp_path


def test_each_configuration_of_a_real_size_is_compiled():
    assert {path.stem for path in (ROOT / "configs" / "large").glob("*.yaml")} == LARGE.keys()


@pytest.mark.parametrize("name", LARGE)
def test_each_computes_in_bfloat16_with_masters_in_float32(name, folder):
    path = ROOT / "configs" / "large" / f"{name}.yaml"
    training = load(str(path), [f"model.pretrained={folder}"] if "pretrained:" in path.read_text() else []).training
    assert (training.dtype, training.param_dtype, training.model.fp8) == ("bfloat16", "float32", "none")
    assert training.optimizer.moment_dtype in (None, "float32")


def test_a_compiler_for_tpus_gets_the_flags_that_their_hosts_will_have(monkeypatch):
    class Stop(Exception):
        """Instead of the compiler."""

    def child(module, config, request, env, timeout_s):
        given.append(child_env({}, env))
        raise Stop

    given = []
    monkeypatch.setattr("orchestrator.planning.child.Child", child)
    for settings in ([], ["hosts.env.LIBTPU_INIT_ARGS=--of_user=1"], ["hosts.compiler_flags=false"]):
        with pytest.raises(Stop):
            command.facts(load(ROOT / "configs" / "large" / "llama3_8b_slices_v5e.yaml", settings))
    flags = " ".join(map(str, compiler_flags.BETWEEN_SLICES))
    assert [env.get("LIBTPU_INIT_ARGS") for env in given] == [flags, f"{flags} --of_user=1", None]


def of_tokens(config, mesh):
    """Returns the bytes of activations that are gathered over the axis `tensor`: twice forward, again, and backward."""
    model, training = config.training.model, config.training
    if mesh["tensor"] == 1:
        return 0
    rows = training.global_batch_size // mesh["data"] // mesh["fsdp"]
    return (6 * model.num_layers + 2) * rows * training.data.sequence_length * model.width * 2


@pytest.fixture
def facts_of(compiler, monkeypatch):
    """Returns what the compiler tells of the step of a configuration, or has told of the very same step."""

    def of(name, config, known):
        monkeypatch.setenv(real_size.DIGEST, known.get(name, {}).get("digest", ""))
        monkeypatch.setattr("orchestrator.planning.child.Child", lambda module, *how: Child(real_size.__name__, *how))
        facts = command.facts(config)
        if "memory" in facts:
            real_size.write(name, facts)
            warnings.warn(f"{name} was compiled; if its step has changed: python -m tests.programs.real_size keep", stacklevel=2)
        return {**known.get(name, {}), **facts}

    return of


@pytest.mark.parametrize(
    "name",
    [name if name == CHEAPEST else pytest.param(name, marks=pytest.mark.slow("a real size")) for name in LARGE],
)
def test_it_fits_and_exchanges_its_weights_alone(name, facts_of, folder, tmp_path):
    path = ROOT / "configs" / "large" / f"{name}.yaml"
    pretrained = [f"model.pretrained={folder}"] if "pretrained:" in path.read_text() else []
    config = load(str(path), [f"storage={tmp_path}", *pretrained])
    facts = facts_of(name, config, real_size.known())
    num_weights, divided_over = LARGE[name]
    weights, steps = 2 * num_weights / divided_over, config.training.accumulation_steps  # bfloat16
    assert facts["whole"] == {}, "large arrays that every device has whole"
    assert facts["memory"]["peak"] < 0.9 * MEMORY_BYTES[config.hosts.accelerator]
    gathered, summed = (
        sum(size for kind, _, _, size in facts["exchanged"] if kind in kinds)
        for kinds in (("all-gather", "collective-permute"), ("all-reduce", "reduce-scatter"))
    )
    gathered -= of_tokens(config, facts["mesh"])
    # Forward, again for what is not kept, and backward; of experts, their tokens too.
    assert 0.3 * steps * weights < gathered < (6 if name not in SHARED else 12) * steps * weights
    assert summed < SUMS.get(name, 1.5) * steps * weights


@pytest.mark.slow("compiles a real size")
def test_a_step_that_is_not_known_is_compiled(facts_of):
    path, known = str(ROOT / "configs" / "large" / f"{CHEAPEST}.yaml"), real_size.known()
    with pytest.warns(UserWarning, match=f"{CHEAPEST} was compiled"):
        changed = facts_of(CHEAPEST, load(path, ["loss.z_loss_weight=0.01"]), known)
    with pytest.warns(UserWarning, match=f"{CHEAPEST} was compiled"):
        found = facts_of(CHEAPEST, load(path), {})
    assert changed["digest"] != found["digest"] == known[CHEAPEST]["digest"]
    assert found["exchanged_over"] == known[CHEAPEST]["exchanged_over"]
    assert found["memory"]["peak"] == pytest.approx(known[CHEAPEST]["memory"]["peak"], rel=0.02)


SHARED = ("llama3_8b_long_v5p", "llama3_8b_long_h100")
"""Several devices share a sequence: they exchange its keys and values, too."""
SUMS = {
    "llama3_70b_v5p": 10.0,
    "qwen3_30b_a3b_v6e": 9.0,
    "llama3_8b_lora_v5e": 0.2,
    "llama3_8b_long_v5p": 3.3,
    "llama3_8b_h100": 2.1,
    "llama3_8b_long_h100": 4.0,
    "llama3_8b_stages_v5e": (8 + 4 - 1) / 4,
}
"""What is summed, by the weights: gradients; of a tensor axis and of experts, activations too; of keys and values that are
gathered, their gradients; of an H100's program, which is one for CPUs, bfloat16 in float32; of LoRA, next to nothing.
For `llama3_8b_long_v5p` the compiler gathers weights by sums, too. With more effort, a device gets its own part alone
of what experts sum (1.6 in all). Of stages: in each turn the gradients of one stage's weights, a quarter of all."""


@pytest.mark.slow("compiles for a TPU")
def test_a_step_that_does_not_fit_is_refused_with_its_size(compiler, capsys):
    status = command.main(
        [
            str(ROOT / "configs" / "large" / "llama3_8b_v5e.yaml"),
            *(
                "hosts.topology=2x2",
                "global_batch_size=4",
                "model.num_layers=4",
                "data.sequence_length=2048",
                "model.mlp_width=65536",
            ),
        ]
    )
    assert status == EXIT_REFUSED
    assert re.search(r"does not fit in the memory of a device: .*\(\d+\.\d+G\) exceeds .*\(15\.75G\)", capsys.readouterr().err)


@pytest.mark.slow("compiles for many devices")
def test_what_a_person_reads(capsys):
    status = command.main([str(ROOT / "configs" / "tiny.yaml"), "hosts.count=4", "mesh.data=1", "mesh.fsdp=4"])
    told = capsys.readouterr().out.splitlines()
    assert status == command.EXIT_FITS
    assert told[0] == "tiny: 4 devices (cpu), mesh data 1 x fsdp 4 x expert 1 x tensor 1"
    assert told[1].startswith("memory           ")
    assert "not divided      no large array" in told
    assert any(line.startswith("  all-gather") and "layers" in line for line in told)


def test_what_crosses_the_slower_network_has_a_line():
    memory = {"peak": 2, "arguments": 1}
    found = {"mesh": {"slice": 2}, "memory": memory, "devices": 4, "device_kind": "cpu", "whole": {}, "exchanged": []}
    told = {"fsdp": 5_000, "slice": 2_000, "slice x fsdp": 1_000}
    assert "  between slices     3 kB, over the slower network" in command.lines("t", {**found, "exchanged_over": told})
    assert not any("between" in line for line in command.lines("t", {**found, "exchanged_over": {"fsdp": 5_000}}))


def test_the_policy_that_was_chosen_and_the_memory_of_the_host_have_lines():
    memory = {"peak": 2e9, "arguments": 1e9, "host": 3e9}
    found = {"mesh": {"data": 1}, "memory": memory, "devices": 1, "device_kind": "v5e", "whole": {}, "exchanged": []}
    tried = [["none", None], ["save_dot_except_mlp", 9e9], ["full", 2e9]]
    told = [*command.lines("t", {**found, "exchanged_over": {}, "remat": tried})]
    assert "  of its host    3 GB, which it reads and writes in a step" in told
    assert "remat            full (none: more than there is; save_dot_except_mlp: 9 GB)" in told


def test_a_wrong_configuration_is_reported(capsys):
    status = command.main([str(ROOT / "configs" / "tiny.yaml"), "mesh.tensor=3"])
    assert status == EXIT_REFUSED
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.slow("compiles for TPUs twice")
def test_the_memory_of_a_tpu_falls_by_the_moments_that_its_host_has(compiler, tmp_path):
    small = ["width=1024", "mlp_width=4096", "num_layers=16", "num_heads=8", "vocab_size=8192"]
    about = ["hosts.topology=2x2", "global_batch_size=4", "data.sequence_length=1024", *(f"model.{size}" for size in small)]
    plain, found = (
        command.facts(
            load(
                str(ROOT / "configs" / "large" / "llama3_8b_v5e.yaml"),
                [f"storage={tmp_path}", f"optimizer.offload={where}", *about],
            )
        )["memory"]
        for where in ("none", "host")
    )
    moments = plain["arguments"] - found["arguments"]
    assert moments > 0.6 * plain["arguments"]
    assert found["host"] == pytest.approx(moments, rel=0.01)
    # Those of the embeddings are on the device as they are updated, which is the peak of a step with few tokens.
    assert 0.9 * moments < plain["peak"] - found["peak"] <= moments
