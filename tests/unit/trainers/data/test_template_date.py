"""The day that a chat template writes is fixed with the data: on another day the same record is the same tokens."""

from __future__ import annotations

from datetime import date

import pytest

from gangway.errors import UsageError
from tests.unit import chat_folders
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data.chat import ChatEncoder
from trainers.text import tokenizers

TODAY = "{% if day is not defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
DATED = f"\n{TODAY}{{{{ '[' + day + ']' }}}}{chat_folders.CHATML}"
RECORD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(chat_folders.write(tmp_path_factory.mktemp("chat") / "folder", DATED))


def text_of(tokenizer, record):
    (document,) = ChatEncoder(tokenizer).encode([record])
    return tokenizer._tokenizer.decode(document.tokens.tolist())


def test_the_day_is_that_of_the_settings_and_reported_by_the_digest(folder):
    given = TrainingArguments(name="t", max_num_steps=1, data=DataConfig(tokenizer=folder, template_date="2024-07-26"))
    tokenizer = tokenizers.of(given)
    assert text_of(tokenizer, RECORD).startswith("\n[26 Jul 2024]<|im_start|>user")
    assert tokenizer._tokenizer.decode(tokenizer.chat(RECORD["messages"][:1])).startswith("\n[26 Jul 2024]<|im_start|>user")
    other = tokenizers.FolderTokenizer(folder, date(2024, 7, 27))
    assert text_of(other, RECORD).startswith("\n[27 Jul 2024]")
    assert ChatEncoder(other).digest() != ChatEncoder(tokenizer).digest()


def test_a_template_that_writes_the_day_needs_one(folder):
    tokenizer = tokenizers.FolderTokenizer(folder)
    with pytest.raises(UsageError, match=r"writes the day \(strftime_now\).* such as data\.template_date=\d{4}-\d\d-\d\d"):
        ChatEncoder(tokenizer).encode([RECORD])
    assert text_of(tokenizer, {**RECORD, "day": "now"}).startswith("\n[now]")
    # Who asks the model asks it today.
    assert tokenizer.render(RECORD["messages"]).startswith(date.today().strftime("\n[%d %b %Y]"))


@pytest.mark.parametrize("template", [f"\n  {chat_folders.CHATML}", chat_folders.LLAMA])
def test_a_template_with_a_day_is_rendered_like_one_without(tmp_path, template):
    plain = tokenizers.FolderTokenizer(str(chat_folders.write(tmp_path / "plain", template)))
    dated = tokenizers.FolderTokenizer(
        str(chat_folders.write(tmp_path / "dated", template + "{% if never %}{{ strftime_now('%d') }}{% endif %}"))
    )
    assert dated.render(RECORD["messages"]) == plain.render(RECORD["messages"])
    assert text_of(dated, RECORD) == text_of(plain, RECORD)


def test_a_template_that_draws_at_random_is_refused(tmp_path):
    drawn = chat_folders.write(tmp_path / "folder", "{{ ['a', 'b'] | random }}" + chat_folders.CHATML)
    with pytest.raises(UsageError, match="draws at random"):
        ChatEncoder(tokenizers.FolderTokenizer(str(drawn))).encode([RECORD])


def test_other_templates_of_the_folder_are_part_of_the_digest(tmp_path):
    path = chat_folders.write(tmp_path / "folder")
    before = tokenizers.FolderTokenizer(str(path)).digest()
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(chat_folders.TOOLS)
    assert tokenizers.FolderTokenizer(str(path)).digest() != before


@pytest.mark.parametrize("day", ["26 Jul 2024", "2024-7-26", "20240726"])
def test_a_day_is_written_in_one_way(day):
    assert from_dict(
        TrainingArguments, {"name": "t", "max_num_steps": 1, "data": {"template_date": date(2026, 11, 25)}}
    ).data == (DataConfig(template_date="2026-11-25"))
    with pytest.raises(ValueError, match=r"template_date = .* expected a day, such as 2026-11-25"):
        from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "data": {"template_date": day}})
