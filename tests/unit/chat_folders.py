"""Folders of Hugging Face with a tiny tokenizer (a token is a byte, or a special one) and chat templates like those of models."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NUM_IDS = 256 + len(SPECIAL)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like that of Llama 3: it begins with a token of its own, and takes the white space around contents away.
LLAMA = (
    "{% for m in messages %}{% if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Like that of Qwen 3: what the assistant has thought stays in its last message alone, which always has a place for it.
QWEN = (
    "{% for m in messages %}{% set content = m.content %}{% set thought = '' %}{% if m.role == 'assistant' and '</think>' in "
    "content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set content = "
    "content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and "
    "loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(path: Path, template: str | None = CHATML) -> Path:
    """Returns the folder `path` with the tokenizer, and this chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path
