"""Unpacked groups of cached prefixes: the tokens that run, the groups that are kept, and saved files."""

import gc
from contextlib import suppress

import numpy as np
import pytest
from recording_network import DIM, KV_HEADS, LAYERS, VOCABULARY, RecordingNetwork
from systems.between_lines import Between

from kvcache import InvalidOperationError, SnapshotError
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.paged.cache import PagedKvCache
from kvcache.texts.newest import NewestGroups

SHORT = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)
NONE = SamplingParams(max_tokens=0)


def engine(blocks=64, model=None, **options):
    options = {"dtype": "q2", "prefill_chunk": 24, "num_blocks": 40} | options
    return PrefixCachedEngine(InferenceEngine(model or RecordingNetwork(), **options), blocks, strict=True)


def new_tokens(cached, tokens, namespace=None):
    """The number of tokens of a prompt that run."""
    before = cached.inner.prefill_token_count
    if isinstance(cached.inner.model, RecordingNetwork):
        cached.inner.model.expect(tokens, namespace)
    cached.generate(tokens, NONE, namespace=namespace)
    return cached.inner.prefill_token_count - before


def settled(cached):
    gc.collect()
    cached.check()
    for cache in (cached.prefix_cache.cache, cached.newest.cache):
        assert cache.pinned_blocks == 0
        assert cache.references().sum() == len(cache)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, VOCABULARY, n).astype(np.uint32)


@pytest.mark.parametrize("length", [12, 48, 64])
def test_only_new_tokens_run(length):
    cached = engine(residual_length=length)
    assert new_tokens(cached, prompt(0, 100)) == 100
    assert new_tokens(cached, prompt(0, 100)) == 4  # 6 blocks of 16 are cached
    begun = 0 if length == 64 else length  # a group that ends before the text is not kept
    assert new_tokens(cached, prompt(0, 96)) == begun
    assert new_tokens(cached, prompt(0, 96)) == 0  # the last token again, as a step
    assert new_tokens(cached, np.r_[prompt(0, 96), prompt(1, 30)]) == 30
    settled(cached)


def test_a_prompt_that_diverges_within_the_group_shares_its_head():
    cached = engine(1000, residual_length=64)
    cached.generate(prompt(0, 112), NONE)
    for head in (70, 80, 81, 95, 111):
        other = prompt(0, 112)
        other[head:] = (other[head:] + 1) % VOCABULARY
        assert new_tokens(cached, other) == 112 - head
    settled(cached)


def test_a_prompt_that_diverges_before_the_newest_group_runs_its_group_again():
    cached = engine(residual_length=64)
    cached.generate(prompt(0, 200), NONE)
    assert new_tokens(cached, np.r_[prompt(0, 100), prompt(1, 10)]) == 110 - 64
    settled(cached)


@pytest.mark.parametrize("tail", [20, 70])
def test_the_group_in_which_texts_diverge_runs_again_once(tail):
    """A shared system prompt: the first text runs whole, the second its last group too, all others new tokens only."""
    cached = engine(1000, residual_length=64)
    new = [new_tokens(cached, np.r_[prompt(0, 100), prompt(seed, tail)]) for seed in range(1, 9)]
    # With a tail of 20 the group is also the first text's newest.
    assert new == [100 + tail, tail + 36 * (tail > 28), *[tail] * 6]
    settled(cached)


def test_both_turns_of_a_chat_continue(network):
    """Repeat the prompt, and continue prompt and answer with a new turn."""
    cached = engine(model=network, residual_length=64)
    plain = InferenceEngine(network, dtype="q2", residual_length=64, prefill_chunk=24)
    sixty = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=60)
    text = prompt(0, 80)
    answer = cached.generate(text, sixty)
    assert answer == plain.generate(text, sixty)
    turn = np.r_[text, np.array(answer, np.uint32), prompt(1, 9)]
    # Of 139 tokens that ran, 128 fill blocks.
    assert new_tokens(cached, turn) == len(turn) - 128
    assert new_tokens(cached, text) == 0
    assert cached.generate(turn, sixty) == plain.generate(turn, sixty)
    assert cached.generate(text, sixty) == answer
    settled(cached)


