"""`PrefixStore`: what it finds is what was computed, for batches, windows, namespaces and files."""

import gc
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hf_models import difference, dynamic, left_padded, make_model
from saved_caches import set_bits

from kvcache import InvalidOperationError, OutOfMemoryError, SnapshotError
from kvcache.integrations.transformers import PagedCache, PrefixStore, pool, prefixes
from kvcache.tiers import DirectoryTier, Tiers

pytestmark = pytest.mark.one_build

KINDS = ("llama", "gemma3_text", "gpt_oss", "gemma4_text")


def generate(model, cache, ids, mask, **options):
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, pad_token_id=0, eos_token_id=None,
        **({"max_new_tokens": 9, "do_sample": False} | options), output_logits=True, return_dict_in_generate=True,
    )


@torch.no_grad()
def split_error(model, ids, mask, at):
    """The distance of the last logits of a prefill in two parts from those of a whole one, with `DynamicCache`."""
    native = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(native)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions, past_key_values=dynamic(model)).logits[:, -1]
    cache = dynamic(model)
    for part in (slice(0, at), slice(at, None)):
        seen = mask[:, : part.stop or ids.shape[1]]
        split = model(ids[:, part], attention_mask=seen, position_ids=positions[:, part], past_key_values=cache).logits
    model.set_attn_implementation("kvcache")
    return float((split[:, -1] - whole).abs().max())


