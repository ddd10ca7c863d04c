"""What a manifest notices."""

import random

import pytest

from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from trainers.checkpoint import manifest


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "12-1_0_00000000"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "0").write_bytes(bytes(range(200)))
    (folder / "state" / "_METADATA").write_text("{}")
    (folder / "meta.json").write_text(json_text.seal({"format": manifest.FORMAT, "step": 12, "loss": 0.5}))
    files = {name: manifest.digest(place_of(folder / name)) for name in manifest.names_below(place_of(folder))}
    manifest.write(place_of(folder), manifest.Manifest(12, 100.0, files))
    return folder


def problems(folder, digest_up_to=None):
    content = manifest.read(place_of(folder))
    return list(content.problems(place_of(folder), content.files, digest_up_to=digest_up_to))


def test_of_files_as_they_were_there_is_nothing_to_say(checkpoint):
    assert problems(checkpoint) == []
    assert list(manifest.read(place_of(checkpoint)).files) == ["meta.json", "state/_METADATA", "state/d/0"]
    assert manifest.read(place_of(checkpoint)).num_bytes == sum(
        (checkpoint / name).stat().st_size for name in manifest.names_below(place_of(checkpoint))
    )
    assert manifest.read_meta(place_of(checkpoint)) == {"format": manifest.FORMAT, "step": 12, "loss": 0.5}


def test_a_missing_a_shortened_and_a_changed_file_are_reported_apart(checkpoint):
    (checkpoint / "meta.json").unlink()
    (checkpoint / "state" / "_METADATA").write_text("[]")
    (checkpoint / "state" / "d" / "0").write_bytes(b"")
    assert problems(checkpoint) == [
        "meta.json is missing",
        "the contents of state/_METADATA are not those that were saved (digests differ)",
        "state/d/0 has 0 bytes, 200 were saved",
    ]


def test_digests_of_large_files_are_computed_only_if_asked(checkpoint):
    (checkpoint / "state" / "d" / "0").write_bytes(bytes(200))
    assert problems(checkpoint, digest_up_to=199) == []
    assert len(problems(checkpoint, digest_up_to=200)) == 1


def test_without_a_manifest_it_was_not_committed(checkpoint):
    (checkpoint / manifest.MANIFEST_FILE).unlink()
    with pytest.raises(manifest.UnfinishedError, match="not completely committed"):
        manifest.read(place_of(checkpoint))


@pytest.mark.parametrize(("name", "read"), [(manifest.MANIFEST_FILE, manifest.read), (manifest.META_FILE, manifest.read_meta)])
def test_no_changed_byte_of_a_document_changes_what_is_read(checkpoint, name, read, monkeypatch):
    monkeypatch.setattr(documents, "PAUSES_S", (0.0,))  # thousands of damaged documents, each read again
    path, dice = checkpoint / name, random.Random(0)
    whole, expected, noticed = path.read_bytes(), read(place_of(checkpoint)), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :])
        try:
            assert read(place_of(checkpoint)) == expected  # white space
        except manifest.DamagedError:
            noticed += 1
    assert noticed > len(whole) * 0.8


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"digest": 1}', "\x00", '{"files": {"a": 1}, "digest": ""}'])
def test_what_is_no_document_is_damaged(checkpoint, text):
    for name, read in ((manifest.MANIFEST_FILE, manifest.read), (manifest.META_FILE, manifest.read_meta)):
        (checkpoint / name).write_text(text)
        with pytest.raises(manifest.DamagedError, match=f"{name} is damaged"):
            read(place_of(checkpoint))


def test_a_meta_of_another_format_is_not_used(checkpoint):
    (checkpoint / manifest.META_FILE).write_text(json_text.seal({"format": 1}))
    with pytest.raises(manifest.DamagedError, match="format 1, expected 2"):
        manifest.read_meta(place_of(checkpoint))


def test_a_sealed_document_survives_its_writing():
    document = {"tuple": (1, 2), 3: "key", "nan": float("nan"), "tiny": 1e-300, "text": "ä\n", "none": None}
    found = json_text.unseal(json_text.seal(document))
    assert found["tuple"] == [1, 2]
    assert found["3"] == "key"
    assert (found["tiny"], found["text"], found["none"]) == (1e-300, "ä\n", None)
