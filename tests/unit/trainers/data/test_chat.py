"""Documents of conversations and completions: what counts as a target."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from gangway.errors import DataError, UsageError
from tests.unit import chat_folders
from trainers.config import DataConfig
from trainers.data.chat import ChatEncoder, CompletionEncoder
from trainers.data.sources.preference import PairEncoder
from trainers.text.tokenizers import FolderTokenizer, load

TURNS = [("system", "be brief"), ("user", "hi é?"), ("assistant", "Hello \u00e9!"), ("user", "more"), ("assistant", "No.")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_folders.by_template(lambda: tmp_path_factory.mktemp("chat"))


def texts(tokenizer, document):
    """The whole text of a document, and that of each run of targets."""
    tokens, weight = document.tokens.tolist(), document.token_weight
    assert document.tokens.dtype == np.int32
    assert weight.dtype == np.float32
    assert len(weight) == len(tokens)
    edges = np.flatnonzero(np.diff([0, *(weight > 0), 0]))
    show = tokenizer._tokenizer.decode
    return show(tokens), [show(tokens[first:end]) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def encoded(tokenizer, messages):
    (document,) = ChatEncoder(tokenizer).encode([{"messages": messages}])
    return texts(tokenizer, document)


@pytest.mark.parametrize(
    ("template", "end"), [("CHATML", "<|im_end|>"), ("MARKED", "<|im_end|>"), ("LLAMA", "<|eot_id|>"), ("QWEN", "<|im_end|>")]
)
def test_what_the_assistant_writes_and_the_end_of_its_turn_are_the_targets(tokenizer, template, end):
    made = tokenizer(getattr(chat_folders, template))
    # A generation begins before the place for thoughts, and so does an answer.
    thought = "<think>\n\n</think>\n\n" if template == "QWEN" else ""
    assert encoded(made, MESSAGES) == (made.render(MESSAGES), [f"Hello \u00e9!{end}", f"{thought}No.{end}"])


def test_a_template_with_marks_gives_the_same_document_as_one_without(tokenizer):
    marked, plain = (ChatEncoder(tokenizer(each)).encode([{"messages": MESSAGES}])[0] for each in WITH_AND_WITHOUT)
    np.testing.assert_array_equal(marked.tokens, plain.tokens)
    np.testing.assert_array_equal(marked.token_weight, plain.token_weight)


WITH_AND_WITHOUT = (chat_folders.MARKED, chat_folders.CHATML)


def test_white_space_that_the_template_takes_away_is_no_target(tokenizer):
    spaced = [*MESSAGES[:2], {"role": "assistant", "content": "\n Hello \n"}]
    assert encoded(tokenizer(chat_folders.LLAMA), spaced)[1] == ["Hello<|eot_id|>"]
    assert encoded(tokenizer(chat_folders.CHATML), spaced)[1] == ["\n Hello \n<|im_end|>"]


def test_an_answer_that_is_empty_or_occurs_elsewhere_too(tokenizer):
    messages = [{"role": "user", "content": "No."}, {"role": "assistant", "content": ""}, *MESSAGES[3:]]
    assert encoded(tokenizer(chat_folders.CHATML), messages)[1] == ["<|im_end|>", "No.<|im_end|>"]


def test_a_turn_may_end_with_white_space_or_without_a_token(tokenizer):
    spaced = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + ' <|end|>' }}{% endfor %}"
    assert encoded(tokenizer(spaced), MESSAGES)[1] == ["Hello \u00e9! <|end|>", "No. <|end|>"]
    endless = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    assert encoded(tokenizer(endless), MESSAGES)[1] == ["Hello \u00e9!", "No."]


def test_a_thought_that_the_template_drops_is_an_error_that_shows_it(tokenizer):
    thinking = [*MESSAGES[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, *MESSAGES[3:]]
    error = (
        r"begins with 'be brief': .* it changes the content of message 2.* expected '<think>.*and it writes 'Hello.*generation"
    )
    with pytest.raises(DataError, match=error):
        encoded(tokenizer(chat_folders.QWEN), thinking)
    apart = [*MESSAGES[:2], {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}]
    with pytest.raises(DataError, match=r"does not write reasoning_content: .*data\.ignore_columns=\[reasoning_content\]"):
        encoded(tokenizer(chat_folders.QWEN), apart)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", r"leaves out the content of message 2: give .* {% gen"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "repeats the content of message 2"),
        ("{{ messages[2].content | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "before message 2 changes with"),
        ("{% for m in messages %}{{ m.content }}{{ m.content | length }}{% endfor %}", "content of message 2, or what follows"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses it: TemplateError: roles must alternate"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
            "marks 5 pieces .* 2 messages",
        ),
    ],
)
def test_a_template_that_does_not_write_the_conversation_as_it_is(tokenizer, template, error):
    with pytest.raises(DataError, match=error):
        encoded(tokenizer(template), MESSAGES)


def test_an_example_without_a_target_is_an_error_that_shows_it(tokenizer):
    with pytest.raises(DataError, match="conversation that begins with 'be brief' has no target: no message of it is the assist"):
        encoded(tokenizer(chat_folders.CHATML), MESSAGES[:2])
    with pytest.raises(DataError, match="an empty conversation has no target"):
        encoded(tokenizer(chat_folders.CHATML), [])
    silent = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="begins with 'hi' has no target: none of its"):
        encoded(tokenizer(silent), [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}])


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"text": "a", "id": None}, "there is no 'messages': it has text"),
        ({"messages": "hello"}, "column 'messages' is a str: expected a list of messages"),
        (
            {"messages": [{"role": "user"}]},
            r"message 0 is '{\"role\": \"user\"}': expected a mapping with the texts role and con",
        ),
    ],
)
def test_records_that_are_no_conversation(tokenizer, record, error):
    with pytest.raises(DataError, match=error):
        ChatEncoder(tokenizer(chat_folders.CHATML)).encode([record])


@pytest.mark.parametrize("role", ["Assistant", "assistant ", "model", "bot", "gpt", "", "human"])
def test_a_role_that_may_be_another_name_of_the_assistant_is_refused(tokenizer, role):
    said = [{"role": "user", "content": "q"}, {"role": role, "content": "a"}, {"role": "user", "content": "q"}]
    with pytest.raises(DataError, match=f"message 1 is of role {role!r}: expected assistant, whose messages are"):
        encoded(tokenizer(chat_folders.CHATML), [*said, {"role": "assistant", "content": "b"}])


def test_a_completion_that_repeats_its_prompt_does_not_say_it_twice(tokenizer):
    made, asked = tokenizer(chat_folders.CHATML), [{"role": "user", "content": "a b?", "name": None}]
    answer = [{"role": "assistant", "content": "b"}]
    (plain,) = CompletionEncoder(made).encode([{"prompt": asked, "completion": answer}])
    for prompt, before in ((asked, asked), (asked, [{"role": "user", "content": "a b?"}]), ("a b?", asked)):
        (document,) = CompletionEncoder(made).encode([{"prompt": prompt, "completion": [*before, *answer]}])
        np.testing.assert_array_equal(document.tokens, plain.tokens)
        np.testing.assert_array_equal(document.token_weight, plain.token_weight)
    with pytest.raises(DataError, match=r"the text in column 'completion' begins with that in 'prompt' \('a b\?'\), which"):
        CompletionEncoder(made).encode([{"prompt": "a b?", "completion": "a b? b"}])
    (document,) = CompletionEncoder(made).encode([{"prompt": "no", "completion": "no, thanks"}])  # a word may begin its answer
    assert made.raw(document.tokens.tolist()) == "nono, thanks<|end|>"


@pytest.mark.parametrize("ignored", [(), ("prompt", "score")])
def test_the_messages_of_a_pair_may_have_the_prompt_too(tokenizer, ignored):
    asked, answers = [{"role": "user", "content": "a b?"}], [[{"role": "assistant", "content": each}] for each in ("b", "c")]
    encoder = PairEncoder(tokenizer(chat_folders.CHATML), ignored)
    pair = {"chosen": [*asked, *answers[0]], "rejected": [*asked, *answers[1]]}
    of_pair = [texts(encoder.tokenizer, document) for document in encoder.pair(pair)]
    assert [targets for _, targets in of_pair] == [["b<|im_end|>"], ["c<|im_end|>"]]
    for prompt in ("a b?", asked, *(["another prompt"] if ignored else [])):
        record = {"prompt": prompt, **pair, **({"score": 9.0} if ignored else {})}
        assert [texts(encoder.tokenizer, document) for document in encoder.pair(record)] == of_pair


def test_conversations_need_a_chat_template(tokenizer):
    for without in (load("bytes"), tokenizer(None)):
        with pytest.raises(UsageError, match=r"has no chat template: expected chat_template\.jinja"):
            ChatEncoder(without).encode([{"messages": MESSAGES}])


def test_a_completion_is_the_target_with_the_end_of_the_text(tokenizer):
    made = tokenizer(chat_folders.CHATML)
    (document,) = CompletionEncoder(made).encode([{"prompt": "2 + 2 = ", "completion": "4"}])
    assert texts(made, document) == ("2 + 2 = 4<|end|>", ["4<|end|>"])
    (of_bytes,) = CompletionEncoder(load("bytes")).encode([{"prompt": "ab", "completion": "c"}])
    assert (of_bytes.tokens.tolist(), of_bytes.token_weight.tolist()) == ([97, 98, 99], [0, 0, 1])
    with pytest.raises(DataError, match="completion of the prompt 'a' is empty: there is no target"):
        CompletionEncoder(made).encode([{"prompt": "a", "completion": ""}])


def test_a_completion_is_tokenized_with_its_prompt(tmp_path):
    """A tokenizer like SentencePiece's puts a space before each text, and knows the token 'ab'."""
    letters = ["<unk>", "</s>", "▁", *map(chr, range(33, 127)), "ab"]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [("a", "b")], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    folder = chat_folders.write(tmp_path / "folder", None, eos_token="</s>")
    made.save(str(folder / "tokenizer.json"))
    made.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (FolderTokenizer(str(folder)), load(str(tmp_path / "tokenizer.json"))):
        encoder = CompletionEncoder(tokenizer)
        (document,) = encoder.encode([record := {"prompt": "2+2=", "completion": "4 = 5"}])
        shown = [tokenizer.text_of(int(token)) for token in document.tokens]
        end = ["</s>"] if isinstance(tokenizer, FolderTokenizer) else []
        assert shown == ["▁", "2", "+", "2", "=", "4", "▁", "=", "▁", "5", *end]
        assert document.token_weight.tolist() == [0] * 5 + [1] * (5 + len(end))
        assert encoder.notes(record) == []
        (document,) = encoder.encode([record := {"prompt": "xa", "completion": "bc"}])
        assert document.token_weight.tolist() == [0, 0] + [1] * (2 + len(end))  # 'ab' is the model's
        (line,) = encoder.notes(record)
        assert "begins within a token, and is divided from its prompt before 'ab': a generation begins after" in line
    (document,) = CompletionEncoder(load("bytes")).encode([{"prompt": "é", "completion": "ü"}])
    assert document.token_weight.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("template", WITH_AND_WITHOUT)
