"""`PagedCache` does what `DynamicCache` does: transformers' own cases of a cache, and random calls beside it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hf_models import difference, dynamic, left_padded, logits_of, make_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import AutoConfig, DynamicCache, StaticCache

import kvcache
from kvcache import OutOfMemoryError
from kvcache.integrations.transformers import PagedCache

pytestmark = [
    pytest.mark.one_build,
    pytest.mark.filterwarnings("ignore:kvcache. attention made K and V dense"),
]


def config(**options):
    types = ["full_attention", "sliding_attention", "full_attention"]
    return AutoConfig.for_model(
        "gemma3_text", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        sliding_window=5, layer_types=types, vocab_size=61, **options,
    )


class BesideDynamicCache(RuleBasedStateMachine):
    """Any calls in any order: after each, K and V of every layer are those of `DynamicCache`."""

    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(0)
        self.pairs = []
        self.start(False)

    def start(self, recording):
        self.recording, self.gone = recording, 0  # tokens that a crop has dropped before the window of 5
        self.caches = [DynamicCache(config=config()), PagedCache(config(), dtype="f32", block_size=4)]
        self.batch = 0
        if recording:
            for cache in self.caches:
                cache.activate_past_recording()

    @rule(recording=st.booleans())
    def new(self, recording):
        self.start(recording)

    @rule(count=st.integers(1, 9), batch=st.integers(1, 3))
    def update(self, count, batch):
        self.batch = self.batch or batch
        for layer in range(3):
            keys, values = torch.randn(2, self.batch, 2, count, 12, generator=self.draw)
            theirs, ours = (cache.update(keys, values, layer) for cache in self.caches)
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                torch.testing.assert_close(a + 0, b, rtol=0, atol=0)

    def length(self):
        return self.caches[0].get_seq_length()

    @precondition(lambda self: self.length())
    @rule(count=st.integers(0, 6))
    def crop(self, count):
        count, outcomes = min(count, self.length() - 1), []
        if not self.recording and self.length() >= 5:
            for cache in self.caches:
                with pytest.raises(RuntimeError, match="past"):
                    copy.deepcopy(cache).crop(-count)
            return
        if count and self.gone > max(0, self.length() - count - 4):  # `DynamicCache` then has less than its window
            with pytest.raises(RuntimeError, match="past"):
                self.caches[1].crop(-count)
            return
        self.gone = max(self.gone, self.length() - count - 4)
        for cache in self.caches:
            cache.crop(-count)
            outcomes.append(cache.get_seq_length())
        assert outcomes[0] == outcomes[1]

    @precondition(lambda self: self.batch)
    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        for cache in self.caches:
            cache.reorder_cache(torch.tensor(rows))

    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, max(0, self.batch - 1)), min_size=1, max_size=3))
        for cache in self.caches:
            cache.batch_select_indices(torch.tensor(rows))
        self.batch = len(rows) if self.batch else 0

    @precondition(lambda self: self.batch < 3)
    @rule()
    def repeat(self):
        for cache in self.caches:
            cache.batch_repeat_interleave(2)
        self.batch *= 2

    @rule()
    def reset(self):
        for cache in self.caches:
            cache.reset()
        self.batch = self.gone = 0

    @rule()
    def go_on_with_a_copy(self):
        before = self.caches
        self.caches = [copy.deepcopy(cache) for cache in before]
        before[1].reset()

    @invariant()
    def same(self):
        theirs, ours = self.caches
        ours.check()
        for layer in range(3):
            assert theirs.get_seq_length(layer) == ours.get_seq_length(layer)
            assert theirs.get_mask_sizes(3, layer) == ours.get_mask_sizes(3, layer)
            if not self.recording:  # while it records, DynamicCache keeps a varying part of the past
                for a, b in ((theirs.layers[layer].keys, ours.layers[layer].keys),):
                    assert (a is None or not a.numel()) == (b is None)
                    if b is not None:
                        torch.testing.assert_close(b + 0, a, rtol=0, atol=0)


TestBesideDynamicCache = BesideDynamicCache.TestCase
TestBesideDynamicCache.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)


def test_structure():
    """transformers' questions about a cache."""
    cache = PagedCache(config())
    assert len(cache) == 3
    assert cache.is_sliding == [False, True, False]
    assert cache.is_linear == cache.is_dummy == [False] * 3
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.get_max_length() == 5
    assert isinstance(cache, DynamicCache)
    assert next(iter(cache))[:2] == (None, None)
    assert "PagedCache(f16" in repr(cache)


def test_blocks_are_free_at_once_without_the_collector():
    """The cache refers to itself nowhere: what a model's outputs and deep copies hold ends with them."""
    model, (ids, mask) = make_model("gemma3_text", "kvcache"), left_padded([9, 5], 9)
    gc.collect()
    gc.disable()
    try:
        cache = PagedCache(model.config, dtype="f32")
        logits_of(model, cache, ids, mask, 7)
        pool, twin = cache.state.pool, copy.deepcopy(cache)
        used = cache.stats().used_blocks
        assert used > 0
        gone = [weakref.ref(cache), weakref.ref(cache.state)]
        del cache
        assert [each() for each in gone] == [None, None]
        assert sum(paged.used_block_count for paged in pool.paged.values()) == used  # the twin's
        del twin
        assert sum(paged.used_block_count for paged in pool.paged.values()) == 0
    finally:
        gc.enable()


