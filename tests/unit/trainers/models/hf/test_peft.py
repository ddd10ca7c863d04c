"""Adapters in the form of PEFT, against what PEFT itself has saved and computed (`make parity`)."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests import ROOT
from trainers.checkpoint import hugging_face
from trainers.config import LoraConfig
from trainers.errors import UsageError
from trainers.models import lora
from trainers.models.decoder import Decoder
from trainers.models.hf.peft import to_adapter
from trainers.models.hf.weights import from_tensors

DATA = ROOT / "tests" / "unit" / "data"
LLAMA_MODULES = {"query": "self_attn.q_proj", "value": "self_attn.v_proj", "down": "mlp.down_proj"}
CASES = {
    "llama3": LoraConfig(rank=4, alpha=6, targets=("query|value|down",)),
    "gpt2": LoraConfig(rank=2, alpha=6, targets=("query|key|value|down",)),
    "phi3": LoraConfig(rank=2, alpha=6, targets=("gate|up|out",)),
}


def adapters_of(case, tensors):
    """The adapters [L, ...] that PEFT has saved, by our names."""

    def stacked(module, end):
        prefix = "base_model.model." + ("transformer.h" if case == "gpt2" else "model.layers")
        return np.stack([tensors[f"{prefix}.{layer}.{module}.lora_{end}.weight"].T for layer in range(2)])

    if case == "phi3":
        found = {f"layers.out_lora_{end.lower()}": stacked("self_attn.o_proj", end) for end in "AB"}
        a, b = stacked("mlp.gate_up_proj", "A"), stacked("mlp.gate_up_proj", "B")
        for number, name in enumerate(("gate", "up")):
            rank = slice(2 * number, 2 * number + 2)
            found[f"layers.{name}_lora_a"], found[f"layers.{name}_lora_b"] = a[..., rank], b[:, rank, 48 * number :][..., :48]
        return found
    if case == "llama3":
        return {f"layers.{ours}_lora_{end.lower()}": stacked(m, end) for ours, m in LLAMA_MODULES.items() for end in "AB"}
    found = {f"layers.down_lora_{end.lower()}": stacked("mlp.c_proj", end) for end in "AB"}
    a, b = stacked("attn.c_attn", "A"), stacked("attn.c_attn", "B")
    for number, name in enumerate(("query", "key", "value")):
        rank = slice(2 * number, 2 * number + 2)
        found[f"layers.{name}_lora_a"], found[f"layers.{name}_lora_b"] = a[..., rank], b[:, rank, 32 * number : 32 * number + 32]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow("reads and runs whole models")
def test_adapters_of_peft_give_the_logits_of_peft(case):
    folder, expected = hugging_face.look(DATA / "parity" / case), load_file(DATA / "peft" / case / "expected.safetensors")
    adapters = adapters_of(case, load_file(DATA / "peft" / case / "adapter_model.safetensors"))
    model = lora.adapt(Decoder(folder.config, rngs=nnx.Rngs(0)), CASES[case], lambda name: jax.random.key(0))
    graph, params, frozen = nnx.split(model, nnx.Param, lora.Frozen)
    nnx.replace_by_pure_dict(frozen, from_tensors(folder.config, load_file(DATA / "parity" / case / "model.safetensors")))
    nnx.replace_by_pure_dict(params, {"layers": {name.removeprefix("layers."): value for name, value in adapters.items()}})
    logits = np.asarray(jax.jit(lambda *states: nnx.merge(graph, *states)(expected["tokens"]))(params, frozen))
    assert np.abs(logits - expected["logits"]).max() < 1e-5 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_peft_writes(case):
    config = hugging_face.read_config(DATA / "parity" / case)
    tensors = load_file(DATA / "peft" / case / "adapter_model.safetensors")
    about, written = to_adapter(config, CASES[case], adapters_of(case, tensors), case)
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
    theirs = json.loads((DATA / "peft" / case / "adapter_config.json").read_text())
    theirs["target_modules"] = sorted(theirs["target_modules"])
    # What is not written has the value that PEFT takes by default.
    assert about == {name: theirs[name] for name in about}


def test_an_adapter_that_peft_has_no_name_for_is_refused():
    config = hugging_face.read_config(DATA / "parity" / "llama3")
    with pytest.raises(UsageError, match=r"other\.kernel has an adapter: PEFT has no name for it in a .* llama"):
        to_adapter(
            config, CASES["llama3"], {"other.kernel_lora_a": np.zeros((4, 2)), "other.kernel_lora_b": np.zeros((2, 4))}, ""
        )