def test_of_a_completion_in_messages_the_prompt_is_no_target(tokenizer, template):
    made = tokenizer(template)
    (document,) = CompletionEncoder(made).encode([{"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}])
    assert texts(made, document) == (made.render(MESSAGES), ["No.<|im_end|>"])
    with pytest.raises(DataError, match="has no target: no message"):
        CompletionEncoder(made).encode([{"prompt": MESSAGES[:3], "completion": MESSAGES[3:4]}])


def test_the_digest_tells_encoders_apart(tokenizer):
    one, other = tokenizer(chat_folders.CHATML), tokenizer(chat_folders.LLAMA)
    digests = [encoder.digest() for encoder in (ChatEncoder(one), ChatEncoder(other), ChatEncoder(one, "turns"))]
    assert len({*digests, CompletionEncoder(one).digest(), CompletionEncoder(one, "question").digest()}) == 5
    assert ChatEncoder(FolderTokenizer(one.source)).digest() == digests[0]


OF_THE_NEXT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '|' }}{% if loop.nextitem %}"
    "{{ loop.nextitem.content }}{% endif %}{% endgeneration %}{% elif loop.first %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_that_marks_what_others_say_is_refused(tokenizer):
    said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    with pytest.raises(DataError, match=r"marks what role user says in message 2: .* around what the assistant writes alone"):
        encoded(tokenizer(OF_THE_NEXT), said)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("m.content.split('</think>')[-1]", "does not write the content of message 1 as it is: '<think>why</think>so'"),
        ("m.content if not m.tool_calls else ''", "does not write the content of message 1 as it is"),
        ("m.content[:2]", "does not write the content of message 1 as it is"),
        ("m.content[0].text", "does not write the content of message 1 as it is: 'two'"),
    ],
)
def test_what_a_template_with_marks_does_not_write_is_refused_as_without_marks(tokenizer, content, error):
    says = [{"type": "text", "text": each} for each in ("one", "two")] if "[0]" in content else "<think>why</think>so"
    answer = {"role": "assistant", "content": says, "tool_calls": [{"name": "look", "arguments": {}}]}
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}{% generation %}{{ CONTENT }}"
        "{% for c in m.tool_calls or [] %}{{ c.name }}{{ c.arguments | tojson }}{% endfor %}{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=error):
        encoded(tokenizer(template.replace("CONTENT", content)), [{"role": "user", "content": "so? one or two"}, answer])


