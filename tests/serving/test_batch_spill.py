"""Engines that spill: with a tenth of their K and V in memory they answer what they answer with all of it there."""

import os

import numpy as np
import pytest
from places import GOLDEN
from posix_modules import needs_posix
from seeded_weights import golden_folder
from serving import Alone, Clock, prompts, repeating, run, same, settled

from kvcache import BatchEngine, EvictionPolicy, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.errors import SpillError

pytestmark = pytest.mark.one_build

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=2)


def spilling(tmp_path, network, share=0.1, num_blocks=26, make=BatchEngine, cached=0, **options):
    """An engine with this share of the bytes of its blocks in memory, and what stays there beside them."""
    settings = make(network, num_blocks=num_blocks, **options)._settings
    limit = settings.kv_bytes(num_blocks, cached) - int((1 - share) * num_blocks * settings.spilled_bytes)
    return make(network, num_blocks=num_blocks, spill=tmp_path, max_memory_bytes=limit, **options)


@pytest.mark.filterwarnings("ignore:spill without sparse_tokens")
@pytest.mark.parametrize("options", [
    {"dtype": "q4", "sparse_tokens": 16}, {"dtype": "f16", "residual_length": 0, "sparse_tokens": 16}, {"dtype": "q4"},
])
def test_requests_beside_each_other_give_what_they_give_in_memory(rng, network, tmp_path, options):
    """With shared prefixes, draft tokens, preemptions and later turns over what was cached."""
    stem = rng.integers(0, network.config.vocab_size, 190).astype(np.uint32)
    asked = [
        (np.concatenate([stem[: 100 + 30 * i], stem[i : 60 + i]]), repeating(i, 60, logprobs=1)) for i in range(4)
    ] + [(prompt, repeating(9, 12, logprobs=1)) for prompt in prompts(5, 6, 150)]
    alone = Alone(network, **options)
    engine = spilling(tmp_path, network, clock=Clock(), **options)
    for turn in range(2):
        requests = [engine.submit(prompt, params) for prompt, params in asked[:: 1 - 2 * turn]]
        run(engine)
        for request, (prompt, params) in zip(requests, asked[:: 1 - 2 * turn], strict=True):
            same(request.completions()[0], alone(prompt, params))
    settled(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0
    spill = engine._pool.counted.caches[0].spill
    assert spill.reads > 100
    assert spill.faults == 0
    assert engine.memory()["disk"] > 0


def test_texts_of_one_engine_and_saved_prefixes_have_the_bits_of_memory(rng, network, tmp_path):
    options = {"dtype": "q4", "sparse_tokens": 32, "num_blocks": 40}
    prompt = rng.integers(0, network.config.vocab_size, 300).astype(np.uint32)
    cold = InferenceEngine(network, **options).complete(prompt, PARAMS)
    own = spilling(tmp_path / "a", network, make=InferenceEngine, **options)
    found = own.complete(prompt, PARAMS)
    assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)
    assert own.cache.spill.reads > 0
    inner = spilling(tmp_path / "b", network, make=InferenceEngine, cached=40, **options)
    cached = PrefixCachedEngine(inner, shared=True)
    cached.generate(prompt[:250], PARAMS)
    warm = cached.complete(prompt, PARAMS)
    assert warm.cached_tokens >= 240
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    cached.save(tmp_path / "saved")
    cached.check()
    for folder in (tmp_path / "c", None):  # a file of either is one of the other
        engine = InferenceEngine(network, **options)
        if folder is not None:
            engine = spilling(folder, network, make=InferenceEngine, cached=40, **options)
        again = PrefixCachedEngine(engine, shared=True)
        assert again.load(tmp_path / "saved") > 0
        warm = again.complete(prompt, PARAMS)
        assert warm.cached_tokens >= 200
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
        again.check()


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "deepseek_v32", "gpt_oss"])
def test_layers_of_other_kinds_have_the_bits_of_memory(rng, tmp_path, name):
    """Windows stay in memory; latent rows, indexers and sinks spill."""
    network = Transformer.from_pretrained(GOLDEN / name if (GOLDEN / name).exists() else golden_folder(name))
    prompt = rng.integers(0, network.config.vocab_size, 150).astype(np.uint32)
    options = {"dtype": "f16", "num_blocks": 24}
    cold = InferenceEngine(network, **options).complete(prompt, PARAMS)
    with pytest.warns(UserWarning, match="spill without sparse_tokens"):
        engine = spilling(tmp_path, network, make=InferenceEngine, **options)
    found = engine.complete(prompt, PARAMS)
    assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)
    assert engine.cache.spill.reads > 0
    engine.check()