@pytest.mark.parametrize("dtype", ["f32", "q4"])
@pytest.mark.parametrize("lengths", [[60], [60, 60, 60], [60, 45, 33, 2]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_a_cold_run(kind, lengths, dtype):
    """Tokens are the same; f32 logits as near as `DynamicCache` is to itself when a prefill is split (times two)."""
    model, (ids, mask) = make_model(kind, "kvcache"), left_padded(lengths, 60)
    store = PrefixStore(model.config, dtype=dtype)
    cold_cache = store.cache_for(ids, mask)
    assert cold_cache.get_seq_length() == 0
    cold = generate(model, cold_cache, ids, mask)
    kept = store.keep(cold_cache, cold)
    assert kept == sum((length + 8) // 16 for length in lengths)
    warm_cache = store.cache_for(ids, mask)
    assert warm_cache.get_seq_length() == (59 if min(lengths) > 16 else 58)  # 58: nothing of the last row
    warm = generate(model, warm_cache, ids, mask)
    assert torch.equal(warm.sequences, cold.sequences)
    if dtype == "f32":
        allowed = 2 * max(split_error(model, ids, mask, at) for at in (16, 32, 59)) + 1e-6
        assert float((warm.logits[0] - cold.logits[0]).abs().max()) <= allowed
    assert warm_cache.stats().dense_calls == {}
    more = torch.cat([warm.sequences, ids[:, -7:]], 1)  # the next turn begins with what was generated
    seen = torch.cat([mask, torch.ones(len(ids), 16, dtype=mask.dtype)], 1)
    store.keep(warm_cache, warm)
    longer = store.cache_for(more, seen)
    assert longer.get_seq_length() >= 48
    got = generate(model, longer, more, seen).logits[0]
    want = generate(model, PagedCache(model.config, dtype=dtype), more, seen).logits[0]
    assert difference(got, want, torch.ones(len(ids))) < (1e-5 if dtype == "f32" else 0.3)
    for cache in (cold_cache, warm_cache, longer):
        cache.check()
    store.check()


def test_rows_share_what_they_have_in_common():
    """The shortest match of a batch counts; other tokens and other namespaces share nothing."""
    model, (ids, _) = make_model("llama", "kvcache"), left_padded([64] * 3, 64)
    store = PrefixStore(model.config, dtype="f32")
    first = ids[:1]
    cache = store.cache_for(first, namespace="a")
    store.keep(cache, generate(model, cache, first, torch.ones_like(first)))
    other = first.clone()
    other[0, 40] += 1
    assert store.cache_for(first, namespace="b").get_seq_length() == 0
    assert store.cache_for(first, namespace="a").get_seq_length() == 63
    assert store.cache_for(other, namespace="a").get_seq_length() == 40
    both = torch.cat([first, other])
    shared = store.cache_for(both, namespace="a")
    assert shared.get_seq_length() == 40
    got = generate(model, shared, both, torch.ones_like(both))
    want = generate(model, PagedCache(model.config, dtype="f32"), both, torch.ones_like(both))
    assert torch.equal(got.sequences, want.sequences)
    holes = torch.ones_like(first)
    holes[0, 3] = 0
    assert store.cache_for(first, holes, namespace="a").get_seq_length() == 0
    assert store.cache_for(first[:, :1], namespace="a").get_seq_length() == 0
    stats = store.stats()
    assert stats.hit_tokens > 0
    assert stats.cached_blocks == len(range(16, 73, 16))
    store.clear()
    assert store.cache_for(first, namespace="a").get_seq_length() == 0
    store.check()


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}])
def test_of_beams_the_prompts_are_kept(mode):
    """Rows of beams change places, so generated tokens are not known by row; nothing false is kept."""
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([50, 40], 50)
    store, beams = PrefixStore(model.config, dtype="f32"), mode["num_beams"]
    cache = store.cache_for(ids.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0))
    out = generate(model, cache, ids, mask, **mode)
    assert store.keep(cache, out) == beams * (50 // 16 + 40 // 16)
    again = store.cache_for(ids.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0))
    assert again.get_seq_length() == 10 + 32  # of the row with a padding of 10
    assert torch.equal(generate(model, again, ids, mask, **mode).sequences, out.sequences)
    once = store.cache_for(ids, mask)
    once.batch_repeat_interleave(beams)
    assert torch.equal(generate(model, once, ids, mask, **mode).sequences, out.sequences)
    store.check()


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_cold_cache_whose_rows_are_repeated(mode):
    """As one that holds a prefix: the rows that `generate` adds go back to the prompts."""
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([50, 40], 50)
    store = PrefixStore(model.config, dtype="f32")
    for cold in (True, False):
        cache = store.cache_for(ids, mask)
        assert (cache.get_seq_length() == 0) == cold
        cache.batch_repeat_interleave(3)
        out = generate(model, cache, ids, mask, **mode)
        assert store.keep(cache, out) == 3 * sum((length + 8 * ("do_sample" in mode)) // 16 for length in (50, 40))
    store.check()


def test_output_of_other_beams_is_refused():
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([40, 40], 40)
    store = PrefixStore(model.config, dtype="f32")
    for prompts in (left_padded([40, 40], 40, seed=5)[0], ids.flip(0)):
        for count in (1, 2, 3):
            cache = store.cache_for(ids.repeat_interleave(3, 0))
            out = generate(model, cache, prompts, mask, num_beams=3, num_return_sequences=count, max_new_tokens=2)
            with pytest.raises(ValueError, match="output: expected rows that begin with the 6 prompts"):
                store.keep(cache, out)
    cache = store.cache_for(ids)
    out = generate(model, cache, ids, mask, num_beams=3)
    with pytest.raises(ValueError, match="cache: expected the 2 rows of cache_for, got 6"):
        store.keep(cache, out)
    assert store.stats().cached_blocks == 0


def test_a_prompt_that_runs_again_over_its_prefix():
    """Assisted decoding does that; nothing false is kept of it."""
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([40], 40)
    store = PrefixStore(model.config, dtype="f32")
    cache = store.cache_for(ids)
    out = generate(model, cache, ids, mask, prompt_lookup_num_tokens=4)
    assert store.keep(cache, out) == 3
    warm = store.cache_for(ids)
    for assisted in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": make_model("llama", seed=1)}):
        with pytest.raises(ValueError, match=r"cache: expected an empty one with an assistant or .* got 39"):
            generate(model, warm, ids, mask, **assisted)
    assert torch.equal(generate(model, warm, ids, mask).sequences, out.sequences)
    again = store.cache_for(ids)
    with torch.no_grad():
        model(ids, past_key_values=again)
    with pytest.raises(ValueError, match="cache: expected at most the 49 tokens of the output, got 79"):
        store.keep(again, out)
    store.check()


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_threads_share_a_new_store(kind, monkeypatch):
    """An object that all threads lack at once is made once."""
    made = []

    def slow(make):
        def call(*arguments, **options):
            made.append(make)
            time.sleep(0.02)  # others come to the same place
            return make(*arguments, **options)

        return call

    monkeypatch.setattr(pool, "PagedKvCache", slow(pool.PagedKvCache))
    monkeypatch.setattr(prefixes, "PrefixCache", SimpleNamespace(over=slow(prefixes.PrefixCache.over)))
    model, prompts = make_model(kind, "kvcache"), [left_padded([34 + i], 34 + i, seed=i % 3) for i in range(4)]
    want = [generate(model, dynamic(model), *prompt).sequences for prompt in prompts]
    store, begin = PrefixStore(model.config, dtype="f32"), Barrier(4)

    def work(i):
        cache = store.cache_for(prompts[i][0])
        begin.wait()
        out = generate(model, cache, *prompts[i])
        store.keep(cache, out)
        return out.sequences

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(work, range(4)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(made) == 2 * len(store._pool.paged)
    for (ids, mask), sequences in zip(prompts, want, strict=True):
        assert store.cache_for(ids).get_seq_length() == 32  # of 41 to 44 tokens
        assert torch.equal(generate(model, store.cache_for(ids), ids, mask).sequences, sequences)
    store.check()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "ropes"),
    [
        ("llama", LONG),
        ("llama", DYNAMIC),
        ("gemma3_text", {"full_attention": DYNAMIC, "sliding_attention": PLAIN}),
    ],
)
def test_keys_that_depend_on_the_length_of_the_text_are_refused(kind, ropes):
    config = make_model(kind, rope_parameters=ropes).config
    with pytest.raises(ValueError, match="config: expected a rope_type that rotates K by its position alone, got "):
        PrefixStore(config)


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_models_that_drop_their_cache_where_keys_change(kind):
    more = {"short_mscale": 1.0, "long_mscale": 1.0} if kind == "phimoe" else {}
    model = make_model(kind, "kvcache", rope_parameters=LONG | more, original_max_position_embeddings=32)
    store, (long, _) = PrefixStore(model.config, dtype="f32"), left_padded([60], 60)
    for ids in (long, long[:, :25], long[:, :30], long):
        mask = torch.ones_like(ids)
        want = generate(model, PagedCache(model.config, dtype="f32"), ids, mask, max_new_tokens=12)
        cache = store.cache_for(ids)
        got = generate(model, cache, ids, mask, max_new_tokens=12)
        assert torch.equal(got.sequences, want.sequences)
        assert difference(got.logits[0], want.logits[0], torch.ones(1)) < 1e-5
        store.keep(cache, got)
    store.check()


