"""Prefixes over windows: what runs again, what is kept, what a miss says, and saved files."""

import gc

import numpy as np
import pytest
from recording_network import VOCABULARY, RecordingNetwork
from windowed_networks import FOUR, FULL, KINDS, NONE, network, window

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.errors import SnapshotError


def engine(kind="longer", blocks=400, model=None, **options):
    options = {"prefill_chunk": 24, "num_blocks": 40} | options
    return PrefixCachedEngine(InferenceEngine(model or network(kind), **options), blocks, strict=True)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, VOCABULARY, n).astype(np.uint32)


def new_tokens(cached, tokens, namespace=None):
    """The number of tokens of a prompt that run."""
    cached.inner.model.expect(tokens, namespace)
    return len(tokens) - cached.complete(tokens, NONE, namespace=namespace).cached_tokens


def settled(cached):
    gc.collect()
    cached.check()
    for cache in (cached.prefix_cache.cache, *cached._pool.prefixes[1:]):
        assert cache.pinned_blocks == 0
        assert cache.references().sum() == len(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_only_new_tokens_run(kind):
    cached = engine(kind)
    assert new_tokens(cached, prompt(0, 200)) == 200
    assert new_tokens(cached, prompt(0, 200)) == 8  # 12 blocks of 16 are cached
    assert new_tokens(cached, np.r_[prompt(0, 192), prompt(1, 30)]) == 30
    assert new_tokens(cached, np.r_[prompt(0, 192), prompt(1, 30), prompt(2, 9)]) == 231 - 208
    settled(cached)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_whole_blocks_runs_its_last_token_alone(kind):
    cached = engine(kind, block_size=4)
    for length in (4, 96, 100, 116):
        assert new_tokens(cached, prompt(length, length)) == length
        assert new_tokens(cached, prompt(length, length)) == 0  # as a step
    settled(cached)


@pytest.mark.parametrize("kind", ["longer", "two windows", "windows alone"])
def test_a_system_prompt_is_kept_when_a_second_text_parts_from_it(kind):
    """The first text runs whole, the second too, since no window is cached where they part; all others reuse it."""
    cached, system = engine(kind, 1000), prompt(0, 160)
    new = [new_tokens(cached, np.r_[system, prompt(seed, 70)]) for seed in range(1, 7)]
    assert new == [230, 230, *[70] * 4]
    stats = cached.cache_stats()
    assert stats.miss_reasons["window"] == 1
    assert stats.hit_tokens == 4 * 160
    assert stats.hit_rate == stats.hit_tokens / stats.lookup_tokens == 4 * 160 / (6 * 230)
    settled(cached)


def test_the_longest_prefix_with_its_windows_is_taken():
    cached, text = engine("two windows", 1000), prompt(0, 300)
    for stop in (96, 300):
        new_tokens(cached, text[:stop])
    # Cached of the window of 70: the pages of 16 to 96, and of 208 to 288.
    for stop, start in ((300, 288), (280, 280), (250, 96), (96, 96), (90, 90)):
        fresh = np.r_[text[:stop], prompt(stop, 3)]
        assert new_tokens(cached, fresh) == len(fresh) - start
    settled(cached)


def test_where_a_chunk_begins_no_page_is_needed():
    """Behind 64 and 128 tokens a text goes on without a page; elsewhere it needs those from the begin of its chunk."""
    cached, text = engine(model=RecordingNetwork((FULL, window(32, chunked=True))), blocks=1000), prompt(9, 140)
    assert new_tokens(cached, text) == 140
    pages = cached._pool.prefixes[1]
    for stop, start in ((140, 128), (120, 96), (100, 96), (96, 96), (90, 64)):
        pages.evict(1000)
        assert len(pages) == 0
        fresh = np.r_[text[:stop], prompt(stop, 3)]
        assert new_tokens(cached, fresh) == len(fresh) - start
    settled(cached)


def test_the_answer_continues_the_prompt():
    cached, text = engine("longer", 1000), prompt(3, 100)
    cached.inner.model.expect(text, None)
    answer = cached.generate(text, FOUR)
    following = np.r_[text, np.array(answer, np.uint32), prompt(4, 40)]
    assert new_tokens(cached, following) == len(following) - (len(text) + 3) // 16 * 16


@pytest.mark.parametrize("which", [0, 1])
def test_an_eviction_in_either_group_changes_no_answer(which):
    cached, text = engine("longer", 1000), prompt(5, 200)
    for count in (1, 2, 5, 100):
        cached.generate(text, FOUR)
        alone = InferenceEngine(network("longer"), prefill_chunk=24, num_blocks=40)
        alone.model.expect(text, None)
        alone.generate(text, FOUR)
        [cached.prefix_cache.cache, *cached._pool.prefixes[1:]][which].evict(count)
        cached.inner.model.expect(text, None)
        cached.generate(text, FOUR)
        for place, row in cached.inner.model.outputs.items():
            np.testing.assert_array_equal(row, alone.model.outputs[place])
        settled(cached)


def test_namespaces_share_no_windows():
    cached, text = engine("longer", 1000), prompt(6, 100)
    assert new_tokens(cached, text, "a") == 100
    assert new_tokens(cached, text, "b") == 100
    assert new_tokens(cached, text, "a") == 4


def test_pages_are_shared_by_reference():
    cached, text = engine("longer", 1000), prompt(7, 160)
    cached.generate(text, NONE)
    group = cached._pool.groups[1].cache
    used = group.used_block_count
    for _ in range(5):
        cached.generate(text, NONE)
        assert group.used_block_count <= used + 1  # the page that the last token is written to
    settled(cached)


def test_few_pages_are_enough_for_a_window():
    """One block in the prefix cache: the pages have room for two windows all the same."""
    cached = engine("longer", 1)
    for seed in range(5):
        new_tokens(cached, prompt(seed, 200))
        settled(cached)
    assert all(0 < len(cache) <= cache.capacity for cache in cached._pool.prefixes[1:])
    assert engine("longer", 0)._pool.prefixes[1:][0].capacity == 0


def test_a_restarted_engine_has_its_windows(tmp_path):
    cached, text = engine("two windows", 1000), prompt(8, 250)
    new_tokens(cached, text)
    cached.save(tmp_path / "cache", "recording")
    fresh = engine("two windows", 1000)
    assert fresh.load(tmp_path / "cache", "recording") == 15
    assert new_tokens(fresh, text) == 250 - 240
    settled(fresh)
    whole = engine(model=RecordingNetwork((FULL,) * 3))
    with pytest.raises(SnapshotError):
        whole.load(tmp_path / "cache", "recording")


def test_a_network_without_windows_counts_as_before():
    cached = engine(model=RecordingNetwork())
    new_tokens(cached, prompt(9, 100))
    assert "window" not in cached.cache_stats().miss_reasons
    assert cached._pool.prefixes[1:] == []


@pytest.mark.one_build
@pytest.mark.parametrize("seed", range(4))
def test_random_conversations(seed):
    """Turns of several conversations, some rewritten: every answer has the bits of a cold run."""
    rng = np.random.default_rng(seed)
    model = RecordingNetwork((window(37), FULL, window(20), FULL))
    cached = engine(blocks=30, model=model, dtype=str(rng.choice(["f32", "q8", "q4"])), residual_length=0)
    alone = InferenceEngine(RecordingNetwork(model.attention), dtype=cached.inner.cache.key_dtype, residual_length=0,
                            prefill_chunk=int(rng.integers(1, 60)), num_blocks=40)
    texts = [prompt(100, 60) for _ in range(4)]
    for _ in range(30):
        which = int(rng.integers(4))
        cut = len(texts[which]) if rng.random() < 0.7 else int(rng.integers(1, len(texts[which]) + 1))
        text = np.r_[texts[which][:cut], prompt(int(rng.integers(1000)), int(rng.integers(1, 50)))][:390]
        for it in (cached.inner, alone):
            it.model.expect(text, None)
        alone.generate(text, FOUR)
        texts[which] = np.r_[text, np.array(cached.generate(text, FOUR), np.uint32)][:340]
        for place, row in model.outputs.items():
            np.testing.assert_array_equal(row, alone.model.outputs[place])
        settled(cached)