@needs_posix
def test_a_text_whose_blocks_are_damaged_ends_alone(rng, network, tmp_path):
    """The others go on with what they give in memory, and so does the text when it is asked again."""
    options = {"dtype": "f16", "residual_length": 0, "sparse_tokens": 16, "draft": None}
    own = [rng.integers(0, network.config.vocab_size, 200).astype(np.uint32) for _ in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    alone = Alone(network, **{name: value for name, value in options.items() if name != "draft"})
    engine = spilling(tmp_path, network, num_blocks=60, clock=Clock(), **options)
    requests = [engine.submit(prompt, params) for prompt in own]
    cache = engine._pool.counted.caches[0]
    while len(engine._steps._scheduler.running) < 3 or engine._steps._scheduler.running[1].num_tokens < 203:
        engine.step()
    work = engine._steps._scheduler.running[1]
    state, blocks = cache.blocks.store.spill.state, cache.get_sequence(work.seq_id).block_ids
    bad = next(int(block) for block in blocks[1:] if state(0, int(block)) == (False, True))
    descriptor = os.open(f"/proc/self/fd/{cache.blocks.store.spill.fd}", os.O_RDWR)
    os.pwrite(descriptor, b"\xff" * 4096, bad * 4096)
    os.close(descriptor)
    run(engine, check=False)
    for i in (0, 2):
        same(requests[i].completions()[0], alone(own[i], params))
    with pytest.raises(SpillError, match=f"layer 0, block {bad}"):
        requests[1].result()
    again = engine.submit(own[1], params)
    run(engine)
    same(again.completions()[0], alone(own[1], params))


@needs_posix
def test_a_full_disk_preempts_texts_and_ends_none_that_memory_has_room_for(rng, network, tmp_path):
    """Texts run one after another, as in a pool of as many blocks; one that is alone and has no room gets the error."""
    options = {"dtype": "f16", "residual_length": 0, "sparse_tokens": 16, "draft": None}
    own = [rng.integers(0, network.config.vocab_size, 200).astype(np.uint32) for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    alone = Alone(network, **{name: value for name, value in options.items() if name != "draft"})
    engine = spilling(tmp_path, network, share=0.6, num_blocks=60, clock=Clock(), **options)
    spill = engine._pool.counted.caches[0].blocks.store.spill
    good, full = os.dup(spill.fd), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, spill.fd)
    requests = [engine.submit(prompt, params) for prompt in own]
    run(engine)
    for request, prompt in zip(requests, own, strict=True):
        same(request.completions()[0], alone(prompt, params))
    assert engine.stats().preemptions > 0
    settled(engine)
    long = rng.integers(0, network.config.vocab_size, 460).astype(np.uint32)
    requests = [engine.submit(prompt, params) for prompt in (long, *own[:2])]
    run(engine)
    with pytest.raises(SpillError, match="No space left on device") as caught:
        requests[0].result()
    assert caught.value.is_full
    for request, prompt in zip(requests[1:], own, strict=False):
        same(request.completions()[0], alone(prompt, params))
    os.dup2(good, spill.fd)
    again = engine.submit(long, params)
    run(engine)
    same(again.completions()[0], alone(long, params))
    for each in (good, full):
        os.close(each)


@needs_posix
def test_cached_prefixes_leave_a_full_disk_before_a_text_ends(rng, network, tmp_path):
    engine = spilling(
        tmp_path, network, share=0.4, num_blocks=80, cached=40, make=InferenceEngine, dtype="f16", sparse_tokens=16,
        residual_length=0,
    )
    cached = PrefixCachedEngine(engine, shared=True)
    own = [rng.integers(0, network.config.vocab_size, 150).astype(np.uint32) for _ in range(4)]
    cold = InferenceEngine(network, dtype="f16", sparse_tokens=16, residual_length=0)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, engine.cache.blocks.store.spill.fd)
    os.close(full)
    for prompt in own:
        found, right = cached.complete(prompt, PARAMS), cold.complete(prompt, PARAMS)
        assert (found.tokens, found.logprobs) == (right.tokens, right.logprobs)
    assert cached.cache_stats().total_evictions > 0
    cached.check()