def test_several_sequences_are_kept_whole():
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([40], 40)
    store = PrefixStore(model.config, dtype="f32")
    cache = store.cache_for(ids.expand(3, -1), mask.expand(3, -1))
    torch.manual_seed(0)
    out = generate(model, cache, ids, mask, do_sample=True, num_return_sequences=3, max_new_tokens=30)
    store.keep(cache, out)
    for row in out.sequences:
        assert store.cache_for(row[None]).get_seq_length() == 64
    store.check()


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_save_and_load(kind, tmp_path):
    model, (ids, mask) = make_model(kind, "kvcache"), left_padded([60, 45], 60)
    store = PrefixStore(model.config, dtype="q8")
    with pytest.raises(InvalidOperationError):
        store.save(tmp_path / "early.kv")
    cache = store.cache_for(ids, mask, namespace=("tenant", 7))
    cold = generate(model, cache, ids, mask)
    store.keep(cache, cold)
    store.save(tmp_path / "prefixes.kv")
    tomorrow = PrefixStore(model.config, dtype="q8")
    assert tomorrow.load(tmp_path / "prefixes.kv") > 0
    cache = tomorrow.cache_for(ids, mask, namespace=("tenant", 7))
    assert cache.get_seq_length() == 59
    assert torch.equal(generate(model, cache, ids, mask).sequences, cold.sequences)
    tomorrow.check()
    others = PrefixStore(make_model("llama").config, dtype="q8"), PrefixStore(model.config)
    for other, name in (*((each, None) for each in others), (PrefixStore(model.config, dtype="q8"), "another")):
        with pytest.raises(SnapshotError):
            other.load(tmp_path / "prefixes.kv", name)
        assert other.memory()["kv"] == 0
    with pytest.raises(InvalidOperationError):
        tomorrow.load(tmp_path / "prefixes.kv")
    set_bits(tmp_path / "prefixes.kv", 0)
    later = PrefixStore(model.config, dtype="q8")
    with pytest.raises(SnapshotError, match="expected bits of version"):
        later.load(tmp_path / "prefixes.kv")
    assert later.load(tmp_path / "prefixes.kv", exact=False) > 0
    assert (tomorrow.stats().exact, later.stats().exact) == (True, False)