@pytest.mark.parametrize("length", [12, 48, 64])
def test_a_file_contains_the_groups(tmp_path, length):
    saved = engine(1000, residual_length=length)
    for name in (None, "a"):
        saved.generate(prompt(0, 100), SHORT, namespace=name)
        saved.generate(np.r_[prompt(0, 50), prompt(1, 30)], SHORT, namespace=name)
    saved.save(tmp_path / "cache", "recording")
    loaded = engine(1000, residual_length=length)
    assert loaded.load(tmp_path / "cache", "recording") == len(saved.prefix_cache.cache)
    assert len(loaded.newest.cache) == len(saved.newest.cache) > 0
    settled(loaded)
    for name in ("a", None):
        for tokens in (prompt(0, 100), np.r_[prompt(0, 50), prompt(1, 30), prompt(2, 9)], prompt(2, 60)):
            told = []
            for cached in (saved, loaded):
                cached.inner.model.outputs.clear()
                told.append((new_tokens(cached, tokens, name), dict(cached.inner.model.outputs)))
            assert told[0][0] == told[1][0]
            assert told[0][1].keys() == told[1][1].keys()
            for place, row in told[0][1].items():
                np.testing.assert_array_equal(row, told[1][1][place])
    settled(loaded)
    loaded.save(tmp_path / "again", "recording")
    again = engine(1000, residual_length=length)
    again.load(tmp_path / "again", "recording")
    assert new_tokens(again, prompt(0, 100), "a") == 4


def test_a_file_of_another_residual_or_none_is_refused(tmp_path):
    """Which tokens queries read in f16 decides the K and V of all layers but the first."""
    for length, others in ((64, (0, 32, 7)), (0, (64,))):
        saved = engine(residual_length=length)
        saved.generate(prompt(0, 100), NONE)
        saved.save(tmp_path / "cache", "recording")
        for other in others:
            with pytest.raises(SnapshotError, match=r"expected model 'recording.*', got 'recording"):
                engine(residual_length=other).load(tmp_path / "cache", "recording")
        loaded = engine(residual_length=length)
        assert loaded.load(tmp_path / "cache", "recording") == 6
        assert new_tokens(loaded, prompt(0, 100)) == 4
        loaded.check()


def test_a_damaged_group_runs_again(tmp_path):
    path = tmp_path / "cache"
    saved = engine(residual_length=64)
    saved.generate(prompt(0, 112), NONE)
    saved.save(path, "recording")
    good = path.read_bytes()
    block = saved.newest.cache._store.block_bytes
    for page, new in enumerate((48, 32, 16)):
        data = bytearray(good)
        data[len(data) - (3 - page) * block + 9] ^= 4
        path.write_bytes(data)
        loaded = engine(residual_length=64)
        assert loaded.load(path, "recording") == 7
        assert new_tokens(loaded, prompt(0, 112)) == new
        settled(loaded)
        assert new_tokens(loaded, prompt(0, 112)) == 0


def test_capacity():
    few, many = engine(1, residual_length=64), engine(4096, residual_length=64)
    assert few.newest.cache.capacity == 8  # two groups
    assert many.newest.cache.capacity == 4096 // 32
    for seed in range(80):
        few.generate(prompt(seed, 60), NONE)
        many.generate(prompt(seed, 60), NONE)
        settled(few)
    settled(many)
    assert len(few.newest.cache) == 0  # the group of a text whose blocks are not all cached is not kept
    assert new_tokens(few, prompt(0, 20)) == 20
    assert len(few.newest.cache) == 1
    assert new_tokens(few, prompt(0, 20)) == 4
    assert len(many.newest.cache) == 128
    assert new_tokens(many, prompt(79, 60)) == 12


def test_engines_without_groups():
    for blocks, options in (
        (0, {}),
        (64, {"residual_length": 0}),
        (64, {"residual_length": 1}),
        (64, {"dtype": "f32"}),
    ):
        cached = engine(blocks, **options)
        assert cached.newest is None
        assert new_tokens(cached, prompt(0, 40)) == 40
        assert new_tokens(cached, prompt(0, 40)) == (40 if not blocks else 8)
        cached.clear_cache()
        cached.check()


