"""PrefixCachedEngine: the cache changes the work, never the answer."""

import threading
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from format_pairs import RING
from places import CHECKED, GOLDEN, MODELS, in_every_build
from prefix_engines import GREEDY, SHORT, prompt, settled

from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.errors import InvalidOperationError
from kvcache.sampling.sampling import Sampler

LENGTHS = (1, 15, 16, 17, 33, 200)
FORMATS = [*RING[1:], ("f16", "f16"), ("q4", "q4"), ("q4", "f32")]
SIXTEEN = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=16)


@cache
def loaded(name):
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return Transformer.from_pretrained(GOLDEN / name), dict(arrays)


@pytest.fixture(scope="module", params=in_every_build(MODELS))
def golden(request):
    return loaded(request.param)


@pytest.fixture(scope="module", params=sorted(CHECKED))
def some_golden(request):
    return loaded(request.param)


@pytest.fixture
def cached(network):
    return PrefixCachedEngine(InferenceEngine(network), 64)


# -- the answer ---------------------------------------------------------------------------------------------


def test_cold_warm_and_off_are_the_same(golden):
    model, arrays = golden
    cached = PrefixCachedEngine(InferenceEngine(model, prefill_chunk=7), 64)
    for length in (*LENGTHS, *reversed(LENGTHS)):
        assert cached.generate(arrays[f"prompt_{length}"], GREEDY) == arrays[f"greedy_{length}"].tolist()
        settled(cached)


@pytest.mark.parametrize("split", [1, 16, 40, 199])
def test_a_prompt_that_shares_a_head(golden, split):
    model, arrays = golden
    other = np.concatenate([arrays["prompt_200"][:split], arrays["prompt_33"]])
    engine = InferenceEngine(model)
    cached = PrefixCachedEngine(InferenceEngine(model), 64)
    cached.generate(arrays["prompt_200"], GREEDY)
    assert cached.generate(other, GREEDY) == engine.generate(other, GREEDY)
    settled(cached)


def test_a_cache_that_is_too_small_changes_nothing(some_golden):
    model, arrays = some_golden
    for blocks in (0, 1, 3, 13):
        cached = PrefixCachedEngine(InferenceEngine(model), blocks)
        for length in (200, 33, 200, 17, 200):
            assert cached.generate(arrays[f"prompt_{length}"], GREEDY) == arrays[f"greedy_{length}"].tolist()
            assert cached.cache_stats().cached_blocks <= blocks
            settled(cached)


@pytest.mark.one_build
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_formats_share_too(some_golden, formats):
    """Cold, warm and without a cache are the same: attention always reads the stored codes, also of new tokens."""
    model, _ = some_golden
    options = {"key_dtype": formats[0], "value_dtype": formats[1]}
    cached = PrefixCachedEngine(InferenceEngine(model, **options), 64)
    plain = InferenceEngine(model, **options)
    for n in (40, 56, 40, 64, 64):
        assert cached.generate(prompt(3, n), SIXTEEN) == plain.generate(prompt(3, n), SIXTEEN)
    assert cached.cache_stats().total_hits > 0
    settled(cached)


# -- the work -----------------------------------------------------------------------------------------------


def test_the_second_call_prefills_nothing_that_is_cached(cached):
    tokens = np.arange(32)
    first = cached.generate(tokens, SamplingParams(temperature=0.0, max_tokens=1))
    stats = cached.cache_stats()
    assert (stats.cached_blocks, stats.capacity_blocks, stats.total_hits, stats.total_misses) == (2, 64, 0, 1)
    assert stats.memory_bytes == 2 * cached.inner.cache.block_memory_bytes
    before = cached.inner.prefill_token_count
    assert cached.generate(tokens, SamplingParams(temperature=0.0, max_tokens=1)) == first
    # The whole prompt is cached: a decode step runs its last token again for the logits.
    assert cached.inner.prefill_token_count == before
    stats = cached.cache_stats()
    assert (stats.total_hits, stats.total_misses) == (2, 1)
    assert (stats.hit_tokens, stats.lookup_tokens, stats.hit_rate) == (32, 64, 1 / 2)


