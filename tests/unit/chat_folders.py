"""Folders of Hugging Face with a tiny tokenizer (a token is a byte, or a special one) and chat templates like those of models."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainers.text.tokenizers import FolderTokenizer

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
# Like those for calls of tools: what the tools are stands first, a call is JSON, and the result of one has its place.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{% set f = c.function or c %}{{ \'<call>{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
    "{{ '}</call>' }}{% endfor %}{% if m.tool_call_id %}{{ ' for ' + m.tool_call_id }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A call ends with another token than a content does, and the content of a call is left out.
LLAMA_TOOLS = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.tool_calls %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|end|>' }}{% else %}{{ m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Like those of Mistral: no header before an answer, and roles that must alternate.
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[RESULT]' + m.content + '[/RESULT]' }}{% elif m.tool_calls %}{{ '[CALLS][' }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ ']<|end|>' }}{% else %}"
    "{{ ' ' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
)


def write(
    path: Path,
    template: str | None = CHATML,
    *,
    plain: Sequence[str] = (),
    around: str | None = None,
    rstrip: bool = False,
    **about: Any,
) -> Path:
    """Returns the folder `path` with the tokenizer, and this chat template. `plain`: tokens that were added as not special.
    `around`: what the tokenizer puts around a text, such as `<|begin_of_text|> $A <|end|>`. `rstrip`: the special tokens take the
    white space behind them. `about`: more of its configuration."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    path.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if around is not None:
        known = [(text, 256 + number) for number, text in enumerate(SPECIAL)]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=known)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config | about))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def by_template(new_folder: Callable[[], Path]) -> Callable[[str], FolderTokenizer]:
    """Returns a function that gives the tokenizer with a chat template, which it makes once, in a folder of its own."""
    return functools.cache(lambda template: FolderTokenizer(str(write(new_folder() / "folder", template))))
