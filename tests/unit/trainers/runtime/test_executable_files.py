"""Files of compiled programs: believed only if they are ours and whole; written all or nothing; deleted when there are many."""

from __future__ import annotations

import enum
import io
import os
import pickle
import random
import stat
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from trainers.runtime import executable_files
from trainers.runtime.executable_files import IN_USE_S, DamagedProgramError, UntrustedError
from trainers.runtime.executables import compile_afresh

DAY_S = 24 * 3600.0


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


@pytest.fixture(scope="module")
def compiled():
    return compile_afresh(jax.jit(lambda pair: Pair(pair.a + pair.b, pair.b)).lower(Pair(jnp.ones(3), jnp.ones(3))))


@pytest.fixture
def executable(tmp_path, compiled):
    path = tmp_path / "add-1.xla"
    executable_files.write_executable(path, compiled)
    return path


def damaged(data, count):
    """With one bit flipped: in each of the first bytes, and in `count` of the others."""
    rng = random.Random(0)
    places = [*range(min(256, len(data))), *(rng.randrange(len(data)) for _ in range(count))]
    for place in places:
        yield data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def test_it_is_read_as_it_was_written(executable):
    a, b = executable_files.load(executable_files.read_executable(executable))(Pair(jnp.ones(3), jnp.ones(3)))
    assert (a.tolist(), b.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_an_executable_of_which_any_bit_differs_is_never_loaded(executable):
    for data in damaged(executable.read_bytes(), 200):
        executable.write_bytes(data)
        with pytest.raises(DamagedProgramError):
            executable_files.read_executable(executable)


def test_a_pointer_of_which_any_bit_differs_is_not_believed(tmp_path):
    path = tmp_path / "add-2.json"
    executable_files.write_pointer(path, tmp_path / "add-1.xla")
    assert executable_files.read_pointer(path) == tmp_path / "add-1.xla"
    for data in damaged(path.read_bytes(), 200):
        path.write_bytes(data)
        with pytest.raises(DamagedProgramError):
            executable_files.read_pointer(path)


def test_a_file_that_was_cut_off_or_put_in_anothers_place_is_not_believed(tmp_path, executable):
    data = executable.read_bytes()
    other = tmp_path / "other-1.xla"
    other.write_bytes(data)
    for path in (other, executable):
        if path is executable:
            path.write_bytes(data[:-1])
        with pytest.raises(DamagedProgramError, match="digests differ"):
            executable_files.read_executable(path)
    executable_files.write_pointer(tmp_path / "add-1.json", executable)
    (tmp_path / "add-2.json").write_bytes((tmp_path / "add-1.json").read_bytes())
    with pytest.raises(DamagedProgramError, match=r"it was written as add-1\.json"):
        executable_files.read_pointer(tmp_path / "add-2.json")


# ---------------------------------------------------------------------- whose they are


def test_what_is_written_is_this_users_alone(tmp_path, compiled):
    before = os.umask(0)
    try:
        folder = tmp_path / "programs"
        executable_files.make_folder(folder)
        executable_files.write_executable(folder / "a.xla", compiled)
        executable_files.write_pointer(folder / "a.json", folder / "a.xla")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"programs": 0o700, "a.xla": 0o600, "a.json": 0o600}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(UntrustedError, match=f"may be written by others .mode {mode:o}.: .*chmod 700 {tmp_path}"):
        executable_files.make_folder(tmp_path)
    tmp_path.chmod(0o755)  # to be read by others does no harm
    executable_files.make_folder(tmp_path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_read(executable, mode):
    executable.chmod(mode)
    with pytest.raises(UntrustedError, match=f"may be written by others .mode {mode:o}.: remove it"):
        executable_files.read_executable(executable)


def test_what_belongs_to_somebody_else_is_not_used(executable, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    about = f"belongs to user {os.getuid()}, this process to user {os.getuid() + 1}"
    with pytest.raises(UntrustedError, match=about):
        executable_files.read_executable(executable)
    with pytest.raises(UntrustedError, match=about):
        executable_files.make_folder(executable.parent)


# ---------------------------------------------------------------------- what a pickle may do


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function, *args):
        self.how = function, args

    def __reduce__(self):
        return self.how


def load(*parts):
    return executable_files.load(io.BytesIO(bytes(executable_files.HEADER_BYTES) + pickle.dumps(parts)))


@pytest.mark.parametrize("function", [os.mkdir, eval, exec, os.system, __import__])
def test_a_pickle_calls_nobodys_functions(tmp_path, function):
    made = tmp_path / "made"
    argument = made if function is os.mkdir else f"__import__('os').mkdir({str(made)!r})"
    with pytest.raises(pickle.UnpicklingError, match="is no class that this process has imported"):
        load(Calls(function, argument))
    assert not made.exists()


def test_a_pickle_reaches_no_attribute_but_a_member_of_an_enumeration():
    with pytest.raises(pickle.UnpicklingError, match="which is no enumeration"):
        load(Calls(getattr, jax.sharding.Mesh, "devices"))


def test_members_of_enumerations_are_read_as_older_pythons_write_them(tmp_path, monkeypatch):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("data")))  # the mesh has a type for each axis
    compiled = compile_afresh(jax.jit(lambda x: x + 1).lower(rows))
    # As in Python 3.11.0 to 3.11.3.
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))
    path = tmp_path / "add-1.xla"
    executable_files.write_executable(path, compiled)
    assert b"getattr" in path.read_bytes()
    assert executable_files.load(executable_files.read_executable(path))(rows).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("jax", "os.system"),
        ("jax", "_src.config.os.system"),
        ("numpy", "f2py.os.system"),
        ("numpy", "save"),
        ("numpy", "fromfile"),
        ("numpy", "memmap"),
        ("jax", "jit"),
        ("jax._src.lru_cache", "LRUCache"),
        ("gangway.storage.documents", "os.unlink"),
        ("gangway.storage.documents", "delete"),
        ("trainers.runtime.executables", "ProgramStore"),
        ("builtins", "getattr.__self__.eval"),
        ("collections", "abc.sys.modules"),
        ("jax._src.core", "ShapedArray.__init__.__globals__"),
    ],
)
def test_a_pickle_names_what_is_needed_and_nothing_beside_it(module, name):
    """A dotted name once walked from an allowed module into any other."""
    text = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93."
    with pytest.raises(pickle.UnpicklingError, match="is no class that this process has imported, or none of a tree"):
        executable_files.load(io.BytesIO(bytes(executable_files.HEADER_BYTES) + text))