def in_another_process(folder, kind, sent):
    """Compute, keep and store prompts; what was generated."""
    with Tiers([DirectoryTier(folder, "1GiB")], after_uses=1) as tiers:
        model, (ids, mask) = make_model(kind, "kvcache"), left_padded([110, 93], 110)
        store = PrefixStore(model.config, dtype="q8", tiers=tiers, model="one")
        cache = store.cache_for(ids, mask, namespace="a")
        out = generate(model, cache, ids, mask).sequences
        store.keep(cache, out)
        assert tiers.flush(60)
        sent.put(out.numpy())


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_prefixes_of_another_process(tmp_path, kind):
    """A process finds the prefixes that another one kept, by model, format and namespace; evicted ones come back."""
    context = multiprocessing.get_context("spawn")
    sent = context.SimpleQueue()
    other = context.Process(target=in_another_process, args=(tmp_path, kind, sent))
    other.start()
    want = torch.from_numpy(sent.get())
    other.join()
    model, (ids, mask) = make_model(kind, "kvcache"), left_padded([110, 93], 110)

    def opened(**options):
        tiers = Tiers([DirectoryTier(tmp_path, "1GiB")], after_uses=100, deadline=60)
        made = PrefixStore(model.config, **{"dtype": "q8", "tiers": tiers, "model": "one"} | options)
        return made, tiers

    store, tiers = opened()
    for evicted in (False, True):
        cache = store.cache_for(ids, mask, namespace="a")
        assert cache.get_seq_length() == 64
        out = generate(model, cache, ids, mask)
        assert torch.equal(out.sequences, want)
        assert cache.stats().dense_calls == {}
        store.keep(cache, out)
        cache.check()
        store.check()
        del cache
        if not evicted:
            store.evict(10**6)
            assert tiers.flush(60)
    assert tiers.stats()[0].hits == 2 * 2 * len(store._indexes)
    for options, namespace in (({"model": "two"}, "a"), ({"dtype": "q4"}, "a"), ({}, "b")):
        assert opened(**options)[0].cache_for(ids, mask, namespace=namespace).get_seq_length() == 0
    size = store.memory()["kv"]
    small, _ = opened(max_memory_bytes=size // 2)
    assert small.cache_for(ids[:1], namespace="a").get_seq_length() in (0, 64)
    small.check()


def test_tiers_need_a_name_of_the_weights(tmp_path):
    config = make_model("llama", "kvcache").config
    with pytest.raises(ValueError, match="model: expected a name of the weights with tiers, got None"):
        PrefixStore(config, tiers=Tiers([DirectoryTier(tmp_path, "1GiB")]))
    with pytest.raises(TypeError, match="tiers: expected"):
        PrefixStore(config, tiers=[DirectoryTier(tmp_path, "1GiB")], model="one")


def test_within_its_memory():
    """Kept prefixes go when caches in use need their blocks; when nothing can go, the call raises."""
    model = make_model("llama", "kvcache")
    store = PrefixStore(model.config, dtype="f32", max_memory_bytes=40 * 16 * 4 * 2 * 2 * 8 * 4)
    for seed in range(8):
        ids, mask = left_padded([90], 90, seed=seed)
        cache = store.cache_for(ids)
        out = generate(model, cache, ids, mask)
        store.keep(cache, out)
        del cache
        store.check()
        assert store.cache_for(ids).get_seq_length() == 89
    assert store.evict(3) == 3
    assert store.stats().total_evictions > 0
    assert store.memory()["kv"] <= 40 * 16 * 4 * 2 * 2 * 8 * 4
    ids, mask = left_padded([120] * 7, 120)
    with pytest.raises(OutOfMemoryError):
        generate(model, store.cache_for(ids), ids, mask)
    assert store.stats().cached_blocks == 0
    store.check()


def test_blocks_in_use_are_free_at_once():
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([40], 40)
    gc.collect()
    gc.disable()
    try:
        store = PrefixStore(model.config, dtype="f32")
        cache = store.cache_for(ids)
        kept = store.keep(cache, generate(model, cache, ids, mask, max_new_tokens=15))
        (paged,) = store._pool.paged.values()
        assert paged.used_block_count == kept + 1
        del cache
        assert paged.used_block_count == kept
    finally:
        gc.enable()


def test_refusals():
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([40], 40)
    store = PrefixStore(model.config)
    with pytest.raises(ValueError, match="config: expected layers with full attention or windows, got conv"):
        PrefixStore(make_model("lfm2").config)
    with pytest.raises(TypeError, match="cache: expected a PagedCache of cache_for, got DynamicCache"):
        store.keep(dynamic(model), ids)
    with pytest.raises(ValueError, match="cache: expected one of this store's cache_for, got another"):
        store.keep(PagedCache(model.config), ids)
    cache = store.cache_for(ids)
    out = generate(model, cache, ids, mask)
    with pytest.raises(ValueError, match="output: expected rows that begin with the 1 prompts"):
        store.keep(cache, out.sequences + 1)
    with pytest.raises(ValueError, match="input_ids: expected integers"):
        store.cache_for(np.ones(3))
    with pytest.raises(ValueError, match="attention_mask: expected shape"):
        store.cache_for(ids, mask[:, 1:])
    assert store.stats().cached_blocks == 0
    assert PrefixStore(model.config).stats() is None
    assert "PrefixStore(f16, 0 blocks of 16 tokens kept)" in repr(store)