def test_copies():
    model, (ids, mask) = make_model("mistral", "kvcache"), left_padded([20, 15], 20)
    cache = PagedCache(model.config, dtype="q4")
    first = logits_of(model, cache, ids[:, :12], mask[:, :12], 12)
    used, twin = cache.stats().used_blocks, copy.deepcopy(cache)
    assert cache.stats().used_blocks == used
    assert first.isfinite().all()

    @torch.no_grad()
    def go_on(which):
        return model(ids[:, 12:], attention_mask=mask, past_key_values=which).logits

    one, other = go_on(cache), go_on(twin)
    assert torch.equal(one, other)
    cache.check()
    for refused in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"PagedCache: expected no copy and no pickle .* copy\.deepcopy"):
            refused(cache)


def test_memory_grows_and_has_a_limit():
    model, (ids, mask) = make_model("gemma3_text", "kvcache"), left_padded([40, 40], 40)
    cache = PagedCache(model.config, dtype="f32")
    sizes = []
    for _ in range(4):
        with torch.no_grad():
            model(ids, past_key_values=cache)
        sizes.append(cache.memory()["kv"])
        cache.check()
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < 8 * sizes[0]
    small = PagedCache(model.config, dtype="f32", max_memory_bytes=sizes[0])
    with pytest.raises(OutOfMemoryError):
        logits_of(model, small, ids.repeat(1, 9), mask.repeat(1, 9), 40, 40)
    assert small.memory()["kv"] <= sizes[0]
    small.reset()
    assert small.stats().used_blocks == 0
    got = logits_of(model, small, ids[:, :9], mask[:, :9], 9)  # and it works again
    assert torch.equal(got, logits_of(model, PagedCache(model.config, dtype="f32"), ids[:, :9], mask[:, :9], 9))


def test_other_implementations_of_attention():
    """With sdpa and eager the cache is right, and K and V become dense, which is counted."""
    model, (ids, mask) = make_model("gemma3_text"), left_padded([21, 9], 21)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = PagedCache(model.config, dtype="f32")
        want = logits_of(model, dynamic(model), ids, mask, 9)
        torch.testing.assert_close(logits_of(model, cache, ids, mask, 9), want, rtol=0, atol=1e-5)
        assert all(reason.startswith("the operation aten.") for reason in cache.stats().dense_calls)
        assert cache.stats().packed_calls == 0


def test_other_caches_with_this_attention():
    """The registered attention over tensors: DynamicCache, StaticCache; and PagedCache in inference mode."""
    model, (ids, mask) = make_model("gemma3_text"), left_padded([20, 13], 20)
    want = logits_of(model, dynamic(model), ids, mask, 14)
    model.set_attn_implementation("kvcache")
    paged = PagedCache(model.config, dtype="f32")
    with torch.inference_mode():
        for cache in (dynamic(model), StaticCache(config=model.config, max_cache_len=32), paged):
            assert difference(logits_of(model, cache, ids, mask, 14), want, mask) < 1e-5
    assert paged.stats().dense_calls == {}


def test_heads_wider_than_the_kernels():
    model = make_model("llama", head_dim=520, num_hidden_layers=2)
    ids, mask = left_padded([9, 5], 9)
    want = logits_of(model, dynamic(model), ids, mask, 7)
    model.set_attn_implementation("kvcache")
    cache = PagedCache(model.config)
    torch.testing.assert_close(logits_of(model, cache, ids, mask, 7), want, rtol=0, atol=1e-4)
    assert set(cache.stats().dense_calls) == {"heads of more than 512 channels"}
    cache.crop(-2)
    assert cache.get_seq_length() == copy.deepcopy(cache).get_seq_length() == 7


