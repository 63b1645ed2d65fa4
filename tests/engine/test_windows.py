"""Layers that keep a window: what they keep, what they return, and what a failing call leaves."""

import numpy as np
import pytest
from pace import half
from recording_network import TOKENS, VOCABULARY, RecordingNetwork, same_outputs
from windowed_networks import FOUR, FULL, KINDS, NONE, network, window

from kvcache import EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.errors import InvalidOperationError
from kvcache.networks.protocols import LayerAttention

pytestmark = pytest.mark.one_build
SPARE = 64  # tokens before a window that stay


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def engine(kind, **options):
    return InferenceEngine(network(kind), **{"prefill_chunk": 24, "num_blocks": 40} | options)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(0, VOCABULARY, n).astype(np.uint32)


def dense(model, layer, pos):
    """The attention of one query over all tokens that it sees, in float64."""
    attention = model.attention[layer]
    first = 0 if attention.window is None else max(0, pos - attention.window + 1)
    if attention.chunked:
        first = pos // attention.window * attention.window
    queries, keys, values = map(np.float64, model.layer_rows(layer, [pos], np.arange(first, pos + 1)))
    heads, dim = keys.shape[1:]
    query = queries[0].reshape(heads, -1, dim)
    scores = np.einsum("hgd,nhd->hgn", query, keys) * (attention.scale or dim**-0.5)
    if attention.softcap is not None:
        scores = attention.softcap * np.tanh(scores / attention.softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sinks = 0 if attention.sinks is None else np.exp(attention.sinks.reshape(heads, -1) - scores.max(axis=-1))
    weights /= (weights.sum(axis=-1) + sinks)[..., None]
    return np.einsum("hgn,nhd->hgd", weights, values).reshape(-1, dim)


def kept(engine):
    return [engine.kept_positions(layer).tolist() for layer in range(engine.config.num_layers)]


@pytest.mark.parametrize("chunk", half([1, 100, 7, 16, 512]))
def test_every_query_sees_its_window(kind, chunk):
    it, tokens = engine(kind, prefill_chunk=chunk), prompt(0, 200)
    it.model.expect(tokens, None)
    it.generate(tokens, FOUR)
    it.check()
    for (layer, pos), row in it.model.outputs.items():
        np.testing.assert_allclose(row, dense(it.model, layer, pos), atol=2e-5, err_msg=f"{layer} {pos}")


def test_scale_caps_and_sinks_reach_the_layers():
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    model = RecordingNetwork((window(20, softcap=3.0), FULL, window(30, sinks=sinks, scale=0.4)))
    tokens = prompt(1, 90)
    model.expect(tokens, None)
    InferenceEngine(model, prefill_chunk=16, num_blocks=20).generate(tokens, FOUR)
    for (layer, pos), row in model.outputs.items():
        np.testing.assert_allclose(row, dense(model, layer, pos), atol=2e-5)


@pytest.mark.parametrize("dtype", half(["f32", "f16", "q4", "q8", "q2"]))
def test_any_pieces_give_the_same_bits(rng, kind, dtype):
    whole, tokens = engine(kind, dtype=dtype, prefill_chunk=512), prompt(2, 300)
    whole.model.expect(tokens, None)
    whole.prefill_from_pos(tokens, 0)
    for _ in range(4):
        it = engine(kind, dtype=dtype, prefill_chunk=int(rng.integers(1, 200)))
        it.model.expect(tokens, None)
        cuts = np.unique(rng.integers(1, len(tokens), 12))
        for piece in np.split(np.arange(len(tokens)), cuts):
            it.prefill_from_pos(tokens[piece], int(piece[0]))
            it.check()
        assert it.model.outputs.keys() == whole.model.outputs.keys()
        same_outputs(it.model, whole.model)


def test_layers_with_a_window_keep_little_more(kind):
    it, tokens = engine(kind), prompt(3, 390)
    it.prefill_from_pos(tokens[:350], 0)
    for pos in range(350, 390):
        it.decode_step(int(tokens[pos]), pos)
    groups = it._sequence.pool.groups[1:]
    for layer, positions in enumerate(kept(it)):
        held = [group for group in groups if layer in group.layers and group.window < TOKENS]
        if not held:
            assert positions == list(range(390))
            continue
        assert positions == list(range(positions[0], 390))
        least = SPARE if held[0].chunked else held[0].window + SPARE - 1
        assert positions[0] <= held[0].first_seen(390)
        assert least <= len(positions) < held[0].window + SPARE + 2 * 16


def groups(model):
    """The layers that keep all tokens, and those of each window."""
    settings = InferenceEngine(model)._settings
    return settings.whole, {settings.window_of(layers[0]): layers for layers in settings.layers["window"]}


def test_the_groups_of_a_network():
    whole, windows = groups(network("windows alone"))
    assert (whole, list(windows)) == ((), [20, 50])
    assert groups(network("two windows")) == ((1,), {20: (0,), 70: (2,)})
    model = RecordingNetwork((FULL, window(400), window(399)))
    assert groups(model)[0] == (0, 1), "a window of all positions is none"
    model = RecordingNetwork((FULL, window(400, chunked=True), window(399, chunked=True), window(399)))
    settings = InferenceEngine(model)._settings
    assert (settings.whole, settings.layers["window"]) == ((0, 1), ((3,), (2,)))
    with pytest.raises(ValueError, match="window: expected a number beside chunked, got None"):
        InferenceEngine(RecordingNetwork((FULL, LayerAttention(chunked=True))))


def test_the_groups_of_layers_of_several_sizes():
    settings = InferenceEngine(network("two sizes"))._settings
    assert settings.whole == (0,)
    assert settings.layers["window"] == ((3,), (1,), (2,))  # ascending by window and KV heads
    pool = InferenceEngine(network("shared"))._sequence.pool
    assert [group.layers for group in pool.groups] == [(1, 5), (0, 3), (2, 4)]
    assert [(c.num_layers, c.num_heads, c.head_dim) for group in pool.groups for c in group.caches] == [
        (1, 2, 16), (1, 2, 16), (1, 1, 16),
    ]


@pytest.mark.parametrize(("layer", "message"), [
    (LayerAttention(kv_layer=1), r"attention\.1\.kv_layer: expected an earlier layer with K and V of its own, got 1"),
    (LayerAttention(kv_layer=-1), "expected an earlier layer with K and V of its own, got -1"),
    (LayerAttention(kv_layer=0, head_dim=8), r"head_dim of layer 0, \(None, False, 2, 16\), got \(None, False, 2, 8\)"),
    (window(9, kv_layer=0), r"expected window, chunked, num_kv_heads and head_dim of layer 0, \(None, F.*got \(9, F"),
])
def test_layers_that_cannot_share_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        InferenceEngine(RecordingNetwork((FULL, layer)))
    with pytest.raises(ValueError, match=r"attention\.2\.kv_layer: expected an earlier layer with K and V of its own"):
        InferenceEngine(RecordingNetwork((FULL, LayerAttention(kv_layer=0), LayerAttention(kv_layer=1))))


@pytest.mark.parametrize(("layer", "what"), [
    (LayerAttention(head_dim=8), "layers of several sizes"),
    (LayerAttention(kv_layer=0), "layers that read K and V of others"),
])
def test_what_layers_of_several_sizes_cannot_have_says_so(layer, what):
    def make(**options):
        return InferenceEngine(RecordingNetwork((FULL, layer)), num_blocks=8, **options)

    with pytest.raises(ValueError, match=f"eviction_policy: expected none with {what}, got"):
        make(eviction_policy=EvictionPolicy.H2O(), kv_budget=8)
    with pytest.raises(ValueError, match=f"residual_length: expected 0 or none with {what}, got 64"):
        make(dtype="q4", residual_length=64)
    with pytest.raises(ValueError, match=f"calibrate: expected None or False with {what}"):
        make(dtype="q4", calibrate=prompt(0, 20))
    assert make(dtype="q4").residual_length == 0
    if layer.kv_layer is None:
        assert make(dtype=["q8", "q4"]).residual_length == 0
    else:
        with pytest.raises(ValueError, match=f"dtype: expected one format with {what}"):
            make(dtype=["q8", "q4"])


def test_a_text_can_be_cut_within_the_spare_tokens(rng, kind):
    it, tokens = engine(kind), prompt(4, 300)
    it.model.expect(tokens, None)
    it.prefill_from_pos(tokens, 0)
    for _ in range(20):
        pos = it.num_tokens - int(rng.integers(0, SPARE // 2))
        fresh = prompt(int(rng.integers(100)), int(rng.integers(SPARE // 2, SPARE)))
        tokens = np.concatenate([tokens[:pos], fresh])[:390]
        it.model.expect(tokens, None)
        it.prefill_from_pos(tokens[pos:], pos)
        it.check()
        alone = engine(kind)
        alone.model.expect(tokens, None)
        alone.prefill_from_pos(tokens, 0)
        same_outputs(it.model, alone.model)


def test_a_cut_before_the_window_is_refused(kind):
    it, tokens = engine(kind), prompt(5, 380)
    it.prefill_from_pos(tokens, 0)
    before = kept(it), it.num_tokens, it.cache.free_block_count
    with pytest.raises(InvalidOperationError, match=r"pos: expected at least \d+, got 100: the layers with a window"):
        it.prefill_from_pos(tokens[:10], 100)
    assert (kept(it), it.num_tokens, it.cache.free_block_count) == before
    it.check()
    it.prefill_from_pos(tokens[:10], 0)
    assert it.num_tokens == 10
    it.check()


@pytest.mark.parametrize("count", half([1, 20, 90]))
@pytest.mark.parametrize("back", half([0, 3, 40]))
def test_a_failing_call_changes_nothing(kind, count, back):
    it, tokens = engine(kind), prompt(6, 300)
    it.model.expect(tokens, None)
    it.prefill_from_pos(tokens, 0)
    layers = it.config.num_layers
    for countdown in range(layers * (count // 24 + 1)):
        before = it.num_tokens
        it.model.countdown = countdown
        with pytest.raises(InterruptedError):
            it.prefill_from_pos(prompt(7, count), before - back)
        it.model.countdown = -1
        assert it.num_tokens == before
        it.check()
        for group, place in zip(it._sequence.pool.groups[1:], it._sequence.text.places[1:], strict=True):
            assert place.first <= group.first_seen(before - back)
    more = np.concatenate([tokens[: 300 - back], prompt(8, 30)])
    it.model.expect(more, None)
    it.prefill_from_pos(more[300 - back :], 300 - back)
    alone = engine(kind)
    alone.model.expect(more, None)
    alone.prefill_from_pos(more, 0)
    same_outputs(it.model, alone.model)


def test_what_cannot_keep_windows_says_so():
    with pytest.raises(ValueError, match="eviction_policy: expected none with layers that have a window"):
        engine("longer", eviction_policy=EvictionPolicy.H2O(), kv_budget=8)
    with pytest.raises(ValueError, match="residual_length: expected 0 or none with layers that have a window, got 64"):
        engine("longer", dtype="q4", residual_length=64)
    assert engine("longer", dtype="q4").residual_length == 0
    it = engine("longer")

    def share(cache, seq_id):
        cache.allocate(seq_id, 50)
        return 50

    with pytest.raises(InvalidOperationError, match="expected the 36 tokens before 50 for the layers with a window"):
        it.begin(share)
    it.check()
    assert it.num_tokens == 0


def test_a_quarter_of_the_bytes_at_64_windows():
    """5 of 6 layers with a window of 512, as in Gemma 3, at 32k tokens."""
    sizes = []
    for attention in ((*[window(512)] * 5, FULL), (FULL,) * 6):
        model = RecordingNetwork(attention)
        model.config.max_position_embeddings = 32768
        sizes.append(InferenceEngine(model, num_blocks=2049).memory()["kv"])
    assert sizes[0] <= 0.25 * sizes[1]


def test_bytes_are_bounded_by_the_window():
    attention = tuple(FULL if layer == 5 else window(5) for layer in range(6))
    model, whole = RecordingNetwork(attention), RecordingNetwork((FULL,) * 6)
    few, many = (InferenceEngine(m, block_size=1, prefill_chunk=8, num_blocks=400) for m in (model, whole))
    assert few.memory()["kv"] < 0.7 * many.memory()["kv"]  # SPARE is large beside a window of 5
    for each in (few, many):
        each.prefill_from_pos(prompt(9, 390), 0)
    used = [group.cache.used_block_count for group in few._sequence.pool.groups[1:]]
    assert used == [5 - 1 + SPARE + 6]  # the last piece has 6 tokens


def test_memory_limit_counts_the_windows():
    wanted = engine("two windows", num_blocks=12).memory()["kv"]
    it = InferenceEngine(network("two windows"), prefill_chunk=24, max_memory_bytes=wanted)
    assert it.cache.total_blocks == 12
    assert it.memory()["kv"] == wanted
    cached = PrefixCachedEngine(it, max_memory_bytes=2 * wanted)
    assert wanted < cached.memory()["kv"] <= 2 * wanted


def test_enlarge_keeps_the_windows(kind):
    it, tokens = engine(kind), prompt(10, 100)
    it.prefill_from_pos(tokens, 0)
    it.enlarge(5)
    it.check()
    assert (it.num_tokens, it.cache.total_blocks) == (0, 45)
    it.model.expect(tokens, None)
    it.generate(tokens, NONE)
    it.check()
