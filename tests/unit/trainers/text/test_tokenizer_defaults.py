"""What the file of a tokenizer keeps of an earlier use is not obeyed: each text has all of its tokens, the same each time."""

from __future__ import annotations

import ast
import json

import pytest

from gangway.errors import UsageError
from tests import PACKAGES, ROOT
from tests.unit import chat_folders
from trainers.text import tokenizers

TEXT = "hello there, hello world"


def write(folder, **changes):
    """Writes a folder with a tokenizer that cuts, fills up, and splits by chance."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    chat_folders.write(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "he", "hel", "hell", "hello"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = tokenizer.encode(TEXT).ids
    tokenizer.add_special_tokens(list(chat_folders.SPECIAL))
    if changes.get("truncation", True):
        tokenizer.enable_truncation(8)
    if changes.get("padding", True):
        tokenizer.enable_padding(length=64, pad_id=0, pad_token="!")
    if changes.get("dropout", True):
        tokenizer.model.dropout = 0.9
    tokenizer.save(str(folder / "tokenizer.json"))
    return plain


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_saved_truncation_padding_and_dropout_are_not_obeyed(tmp_path, name):
    plain = write(tmp_path / "model")
    tokenizer = tokenizers.load(str(tmp_path / "model" / name))
    for _ in range(5):  # by chance, one may be right
        assert tokenizer.encode(TEXT) == plain
        assert tokenizer.encode_documents([TEXT, "", TEXT]) == [plain, [], plain]
    if name == "":
        messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
        text = tokenizer.render(messages)
        assert tokenizer.encode_rendered(text).tokens == tokenizer.encode_rendered(text).tokens
        assert len(tokenizer.encode_rendered(text).tokens) > 2 * len(plain)
        assert len(tokenizer.chat(messages)) > 2 * len(plain)


def test_a_call_that_cuts_leaves_nothing_behind(tmp_path):
    plain = write(tmp_path / "model", truncation=False, padding=False)
    tokenizer = tokenizers.load(str(tmp_path / "model"))
    assert len(tokenizer._tokenizer(TEXT, truncation=True, max_length=3)["input_ids"]) == 3
    assert tokenizer.encode_documents([TEXT]) == [plain]


def test_a_tokenizer_that_samples_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "model")
    import transformers

    class Sampling:
        is_fast = False
        init_kwargs = json.loads('{"sp_model_kwargs": {"enable_sampling": true, "alpha": 0.1}}')

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: Sampling())
    with pytest.raises(UsageError, match=r"has sp_model_kwargs\.enable_sampling = true: .*; set it to false"):
        tokenizers.FolderTokenizer(str(tmp_path / "model")).encode(TEXT)


def test_the_code_of_a_folder_is_never_run_and_nobody_is_asked(tmp_path, monkeypatch):
    asked, ran = [], tmp_path / "ran"
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    about = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    folder = chat_folders.write(tmp_path / "model", **about)
    code = f"import pathlib\npathlib.Path({str(ran)!r}).write_text('')\n"
    (folder / "own.py").write_text(
        f"{code}from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    with pytest.raises(
        UsageError, match=r"the tokenizer in .*model cannot be read: it is code of the folder .*, which is not run here: give"
    ):
        tokenizers.load(str(folder)).encode(TEXT)
    assert (asked, ran.exists()) == ([], False)


def test_no_call_of_transformers_leaves_open_whether_code_of_a_folder_is_run():
    calls = [
        (path, node)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "from_pretrained" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert calls
    for path, node in calls:
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        assert given.get("trust_remote_code") is False, f"{path}:{node.lineno}"