def test_what_cannot_be_right_raises():
    model, (ids, mask) = make_model("mistral", "kvcache"), left_padded([20, 15], 20)
    cache = PagedCache(model.config)
    with pytest.raises(RuntimeError, match=r"expected no gradients \(torch\.no_grad"):
        model(ids, past_key_values=cache)
    cache.reset()
    logits_of(model, cache, ids, mask, 20)
    with torch.no_grad():
        shown = torch.ones(2, 21, dtype=torch.long)
        full = PagedCache(make_model("llama").config)
        llama = make_model("llama", "kvcache")
        logits_of(llama, full, ids, mask, 20)
        with pytest.raises(ValueError, match="attention_mask: expected the mask of earlier calls"):
            llama(ids[:, :1], attention_mask=shown, past_key_values=full)
        with pytest.raises(ValueError, match="key_states: expected the 2 rows that the cache holds, got 3"):
            model(ids[:1].expand(3, -1), past_key_values=cache)
        with pytest.raises(ValueError, match="output_attentions: expected False"):
            llama(ids, past_key_values=PagedCache(llama.config), output_attentions=True)
        compiled = torch.compile(llama, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="kvcache: expected no fullgraph=True"):
            compiled(ids, past_key_values=PagedCache(llama.config))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or a negative number, got 3"):
        cache.crop(3)
    with pytest.raises(RuntimeError, match="expected a cache that records the past"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="expected the call on the PagedCache"):
        cache.layers[0].crop(-1)
    states = PagedCache(config()).update(*torch.zeros(2, 1, 2, 3, 12), 0)[0]
    states._layer.state.epoch += 1
    with pytest.raises(RuntimeError, match="expected a cache without changes since `update`"):
        states + 0
    for bad in ({"dtype": "q7"}, {"block_size": 0}, {"max_memory_bytes": "much"}):
        with pytest.raises(ValueError, match="expected"):
            PagedCache(config(), **bad)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_no_gradient_is_dropped(name):
    """One projection of the last layer is trained, so that Q, K or V alone requires a gradient."""
    model, (ids, _) = make_model("llama", "kvcache"), left_padded([9], 9)
    model.requires_grad_(False)
    getattr(model.model.layers[-1].self_attn, name).weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=rf"expected no gradients .*, got {name[0].upper()} that requires one"):
        model(ids, past_key_values=PagedCache(model.config))
    with torch.no_grad():
        model(ids, past_key_values=PagedCache(model.config))


def test_states_whose_tokens_have_left_the_window():
    model, (ids, _) = make_model("mistral", "kvcache"), left_padded([40], 40)
    cache = PagedCache(model.config, dtype="f32", block_size=4)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        keys, want = cache.layers[0].keys, cache.layers[0].keys + 0
        model(ids[:, 10:12], past_key_values=cache)
        assert torch.equal(keys + 0, want)
        for at in range(12, 40):
            model(ids[:, at : at + 1], past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"states: expected positions from 33 on, .*, got 5"):
        keys + 0


def test_compiled_with_graph_breaks():
    """`torch.compile` without fullgraph: the same logits."""
    model, (ids, mask) = make_model("llama", "kvcache", num_hidden_layers=1), left_padded([12, 7], 12)
    want = logits_of(model, PagedCache(model.config, dtype="f32"), ids, mask, 11)
    compiled, cache, got = torch.compile(model, backend="eager"), PagedCache(model.config, dtype="f32"), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for part in (slice(0, 11), slice(11, 12)):
            given = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
            got.append(compiled(ids[:, part], past_key_values=cache, **given).logits)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], want[mask.bool()], rtol=0, atol=1e-5)


def test_k_and_v_from_elsewhere():
    """Layers that are filled without attention, then a model that goes on."""
    model, (ids, mask) = make_model("gemma3_text"), left_padded([30, 30], 30)
    want = logits_of(model, dynamic(model), ids, mask, 12)
    theirs, ours = dynamic(model), PagedCache(model.config, dtype="f32")
    logits_of(model, theirs, ids[:, :5], mask[:, :5], 5)  # fewer than a window
    for layer in range(4):
        ours.update(theirs.layers[layer].keys, theirs.layers[layer].values, layer)
    model.set_attn_implementation("kvcache")
    got = []
    for start, stop in ((5, 12), (12, 30)):
        at = torch.arange(start, stop)[None].expand(2, -1)
        with torch.no_grad():
            got.append(model(ids[:, start:stop], position_ids=at, past_key_values=ours).logits)
    torch.testing.assert_close(torch.cat(got, 1), want[:, 5:], rtol=0, atol=1e-4)
    ours.check()


def test_threads_do_not_change_results():
    model, (ids, mask) = make_model("llama", "kvcache"), left_padded([20, 15], 20)
    one = logits_of(model, PagedCache(model.config, dtype="q8"), ids, mask, 13)
    kvcache.set_num_threads(2)
    assert torch.equal(one, logits_of(model, PagedCache(model.config, dtype="q8"), ids, mask, 13))


def test_reports():
    model, (ids, mask) = make_model("gemma3_text", "kvcache"), left_padded([9, 5], 9)
    cache = PagedCache(model.config, dtype="q8", block_size=4)
    assert cache.memory() == {"kv": 0, "bookkeeping": 0, "scratch": 0, "huge": 0}
    logits_of(model, cache, ids, mask, 9)
    stats, memory = cache.stats(), cache.memory()
    assert (stats.num_tokens, stats.batch_size, stats.stored_tokens, stats.packed_calls) == (9, 2, 14, 4)
    assert stats.used_blocks == 2 * (3 + 2)
    assert 0 < stats.used_bytes <= memory["kv"]
    assert min(memory["kv"], memory["bookkeeping"], memory["scratch"]) > 0
    assert memory["huge"] >= 0  # as the system has such pages