def test_a_file_into_an_engine_whose_prefixes_are_gone(tmp_path):
    saved = engine(residual_length=64)
    saved.generate(prompt(0, 100), NONE)
    saved.save(tmp_path / "cache", "recording")
    saved.prefix_cache.cache.clear()
    assert len(saved.newest.cache) == 2
    assert saved.load(tmp_path / "cache", "recording") == 6
    assert new_tokens(saved, prompt(0, 100)) == 4
    settled(saved)


def test_groups_held_by_sessions_stay():
    cached = engine(residual_length=64)
    texts = [prompt(seed, 60) for seed in range(4)]
    for tokens in texts[:2]:
        cached.generate(tokens, NONE)
    sessions = [cached.newest.cache.open_session(tokens, (None, b"")) for tokens in texts[:2]]
    assert [session.matched_prefix_len for session in sessions] == [48, 48]
    for tokens in texts[2:]:
        assert new_tokens(cached, tokens) == 60
    assert [new_tokens(cached, tokens) for tokens in texts] == [12, 12, 60, 60]
    for session in sessions:
        cached.newest.cache.close_session(session)
    assert [new_tokens(cached, tokens) for tokens in texts] == [12, 12, 60, 60]
    assert [new_tokens(cached, tokens) for tokens in texts[2:]] == [12, 12]
    settled(cached)


def test_clearing_drops_the_groups():
    cached = engine(residual_length=64)
    cached.generate(prompt(0, 100), NONE)
    assert len(cached.newest.cache) == 2
    cached.clear_cache()
    assert len(cached.newest.cache) == 0
    assert new_tokens(cached, prompt(0, 100)) == 100
    settled(cached)


def test_check_holds_whatever_is_cleared_meanwhile():
    """A signal handler drops all groups at each instruction of `check` in turn."""
    cached = engine(residual_length=12)

    def check(act=None, stop=0):
        cached.generate(prompt(0, 24), NONE)
        assert len(cached.newest.cache) > 0
        with Between(act, opcodes=True, stop=stop) as between:
            cached.newest.check()
        return between.count

    def clear():
        with suppress(InvalidOperationError):  # the cache is at work
            cached.clear_cache()

    for stop in range(1, check() + 1):
        check(clear, stop)
    cached.clear_cache()
    settled(cached)


def test_rows_are_recalled_bit_for_bit():
    """The rows of one sequence, recalled for another: all dtypes, all counts."""
    rng = np.random.default_rng(0)
    for key_dtype, value_dtype in (("q4", "q2"), ("f32", "q4"), ("q3", "f32")):
        for length in (12, 32):
            cache = PagedKvCache(
                12, 16, KV_HEADS, DIM, num_layers=LAYERS, key_dtype=key_dtype, value_dtype=value_dtype,
                residual_length=length,
            )
            newest = NewestGroups(cache, 64)
            for count in range(1, length):
                before = rng.integers(0, 9, 2 * length).astype(np.uint32)
                group = rng.integers(0, 9, count).astype(np.uint32)
                rows = rng.standard_normal((LAYERS, 2, count, KV_HEADS, DIM), np.float32)
                cache.allocate(0, 2 * length + count)
                cache.unpack(0, list(rows))
                cache.check()
                newest.keep(0, np.r_[before, group], "a")
                found, got = newest.recall(np.r_[before, group], "a")
                assert found == count - count % newest.cache.block_size
                newest.check()
                assert newest.recall(np.r_[before, group], None)[0] == 0
                assert newest.recall(np.r_[before[1:], group, group[:1]], "a")[0] == 0
                if found:
                    cache.allocate(1, 2 * length + found)
                    cache.unpack(1, got)
                    cache.check()
                    for layer in range(LAYERS):
                        pairs = cache.read_unpacked(layer, 0), cache.read_unpacked(layer, 1)
                        for here, there in zip(*pairs, strict=True):
                            np.testing.assert_array_equal(here[:found], there)
                    cache.free(1)
                cache.free(0)