def test_the_hit_rate_is_the_share_of_prompt_tokens_that_did_not_run(cached):
    system, ran = prompt(1, 20), []
    for seed in range(4):  # 20 tokens in common: one block of 16, and 4 of the next
        before = cached.inner.prefill_token_count
        cached.generate(np.concatenate([system, prompt(10 + seed, 25)]), SamplingParams(max_tokens=0))
        ran.append(cached.inner.prefill_token_count - before)
    assert ran == [45, 25, 25, 25]
    stats = cached.cache_stats()
    assert (stats.hit_tokens, stats.lookup_tokens, stats.hit_rate) == (4 * 45 - sum(ran), 4 * 45, 60 / 180)


def test_a_new_cache(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 16)
    stats = cached.cache_stats()
    assert (stats.cached_blocks, stats.capacity_blocks, stats.hit_rate) == (0, 16, 0.0)
    assert PrefixCachedEngine.BLOCK_SIZE == 16


def test_matched_blocks_are_shared_without_a_copy(cached):
    tokens = prompt(1, 80)
    cached.generate(tokens, SHORT)
    cache = cached.inner.cache
    before = cache.stats().total_allocations
    stream = cached.stream(np.concatenate([tokens, prompt(2, 8)]), SHORT)
    next(stream)
    # The sequence's first five blocks are the cached ones; only the new text takes a block.
    shared = cache.get_sequence(cached.inner.seq_id).block_ids
    assert shared[:5] == tuple(block.index for block in cached.prefix_cache.cache.lookup(tokens)[1])
    for block in shared[:5]:
        cached.prefix_cache.cache.release(block)
    assert cache.stats().total_allocations - before == 1
    stream.close()
    settled(cached)


def test_a_prompt_that_diverges_inside_a_block_reuses_its_head(cached):
    tokens = prompt(1, 48)
    cached.generate(tokens, SHORT)
    other = tokens.copy()
    other[40:] = (other[40:] + 1) % 250
    before = cached.inner.prefill_token_count
    cached.generate(other, SHORT)
    assert cached.inner.prefill_token_count - before == 8
    settled(cached)


def test_the_second_turn_of_a_chat_prefills_only_the_new_text(cached):
    text = prompt(1, 37).tolist()
    answer = cached.generate(text, GREEDY)
    assert len(answer) == 64
    # The last token did not run, and the last block is not full.
    text += answer
    kept = (len(text) - 1) // 16 * 16
    text += prompt(2, 9).tolist()
    before = cached.inner.prefill_token_count
    cached.generate(text, SHORT)
    assert cached.inner.prefill_token_count - before == len(text) - kept
    settled(cached)


def test_other_prompts_evict_the_tail_of_a_chain_not_its_head(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 6)
    chain = prompt(1, 16 * 5)
    cached.generate(chain, SamplingParams(max_tokens=0))
    cached.generate(prompt(2, 32), SamplingParams(max_tokens=0))
    before = cached.inner.prefill_token_count
    cached.generate(chain, SamplingParams(max_tokens=0))
    assert cached.inner.prefill_token_count - before == 16
    assert cached.cache_stats().total_evictions >= 1


def test_a_prompt_longer_than_the_cache_hits_on_its_head(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 4)
    long = prompt(1, 100)
    cached.generate(long, SHORT)
    before = cached.inner.prefill_token_count
    cached.generate(long, SHORT)
    assert cached.inner.prefill_token_count - before <= 100 - 4 * 16
    assert cached.cache_stats().cached_blocks <= 4


def test_namespaces_never_share(cached):
    tokens = prompt(1, 48)
    one = cached.generate(tokens, SHORT, namespace="tenant a")
    before = cached.inner.prefill_token_count
    assert cached.generate(tokens, SHORT, namespace="tenant b") == one
    assert cached.inner.prefill_token_count - before == 48
    assert cached.cache_stats().miss_reasons["namespace"] == 1
    before = cached.inner.prefill_token_count
    cached.generate(tokens, SHORT, namespace="tenant a")
    assert cached.inner.prefill_token_count == before