def test_a_pass_that_finds_a_full_disk_runs_again_once_cached_prefixes_have_left(rng, network, tmp_path, monkeypatch):
    prompts = [rng.integers(0, network.config.vocab_size, 60).astype(np.uint32) for _ in range(2)]
    engine = spilling(tmp_path, network, share=0.5, draft=None, clock=Clock(), residual_length=0, sparse_tokens=16)
    alone = Alone(network, residual_length=0, sparse_tokens=16)
    first, failed, forward = engine.submit(prompts[0], PARAMS), [], network.forward
    run(engine)
    same(first.completions()[0], alone(prompts[0], PARAMS))
    right = alone(prompts[1], PARAMS)

    def fails_once(*arguments, **options):
        if len(failed) < most:
            failed.append(SpillError("folder", 0, 0, "room", True))
            raise failed[-1]
        return forward(*arguments, **options)

    monkeypatch.setattr(network, "forward", fails_once)
    most = 1
    request = engine.submit(prompts[1], PARAMS)
    run(engine)
    same(request.completions()[0], right)
    most = 3  # this text has cached what leaves for the first failure; the next one is told
    request = engine.submit(prompts[0], PARAMS)
    run(engine)
    with pytest.raises(SpillError):
        request.result()
    assert len(failed) == 3
    settled(engine)


def test_what_cannot_be_honoured_is_named(network, tmp_path):
    for kind in (InferenceEngine, BatchEngine):
        with pytest.raises(ValueError, match="spill: expected a folder, got an empty name"):
            kind(network, spill="", max_memory_bytes="1MiB", sparse_tokens=16)
        with pytest.raises(TypeError, match="max_memory_bytes: expected the bytes in memory beside spill"):
            kind(network, spill=tmp_path, sparse_tokens=16)
        with pytest.raises(ValueError, match="spill: expected None with an eviction_policy"):
            kind(network, spill=tmp_path, max_memory_bytes="1MiB", eviction_policy=EvictionPolicy.SlidingWindow(64, 4))
        with pytest.raises(ValueError, match="max_memory_bytes: expected at least"):
            kind(network, spill=tmp_path, max_memory_bytes=1000, sparse_tokens=16)
        with pytest.raises(ValueError, match="draft: expected None or ngram with spill"):
            kind(network, spill=tmp_path, max_memory_bytes="8MiB", sparse_tokens=16, draft=network)
    engine = spilling(tmp_path, network, make=InferenceEngine, sparse_tokens=16)
    with pytest.raises(ValueError, match="max_memory_bytes: expected None with an engine that spills"):
        PrefixCachedEngine(engine, 8, max_memory_bytes="1MiB")
    states = Transformer.from_pretrained(golden_folder("qwen3_next"))
    with pytest.raises(ValueError, match="spill: expected None with layers that keep a state"):
        BatchEngine(states, spill=tmp_path, max_memory_bytes="8MiB")


def test_the_disk_and_the_memory_bound_the_cache(network, tmp_path):
    """Texts have room for their whole contexts, not for what memory alone would hold."""
    engine = BatchEngine(network, spill=tmp_path, max_memory_bytes="2MiB", max_running=4, sparse_tokens=16, dtype="q4")
    whole = 4 * (network.config.max_position_embeddings // 16 + 1)
    assert engine._pool.total_blocks == whole
    assert engine.memory()["kv"] <= 2 << 20
