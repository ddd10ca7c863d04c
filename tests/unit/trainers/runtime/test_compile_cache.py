"""Entries of JAX's compile cache: whole, or not there; one that cannot be read is written again."""

from __future__ import annotations

import os
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from trainers.runtime import compile_cache

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture
def cache(tmp_path):
    """A cache of this test alone; `compile()` compiles one program afresh."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", *SETTINGS)}
    compile_cache.keep_whole()
    for name, value in {"jax_compilation_cache_dir": str(tmp_path), **SETTINGS}.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

    def compile():
        jax.clear_caches()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert jax.jit(lambda x: x * 3 + 1)(jnp.ones(2)).tolist() == [4.0, 4.0]
        return told

    yield compile
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("left", [lambda data: data[: len(data) // 2], lambda data: b""], ids=["half", "nothing"])
def test_what_a_killed_process_left_of_an_entry_is_written_again(cache, tmp_path, left):
    """By JAX alone it stays as it is, and each start compiles anew."""
    cache()
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*-cache")}
    assert whole
    for name, data in whole.items():
        (tmp_path / name).write_bytes(left(data))
    cache()
    again = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert again.keys() == whole.keys()
    # Not to the byte: an entry has the seconds that it took to compile.
    assert all(again[name] > 0.9 * len(data) for name, data in whole.items())


def test_an_entry_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    compile_cache.keep_whole()
    cache = LRUCache(str(tmp_path), max_size=-1)
    cache.put("a", b"first")
    cache.put("a", b"second")
    assert cache.get("a") == b"first"

    def killed(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.put("b", b"third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-cache"]


def test_a_cache_of_a_limited_size_makes_room_as_before(tmp_path):
    compile_cache.keep_whole()
    cache = LRUCache(str(tmp_path), max_size=10)
    for key in "abc":
        cache.put(key, b"12345")
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["b-cache", "c-cache"]


def test_it_is_done_once():
    compile_cache.keep_whole()
    put = LRUCache.put
    compile_cache.keep_whole()
    assert LRUCache.put is put
