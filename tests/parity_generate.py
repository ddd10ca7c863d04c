"""Makes `tests/unit/data/generate/`: two exports of small runs that have learned some answers, and what `transformers` generates
with them. Each answer must end with the turn, and not with the limit.

    python -m tests.parity_generate train FOLDER          # here: trains, and exports
    build/parity/bin/python tests/parity_generate.py theirs FOLDER

`make parity` does both. The first needs the packages of this project, the second torch, transformers and peft.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 64
PROMPTS = ("2+2?", "a name?")
ANSWERS = {"merged": ("4", "Ada Lovelace"), "adapter": ("four, of course", "Grace")}
EXPECTED = "expected.json"


def train(out: Path) -> None:
    """The second run has adapters on the export of the first one."""
    from tests.unit import chat_folders

    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        words = chat_folders.write(Path(folder) / "words")
        small = {"width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 64}
        model = small | {"vocab_size": chat_folders.NUM_IDS}
        export_of(Path(folder), "merged", out, model=model, data={"tokenizer": str(words)})
        lora = {"rank": 8, "alpha": 32}
        export_of(
            Path(folder), "adapter", out, model={"pretrained": str(out / "merged")}, lora=lora, data={"tokenizer": str(words)}
        )


def export_of(folder: Path, name: str, out: Path, *, data: dict[str, Any], **settings: Any) -> None:
    from tests.unit.training import arguments
    from trainers.base import BaseTrainer
    from trainers.data.sources.conversations import conversations
    from trainers.export import to_hugging_face
    from trainers.models.hf.pretrained import resolved

    said = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in zip(PROMPTS, ANSWERS[name], strict=True)
    ]
    records = folder / f"{name}.jsonl"
    records.write_text("".join(json.dumps(each) + "\n" for each in said * 8))
    made = resolved(
        arguments(
            folder / name,
            task="trainers.tasks.causal_lm:CausalLMTask",
            data={"dataset": "a:b", "paths": [str(records)], "sequence_length": LIMIT, "eval_fraction": 0.1, **data},
            optimizer={"learning_rate": 0.01, "schedule": {"name": "constant"}, "weight_decay": 0.0},
            max_num_steps=200,
            checkpoint={"save_steps": None},
            evaluation={"max_batches": 1},
            previews={"prompts": []},
            **settings,
        )
    )
    trainer = BaseTrainer(made, *conversations(made))
    trainer.train()
    to_hugging_face(trainer.output.checkpoint_path, out / name, adapter=name == "adapter")
    if name == "adapter":
        about = json.loads((out / name / "adapter_config.json").read_text())
        (out / name / "adapter_config.json").write_text(
            json.dumps(about | {"base_model_name_or_path": "../merged"}, indent=2) + "\n"
        )


def theirs(out: Path) -> None:
    """Writes the answers of each export to each prompt, as text with its special tokens."""
    import peft
    import torch
    import transformers

    expected: dict[str, dict[str, str]] = {}
    for name in ANSWERS:
        model = transformers.AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
        if name == "adapter":
            model = peft.PeftModel.from_pretrained(model, out / name).eval()
            model.base_model.model.generation_config = transformers.GenerationConfig.from_pretrained(out / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / name)
        expected[name] = {}
        for prompt in PROMPTS:
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            tokens = model.generate(**chat, do_sample=False, max_new_tokens=LIMIT)[0, chat["input_ids"].shape[1] :]
            expected[name][prompt] = tokenizer.decode(tokens)
            assert len(tokens) < LIMIT, f"{name}: {prompt} runs to the limit: {expected[name][prompt]!r}"
    versions = {"transformers": transformers.__version__, "peft": peft.__version__}
    (out / EXPECTED).write_text(json.dumps({"made_with": versions, **expected}, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(expected, indent=2))


if __name__ == "__main__":
    {"train": train, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]))