def test_miss_reasons(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 2)
    cached.generate(prompt(1, 32), SamplingParams(max_tokens=0))
    cached.generate(prompt(2, 32), SamplingParams(max_tokens=0))
    cached.generate(prompt(1, 32), SamplingParams(max_tokens=0))
    cached.generate(prompt(1, 10).tolist() + prompt(3, 10).tolist(), SamplingParams(max_tokens=0))
    reasons = cached.cache_stats().miss_reasons
    assert (reasons["evicted"], reasons["no_shared_prefix"], reasons["shorter_than_block"]) == (1, 2, 1)


def test_a_cleared_cache_holds_no_block(network):
    cached = PrefixCachedEngine(InferenceEngine(network), 32)
    assert (cached.cache_stats().capacity_blocks, cached.cache_stats().hit_rate) == (32, 0.0)
    cached.generate(np.arange(32), SHORT)
    cached.clear_cache()
    assert cached.cache_stats().cached_blocks == 0


@pytest.mark.parametrize("replace", [lambda engine: engine.enlarge(4), lambda engine: PrefixCachedEngine(engine, 64)])
def test_a_cache_of_the_engine_that_was_replaced(network, tmp_path, replace):
    """The blocks that are cached are not in the new one: an answer from there would be another text's."""
    cached = PrefixCachedEngine(InferenceEngine(network), 64)
    want = cached.generate(prompt(1, 40), SHORT)
    cached.save(tmp_path / "saved")
    other = replace(cached.inner)
    for call in (
        lambda: cached.generate(prompt(1, 40), SHORT), lambda: cached.stream(prompt(1, 40), SHORT),
        lambda: cached.complete(prompt(1, 40), SHORT), lambda: cached.save(tmp_path / "other"),
        lambda: cached.load(tmp_path / "saved"),
    ):
        with pytest.raises(InvalidOperationError, match=r"^engine: expected the cache that it got"):
            call()
    assert (other or cached.inner).generate(prompt(1, 40), SHORT) == want
    cached.clear_cache()
    cached.check()


def test_a_request_for_no_tokens_caches_the_prompt(cached):
    assert cached.generate(prompt(1, 40), SamplingParams(max_tokens=0)) == []
    assert cached.cache_stats().cached_blocks == 2


def test_clear_cache_keeps_the_counters(cached):
    for _ in range(2):
        cached.generate(prompt(1, 33), SHORT)
    hits = cached.cache_stats().total_hits
    cached.clear_cache()
    stats = cached.cache_stats()
    assert (stats.cached_blocks, stats.memory_bytes) == (0, 0)
    assert stats.total_hits == hits > 0
    settled(cached)
    cached.generate(prompt(1, 33), SHORT)
    settled(cached)


# -- sampling -----------------------------------------------------------------------------------------------


def test_sampling_uses_a_seed_per_request(network):
    hot = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_tokens=8)
    tokens = prompt(1, 20)
    cached = PrefixCachedEngine(InferenceEngine(network), 64, seed=7)
    one, two = cached.generate(tokens, hot), cached.generate(tokens, hot)
    assert one != two
    assert len(set(one)) > 1
    assert PrefixCachedEngine(InferenceEngine(network), 64, seed=7).generate(tokens, hot) == one
    assert PrefixCachedEngine(InferenceEngine(network), 64, seed=424242).generate(tokens, hot) != one
    fixed = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_tokens=8, seed=3)
    assert cached.generate(tokens, fixed) == cached.generate(tokens, fixed)


# -- what is stored ------------------------------------------------------------------------------------------