class Outside:
    """As the settings that a user's tree carries: no node."""


@jax.tree_util.register_pytree_node_class
class Node:
    class Inner(NamedTuple):
        a: jax.Array

    def __init__(self, child, about):
        self.child, self.about = child, about

    def tree_flatten(self):
        return (self.child,), self.about

    @classmethod
    def tree_unflatten(cls, about, children):
        return cls(*children, about)


def test_what_is_in_a_tree_of_this_process_may_be_named(monkeypatch):
    monkeypatch.setattr(executable_files, "_own", set())
    monkeypatch.setattr(executable_files, "_own_trees", set())
    tree = jax.tree.structure(Node(Node.Inner(1.0), Outside))
    text = io.BytesIO(pickle.dumps(tree))
    with pytest.raises(pickle.UnpicklingError, match="Outside is no class"):
        executable_files._Trees(text).load()
    executable_files.trust_tree(Node(Node.Inner(1.0), Outside))
    text.seek(0)
    assert executable_files._Trees(text).load() == tree


def test_all_that_may_be_named_is_there():
    for module, name in executable_files.EXACT:
        assert executable_files._named(module, name) is not None, (module, name)


def test_a_pickle_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("class Evil:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = b"cevil_module\nEvil\n."
    with pytest.raises(pickle.UnpicklingError, match=r"evil_module\.Evil"):
        executable_files.load(io.BytesIO(bytes(executable_files.HEADER_BYTES) + text))
    assert "evil_module" not in sys.modules


# ---------------------------------------------------------------------- room


@pytest.fixture
def folder(tmp_path):
    """`put(name, age_s)`: a file of 100 bytes that was used last so long ago."""

    def put(name, age_s, size=100):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        now_s = 2e9  # the folder's clock is that of its server
        os.utime(path, (now_s - age_s, now_s - age_s))
        return path

    return put


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("max_bytes", "left"),
    [(None, "abcd"), (500, "abcd"), (400, "abcd"), (399, "bcd"), (210, "cd"), (100, "cd"), (0, "cd")],
)
def test_what_was_used_least_recently_makes_room_but_nothing_that_is_in_use(tmp_path, folder, max_bytes, left):
    folder("train-a.xla", 5 * DAY_S)
    folder("train-b.xla", 4 * DAY_S)
    folder("train-c.xla", IN_USE_S - 60)
    folder("thesis.tex", 6 * DAY_S)  # of the user, and it does not count
    executable_files.delete_old(tmp_path, folder("train-d.xla", 0), max_bytes)
    assert names(tmp_path) == ["thesis.tex", *(f"train-{name}.xla" for name in left)]


def test_what_nobody_used_for_long_goes_and_what_a_dead_writer_left(tmp_path, folder):
    folder("train-0.xla", 91 * DAY_S)
    folder("train-1.xla", 89 * DAY_S)
    folder("attempts/host-0/train-0.xla.crashed-1", 91 * DAY_S)
    folder("attempts/host-0/train-1.xla.crashed-1", 89 * DAY_S)
    folder("train-2.xla.12.tmp", DAY_S)
    folder("train-3.xla.13.tmp", 60)
    folder("attempts/thesis.tex", 91 * DAY_S)
    executable_files.delete_old(tmp_path, folder("train-4.xla", 0), None)
    assert names(tmp_path) == ["thesis.tex", "train-1.xla", "train-1.xla.crashed-1", "train-3.xla.13.tmp", "train-4.xla"]
