"""Adapters in the form of PEFT, against what PEFT itself has saved and computed (`make parity`)."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gangway.errors import UsageError
from gangway.storage.opening import place_of
from tests import ROOT, fuzz
from tests.unit.hf_folders import nested, parameters_of
from trainers.checkpoint import hugging_face
from trainers.config import LoraConfig
from trainers.config.hf_files import ADAPTER_FILE
from trainers.models import lora
from trainers.models.decoder import Decoder
from trainers.models.hf import peft_in
from trainers.models.hf.peft import to_adapter

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
    folder, expected = (
        hugging_face.look(place_of(DATA / "parity" / case)),
        load_file(DATA / "peft" / case / "expected.safetensors"),
    )
    adapters = adapters_of(case, load_file(DATA / "peft" / case / "adapter_model.safetensors"))
    model = lora.adapt(Decoder(folder.config, rngs=nnx.Rngs(0)), CASES[case], lambda name: jax.random.key(0))
    graph, params, frozen = nnx.split(model, nnx.Param, lora.Frozen)
    nnx.replace_by_pure_dict(frozen, nested(parameters_of(DATA / "parity" / case)))
    nnx.replace_by_pure_dict(params, {"layers": {name.removeprefix("layers."): value for name, value in adapters.items()}})
    logits = np.asarray(jax.jit(lambda *states: nnx.merge(graph, *states)(expected["tokens"]))(params, frozen))
    assert np.abs(logits - expected["logits"]).max() < 1e-5 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_peft_writes(case):
    config = hugging_face.read_config(place_of(DATA / "parity" / case))
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
    config = hugging_face.read_config(place_of(DATA / "parity" / "llama3"))
    with pytest.raises(UsageError, match=r"other\.kernel has an adapter: PEFT has no name for it in a .* llama"):
        to_adapter(
            config, CASES["llama3"], {"other.kernel_lora_a": np.zeros((4, 2)), "other.kernel_lora_b": np.zeros((2, 4))}, ""
        )


def damaged(folder, change=lambda tensors: None, **about):
    """A copy of the adapter for the Llama whose files were changed."""
    folder.mkdir()
    theirs = json.loads((DATA / "peft" / "llama3" / ADAPTER_FILE).read_text())
    (folder / ADAPTER_FILE).write_text(json.dumps(theirs | about))
    tensors = load_file(DATA / "peft" / "llama3" / peft_in.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / peft_in.WEIGHTS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_is_read(case):
    config = hugging_face.read_config(place_of(DATA / "parity" / case))
    expected = adapters_of(case, load_file(DATA / "peft" / case / peft_in.WEIGHTS))
    found = peft_in.read(DATA / "peft" / case, config, CASES[case])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


WITH_TABLES = {
    "llama3": LoraConfig(rank=2, alpha=8, targets=("query",), whole=("embed|unembed",), new_tokens=3),
    "gemma": LoraConfig(rank=2, alpha=8, targets=("query",), whole=("embed",), new_tokens=3),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", WITH_TABLES)
def test_tables_with_new_tokens_give_the_logits_of_peft(case):
    lora_config, config = WITH_TABLES[case], hugging_face.read_config(place_of(DATA / "parity" / case))
    config = dataclasses.replace(config, vocab_size=64 + lora_config.new_tokens)
    found = peft_in.read(DATA / "peft" / f"{case}_tokens", config, lora_config)
    expected = load_file(DATA / "peft" / f"{case}_tokens" / "expected.safetensors")
    assert found["embed"].shape == (67, 32)
    base = nested(parameters_of(DATA / "parity" / case))
    assert logits_are(config, lora_config, base, found, expected["tokens"], expected["logits"])
    # PEFT writes them under several names, of which one is enough.
    about, written = to_adapter(config, lora_config, found, case)
    theirs = load_file(DATA / "peft" / f"{case}_tokens" / peft_in.WEIGHTS)
    # Without it PEFT does not load a model with one table.
    assert "base_model.model.lm_head.weight" in written
    for name, value in written.items():
        of_peft = theirs.get(name.replace(".weight", ".modules_to_save.weight"))
        np.testing.assert_array_equal(value, theirs[name] if of_peft is None else of_peft, err_msg=name)
    said = json.loads((DATA / "peft" / f"{case}_tokens" / ADAPTER_FILE).read_text())
    assert sorted({name.rpartition(".")[2] for name in said["modules_to_save"]}) == about["modules_to_save"]
    assert said["ensure_weight_tying"] == about.get("ensure_weight_tying", False) == config.tie_embeddings


def logits_are(config, lora_config, base, adapters, tokens, expected):
    model = lora.adapt(Decoder(config, rngs=nnx.Rngs(0)), lora_config, lambda name: jax.random.key(0))
    graph, params, frozen = nnx.split(model, nnx.Param, lora.Frozen)
    nnx.replace_by_pure_dict(frozen, {name: value for name, value in base.items() if name not in adapters})
    nested = {name: value for name, value in adapters.items() if "." not in name}
    nested["layers"] = {name.removeprefix("layers."): value for name, value in adapters.items() if "." in name}
    nnx.replace_by_pure_dict(params, nested)
    logits = np.asarray(jax.jit(lambda *states: nnx.merge(graph, *states)(tokens))(params, frozen))
    return np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


def test_one_adapter_for_what_lies_in_one_matrix_is_one_for_each(tmp_path):
    """As PEFT makes it by itself: all outputs of the matrix have the rank together."""
    config = hugging_face.read_config(place_of(DATA / "parity" / "phi3"))
    rng = np.random.default_rng(0)
    b = rng.normal(size=(2, 96, 4)).astype(np.float32)
    a = rng.normal(size=(2, 4, 32)).astype(np.float32)
    name = "base_model.model.model.layers.{}.mlp.gate_up_proj.lora_{}.weight"
    save_file({name.format(n, end): part[n] for n in range(2) for end, part in (("A", a), ("B", b))}, tmp_path / peft_in.WEIGHTS)
    (tmp_path / ADAPTER_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    found = peft_in.read(tmp_path, config, LoraConfig(rank=4, alpha=8, targets=("gate|up",)))
    for ours, rows in (("gate", slice(48)), ("up", slice(48, None))):
        product = found[f"layers.{ours}_lora_a"] @ found[f"layers.{ours}_lora_b"]
        np.testing.assert_allclose(product, np.einsum("lor,lri->lio", b, a)[..., rows], rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match=r"lora\.targets: up has an adapter there, and none here; add it"):
        peft_in.read(tmp_path, config, LoraConfig(rank=4, alpha=8, targets=("gate",)))
    with pytest.raises(UsageError, match=r"lora\.rank = 2: mlp\.gate_up_proj has the rank 4 there; set lora\.rank: 4 and a"):
        peft_in.read(tmp_path, config, LoraConfig(rank=2, alpha=8, targets=("gate|up",)))


def without_a_layer(tensors):
    del tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"]


@pytest.mark.parametrize(
    ("settings", "change", "about", "message"),
    [
        (
            {"rank": 8},
            None,
            {},
            r"lora\.rank = 8: self_attn\.q_proj has the rank 4 there; set lora\.rank: 4 and a lora\.alpha of 6",
        ),
        ({"alpha": 8}, None, {}, r"lora\.alpha = 8: self_attn\.q_proj has the alpha 6 for the rank 4 there; set lora\.alpha: 6"),
        ({}, None, {"alpha_pattern": {"v_proj": 12}}, r"lora\.alpha = 6: self_attn\.v_proj has the alpha 12 for the rank 4"),
        (
            {},
            None,
            {"alpha_pattern": {r"layers\.0\.self_attn\.v_proj": 12}},
            r"alpha_pattern: self_attn\.v_proj has the alpha 12 in layer 0 and 6 in layer 1: expected one in all layers; merge",
        ),
        (
            {},
            None,
            {"alpha_pattern": {"1.self_attn.q_proj": 3}},
            r"self_attn\.q_proj has the alpha 6 in layer 0 and 3 in layer 1",
        ),
        ({"targets": ("query",)}, None, {}, r"lora\.targets: self_attn\.v_proj has an adapter there, and value has none here"),
        ({"targets": ()}, None, {}, r"lora\.targets: key has an adapter here, and self_attn\.k_proj has none there"),
        ({}, without_a_layer, {}, r"self_attn\.v_proj has an adapter in some layers alone|other ranks"),
        ({}, lambda tensors: tensors.update(odd=np.zeros(1)), {}, r"odd: the adapter has them, and this run has none such"),
        (
            {},
            lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": np.zeros((64, 32))}),
            {},
            r"embed_tokens\.weight: the adapter has them, and this run has none such; name the tables in lora\.whole",
        ),
        ({}, None, {"use_dora": True}, r"use_dora = true: expected false in an adapter of PEFT"),
        ({}, None, {"use_rslora": True}, r"use_rslora = true: expected false"),
        ({}, None, {"init_lora_weights": "pissa"}, r"init_lora_weights = 'pissa': expected true or false or 'gaussian'"),
        ({}, None, {"bias": "all"}, r"bias = 'all': expected 'none'"),
        ({}, None, {"peft_type": "IA3"}, r"peft_type = 'IA3': expected 'LORA'"),
        ({}, None, {"use_xlora": True}, r"use_xlora = true: an adapter of PEFT has no such key here"),
    ],
)
def test_an_adapter_of_peft_that_does_not_fit_is_refused_by_name(tmp_path, settings, change, about, message):
    config, usual = hugging_face.read_config(place_of(DATA / "parity" / "llama3")), CASES["llama3"]
    folder = damaged(tmp_path / "adapter", change or (lambda tensors: None), **about)
    with pytest.raises(UsageError, match=message):
        peft_in.read(folder, config, dataclasses.replace(usual, **settings))


# ---------------------------------------------------------------------- adapters with patterns

MODULES = {
    **{f"self_attn.{theirs}_proj": ours for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))},
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}


def drawn_adapter(rng):
    """What PEFT would have saved for two layers of the Llama: its configuration and tensors, and what each module adds to its
    weight, after `get_pattern_key` and `scaling` of PEFT."""
    config = hugging_face.read_config(place_of(DATA / "parity" / "llama3"))
    shapes = {module: parameters_of(DATA / "parity" / "llama3")[f"layers.{ours}"].shape[1:] for module, ours in MODULES.items()}
    chosen = [module for module in MODULES if rng.random() < 0.5] or ["mlp.up_proj"]

    def pattern():
        module, layer = str(rng.choice(chosen)), int(rng.integers(2))
        last = module.rpartition(".")[2]
        return str(
            rng.choice(
                [
                    last,
                    module,
                    last[1:],
                    f"layers.{layer}.{module}",
                    rf"^model\.layers\.{layer}\.{module}",
                    rf".*\.{layer}\..*",
                    "nothing",
                ]
            )
        )

    ranks = {pattern(): int(rng.integers(1, 4)) for _ in range(rng.choice([0, 0, 1, 2]))}
    alphas = {pattern(): int(rng.integers(1, 9)) for _ in range(rng.choice([0, 1, 1, 2]))}
    about = {"peft_type": "LORA", "r": int(rng.integers(1, 4)), "lora_alpha": int(rng.integers(1, 9)), "bias": "none"}
    about |= {"target_modules": [module.rpartition(".")[2] for module in chosen], "rank_pattern": ranks, "alpha_pattern": alphas}
    tensors, added, found = {}, {}, {}

    def of(patterns, name, default):
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    for layer in range(config.num_layers):
        for module in chosen:
            name = f"model.layers.{layer}.{module}"
            rank, alpha = of(ranks, name, about["r"]), of(alphas, name, about["lora_alpha"])
            wide, long = shapes[module]
            a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, wide), (long, rank)))
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            added[MODULES[module], layer] = (alpha / rank) * (b @ a).T
            found[MODULES[module], layer] = (rank, alpha)
    return config, about, tensors, added, found


def check_drawn(number, folder):
    """Each adapter is read as PEFT computes it, or refused because a module has another rank or another scale."""
    rng = np.random.default_rng(number)
    config, about, tensors, added, found = drawn_adapter(rng)
    (folder / ADAPTER_FILE).write_text(json.dumps(about))
    save_file(tensors, folder / peft_in.WEIGHTS)
    rank, alpha = list(found.values())[rng.integers(len(found))]  # as the error would say
    settings = LoraConfig(rank=rank, alpha=alpha, targets=("|".join(sorted({name for name, _ in found})),))
    alike = {(of, scale / of) for of, scale in found.values()} == {(rank, alpha / rank)}
    if not alike:
        with pytest.raises(UsageError, match=r"alpha_pattern: |lora\.rank = |lora\.alpha = |other ranks in some layers"):
            peft_in.read(folder, config, settings)
        return False
    params = peft_in.read(folder, config, settings)
    for (name, layer), delta in added.items():
        a, b = (params[f"layers.{name}_lora_{end}"][layer] for end in "ab")
        np.testing.assert_allclose(settings.scale * (a @ b), delta, rtol=1e-5, atol=1e-5, err_msg=str(number))
    return True


def test_many_adapters_with_patterns_are_read_as_peft_reads_them_or_refused(tmp_path):
    first = 1000 * fuzz.seed(1)
    read = [check_drawn(first + number, tmp_path) for number in range(fuzz.count(40))]
    assert {*read} == {False, True}