def test_an_answer_that_ends_with_a_stop_token_is_cached(network):
    # Turn 2 of a chat reuses turn 1 however turn 1 ended.
    tokens = prompt(1, 40)
    plain = PrefixCachedEngine(InferenceEngine(network), 64)
    answer = plain.generate(tokens, GREEDY)
    stop = next(i for i in range(len(answer) - 1, 0, -1) if answer[i] not in answer[:i])
    for params in (replace(GREEDY, max_tokens=stop), replace(GREEDY, stop_token_ids=(answer[stop],))):
        cached = PrefixCachedEngine(InferenceEngine(network), 64)
        assert cached.generate(tokens, params) == answer[:stop]
        kept = 40 + stop - (params.stop_token_ids == ())  # the last token of max_tokens never ran
        with cached.prefix_cache.prepare([*tokens, *answer[:stop], 1])[0] as session:
            assert session.matched_prefix_len == kept // 16 * 16
        settled(cached)


def test_blocks_are_stored_under_their_own_tokens(network):
    # Five threads with different prompts: a thread may lose the CPU between a step and its token.
    cached = PrefixCachedEngine(InferenceEngine(network), 64)
    cold = InferenceEngine(network)
    prompts = [prompt(i, 20 + 7 * i) for i in range(5)]
    expected = [cold.generate(tokens, GREEDY) for tokens in prompts]
    failed = []

    class Slow(Sampler):
        def sample(self, logits):
            time.sleep(0.001 * (threading.get_ident() % 3))
            return super().sample(logits)

    def work(i):
        for turn in range(4):
            stream = cached.stream(prompts[i], GREEDY, namespace=i)
            if turn % 2:
                got = [token for token, _ in zip(stream, range(5), strict=False)]
                stream.close()
                good = got == expected[i][:5]
            else:
                good = list(stream) == expected[i]
            failed.extend([] if good else [i])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcache.engine.new_requests.Sampler", Slow)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    settled(cached)
    for i, tokens in enumerate(prompts):
        assert cached.generate([*tokens, *expected[i]], SHORT, namespace=i) == cold.generate(
            [*tokens, *expected[i]], SHORT
        )


# -- random traffic -----------------------------------------------------------------------------------------


def test_random_traffic_over_a_small_cache(network):
    rng = np.random.default_rng(5)
    plain = InferenceEngine(network)
    cached = PrefixCachedEngine(InferenceEngine(network), 12)
    heads = [prompt(i, int(rng.integers(1, 90))) for i in range(4)]
    for _ in range(60):
        head = heads[rng.integers(len(heads))]
        tail = prompt(int(rng.integers(3)), int(rng.integers(0, 20)))
        text = np.concatenate([head[: rng.integers(1, len(head) + 1)], tail])
        assert cached.generate(text, SHORT) == plain.generate(text, SHORT)
        settled(cached)


# -- one pool for texts and prefixes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_shared_pool_does_not_grow(network, dtype):
    """The text that runs takes blocks of cached ones, down to the last; answers are those of an engine alone."""
    settings = {"num_blocks": 14, "dtype": dtype}
    alone = InferenceEngine(network, **settings)
    cached = PrefixCachedEngine(InferenceEngine(network, **settings), shared=True)
    assert cached.inner.cache.total_blocks == cached.cache_stats().capacity_blocks == 14
    for start in (1, 2, 1, 3, 4, 1):
        tokens = prompt(start, 150)
        assert cached.generate(tokens, SHORT) == alone.generate(tokens, SHORT)
        settled(cached)
    assert cached.prefix_cache.cache.evictions > 0
    assert cached.complete(tokens, SHORT).cached_tokens > 100


def test_a_shared_pool_within_bytes(network):
    """Copies that prefixes keep in f16 count too."""
    engine = InferenceEngine(network, max_memory_bytes=250_000, dtype="q4")
    cached = PrefixCachedEngine(engine, shared=True, max_memory_bytes=250_000)
    assert cached.inner.cache.total_blocks > 0
    assert 200_000 < cached.memory()["kv"] <= 250_000
    few = PrefixCachedEngine(InferenceEngine(network, num_blocks=20), 3, shared=True)
    assert (few.inner.cache.total_blocks, few.cache_stats().capacity_blocks) == (20, 3)
    with pytest.raises(ValueError, match="max_memory_bytes: expected at least"):
        PrefixCachedEngine(InferenceEngine(network), shared=True, max_memory_bytes=10)