def test_a_special_token_that_takes_the_white_space_behind_it_is_no_target(tmp_path):
    template = "{% for m in messages %}{{ m.role + '<|im_start|>\n' + m.content + '<|im_end|>' }}{% endfor %}"
    made = FolderTokenizer(str(chat_folders.write(tmp_path / "folder", template, rstrip=True)))
    says = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " 4"}]
    assert encoded(made, says) == ("user<|im_start|>q<|im_end|>assistant<|im_start|>4<|im_end|>", ["4<|im_end|>"])


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last and enable_thinking is "
    "defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def test_the_switches_of_a_template_are_those_of_training_and_of_generations(tmp_path):
    folder, thought = str(chat_folders.write(tmp_path / "folder", THINKING)), "<think>\n\n</think>\n\n"
    asked = [{"role": "user", "content": "q"}]
    record = {"messages": [*asked, {"role": "assistant", "content": "yo"}]}
    for fields, given in (((), ""), ((("enable_thinking", True),), ""), ((("enable_thinking", False),), thought)):
        made = load(folder, fields=fields)
        (document,) = ChatEncoder(made).encode([record])
        first = int(np.flatnonzero(document.token_weight)[0])
        assert made.raw(document.tokens[first:].tolist()) == "yo<|im_end|>\n"
        # A generation begins with the very tokens after which training had its targets.
        assert document.tokens[:first].tolist() == made.chat(asked)
        assert made.raw(made.chat(asked)).endswith(f"<|im_start|>assistant\n{given}")
    off = load(folder, fields=(("enable_thinking", False),))
    (document,) = ChatEncoder(off).encode([{**record, "enable_thinking": True}])  # the column of a record counts more
    assert thought not in off.raw(document.tokens.tolist())
    assert (
        len(
            {load(folder, fields=fields).digest() for fields in ((), (("enable_thinking", False),), (("enable_thinking", True),))}
        )
        == 3
    )
    for name in ("no_such", "tokenize"):
        with pytest.raises(
            UsageError, match=rf"data\.template_fields: the chat template of .*folder reads no {name}: leave it out"
        ):
            ChatEncoder(load(folder, fields=((name, True),))).encode([record])
    for name, value in (("a b", 1), ("enable_thinking", [1]), ("x", None)):
        with pytest.raises(ValueError, match=rf"template_fields\.{name} = .*: expected a name such as enable_thinking, and true"):
            DataConfig(template_fields={name: value})


def test_a_generation_that_begins_otherwise_than_an_answer_in_training_is_told(tokenizer):
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yo"}]}
    opens = chat_folders.CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    (line,) = ChatEncoder(tokenizer(opens)).notes(record)
    assert "a generation begins otherwise than an answer in training: after ...'" in line
    assert "<|im_start|>assistant\\n<think>\\n', and in training after ...'" in line
    for template in (chat_folders.CHATML, chat_folders.MARKED, chat_folders.LLAMA, chat_folders.QWEN):
        assert ChatEncoder(tokenizer(template)).notes(record) == []


def test_a_content_that_is_dropped_beside_a_call_that_has_its_text_is_refused(tokenizer):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}{{ m.tool_calls[0].name }}"
        "{{ m.tool_calls[0].arguments | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "look", "tool_calls": [{"name": "look", "arguments": {"n": 0}}]}
    with pytest.raises(DataError, match="does not write the content of message 1 as it is: 'look'"):
        encoded(tokenizer(template), [{"role": "user", "content": "q"}, answer])
