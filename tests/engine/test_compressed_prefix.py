"""Compressed prefixes: what stays is what a naive twin keeps, and texts behind them have their bits in any company."""

from __future__ import annotations

import re

import numpy as np
import pytest
from format_pairs import NEIGHBOURS
from oracles.compressed import DensePrefix, best_of
from places import GOLDEN
from posix_modules import needs_posix
from saved_caches import set_bits
from serving import Clock

from kvcache import BatchEngine, PagedKvCache, PrefixCachedEngine, SamplingParams
from kvcache.engine import InferenceEngine, LayerAttention, Probe, Transformer
from kvcache.errors import InvalidOperationError, OutOfMemoryError, SnapshotError
from kvcache.kernels.kernels import BITS_VERSION, FORMATS
from kvcache.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, KVzip, SnapKV
from kvcache.texts.compressed_prefix import CompressedPrefix

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=6)
TOKENS = np.random.default_rng(5).integers(3, 250, 75).astype(np.uint32)
TAIL = np.random.default_rng(6).integers(3, 250, 20).astype(np.uint32)
WORDS = {"prompt": [7, 8, 9], "later": [10, 11], "suffix": [12]}


def kvzip(part=32, sinks=2, **options):
    return KVzip(part, sinks, **WORDS, **options)


@pytest.fixture(scope="module")
def prefix(network):
    return InferenceEngine(network).compress(TOKENS, kvzip(), ratio=0.3)


class Capped:
    """The network with a cap on its scores, and a logit beside them for each query head."""

    def __init__(self, network):
        self.config, self.forward = network.config, network.forward
        sinks = np.linspace(-1, 2, network.config.num_heads, dtype=np.float32)
        self.attention = (LayerAttention(scale=0.7, softcap=2.5, sinks=sinks),) * network.config.num_layers


def positions(prefix, config):
    return [[prefix.positions(i, j).tolist() for j in range(config.num_kv_heads)] for i in range(config.num_layers)]


@pytest.mark.one_build
@pytest.mark.parametrize("layerwise", [False, True])
def test_kvzip_keeps_what_its_twin_keeps(network, layerwise):
    found = InferenceEngine(network, prefill_chunk=16).compress(TOKENS, kvzip(layerwise=layerwise), ratio=0.3)
    twin, config = DensePrefix(network, TOKENS), network.config
    scores, heads = twin.kvzip(TOKENS, 32, 2, **WORDS), config.num_kv_heads
    if layerwise:
        kept = [best_of(layer[None], 2, heads * 22)[0] for layer in scores]
    else:
        kept = best_of(scores, 2, config.num_layers * heads * 22)
        assert len({sum(map(len, layer)) for layer in kept}) > 1
    assert positions(found, config) == kept
    twin.kept = [[np.array(each) for each in layer] for layer in kept]
    engine = InferenceEngine(network)
    engine.reset(found)
    assert engine.num_tokens == len(TOKENS)
    np.testing.assert_allclose(engine.prefill_from_pos(TAIL, len(TOKENS)), twin.run(TAIL)[-1], atol=2e-4)
    assert engine.kept_positions(1, 0).tolist() == [*kept[1][0], *range(75, 95)]


@pytest.mark.one_build
@pytest.mark.parametrize("policy", [
    SnapKV(8, per_head=True), AdaKV(SnapKV(8)), ExpectedAttention(24, per_head=True), KeyDiff(), TOVA(),
], ids=lambda policy: type(policy).__name__)
def test_a_policy_keeps_what_it_keeps_of_a_live_text(network, policy):
    network = Capped(network) if type(policy) is SnapKV else network
    live = InferenceEngine(network, eviction_policy=policy, kv_budget=22)
    live.prefill_from_pos(TOKENS, 0)
    found, config = InferenceEngine(network, prefill_chunk=16).compress(TOKENS, policy, ratio=0.3), network.config
    want = [
        [live.kept_positions(i, j).tolist() for j in range(config.num_kv_heads)] for i in range(config.num_layers)
    ]
    assert positions(found, config) == want


@pytest.mark.parametrize("capped", [False, True])
def test_whole_prefixes_change_nothing_but_rounding(network, capped):
    model = Capped(network) if capped else network
    engine = InferenceEngine(model)
    found = engine.compress(TOKENS, kvzip(), ratio=1.0)
    np.testing.assert_allclose(
        engine.score(TAIL, prefix=found), engine.score([*TOKENS, *TAIL])[len(TOKENS) :], atol=1e-5
    )
    assert found.nbytes == found.whole_nbytes


@pytest.mark.parametrize("options", [
    {}, {"dtype": "q8", "residual_length": 0}, *({"key_dtype": key, "value_dtype": value} for key, value in NEIGHBOURS),
], ids=str)
def test_texts_behind_it_have_their_bits_in_any_company(network, tmp_path, options):
    engine = InferenceEngine(network, **options)
    found = engine.compress(TOKENS, kvzip(), ratio=0.3)
    other = engine.compress(TOKENS[:40], SnapKV(8, per_head=True), ratio=0.5)
    params = GREEDY.changed({"logprobs": 3})
    want = engine.complete(TAIL, params, prefix=found)
    found.save(tmp_path / "prefix")
    again = InferenceEngine(network, prefill_chunk=5, **options).load_compressed(tmp_path / "prefix")
    assert (again.name, repr(again), again.tokens.tolist()) == (found.name, repr(found), TOKENS.tolist())
    pieces = InferenceEngine(network, prefill_chunk=5, **options)
    assert pieces.complete(TAIL, params, prefix=again) == want
    cached = PrefixCachedEngine(InferenceEngine(network, **options), 32)
    plain = cached.complete(TAIL, params)
    for _ in range(2):
        hit = cached.complete(TAIL, params, prefix=found)
        assert (hit.tokens, hit.logprobs) == (want.tokens, want.logprobs)
    assert hit.cached_tokens > 0 == plain.cached_tokens
    cached.check()
    with BatchEngine(network, max_running=4, **options) as batch:
        requests = [batch.submit(TAIL, params, prefix=each) for each in (None, found, other, again, None, found)]
        logprobs = [request.completions()[0].logprobs for request in requests]
        batch.check()
    assert logprobs[1] == logprobs[3] == logprobs[5] == want.logprobs
    assert logprobs[0] == logprobs[4] == plain.logprobs != want.logprobs
    assert engine.complete(TAIL, params, prefix=other).logprobs == logprobs[2] != want.logprobs


@pytest.mark.parametrize("own", ["f32", "q5"])
def test_another_format_rounds_what_the_engine_has(network, tmp_path, own):
    """From any format into any other: as a cache of it stores these rows, in memory and in a file."""
    engine, policy = InferenceEngine(network, dtype=own), SnapKV(8, per_head=True)
    exact = engine.compress(TOKENS, policy, ratio=0.3, dtype="f32")
    rows = [exact.cache.read(i, i) for i in range(exact.cache.num_layers)]
    for name in FORMATS:
        found = engine.compress(TOKENS, policy, ratio=0.3, dtype=name)
        assert positions(found, network.config) == positions(exact, network.config)
        found.save(tmp_path / "prefix")
        again = InferenceEngine(network).load_compressed(tmp_path / "prefix")
        assert (again.name, again.nbytes) == (found.name, found.nbytes)
        for i, sides in enumerate(rows):
            plain = PagedKvCache(8, 16, 1, network.config.head_dim, dtype=name)
            plain.allocate(0, len(sides[0]))
            plain.write(0, 0, *sides)
            for want, *got in zip(plain.read(0, 0), found.cache.read(i, i), again.cache.read(i, i), strict=True):
                for each in got:
                    np.testing.assert_array_equal(each, want)
        one, other = (InferenceEngine(network).score(TAIL, prefix=each) for each in (found, again))
        np.testing.assert_array_equal(one, other)


def test_cached_blocks_are_those_behind_one_prefix(network, prefix):
    cached = PrefixCachedEngine(InferenceEngine(network), 32)
    shorter = cached.inner.compress(TOKENS, kvzip(), ratio=0.2)
    assert shorter.name != prefix.name
    for each, hits in ((None, 0), (prefix, 0), (shorter, 0), (prefix, 16)):
        assert cached.complete(TAIL, GREEDY, prefix=each).cached_tokens == hits
    assert cached.complete(TAIL, GREEDY, prefix=prefix, namespace="another").cached_tokens == 0


@needs_posix
def test_blocks_behind_it_are_saved_and_in_tiers(network, prefix, tmp_path):
    cached = PrefixCachedEngine(InferenceEngine(network), 32, autosave=tmp_path / "tier")
    long = np.resize(TAIL, 150)
    want = cached.complete(long, GREEDY, prefix=prefix)
    assert cached.close()
    cached.save(tmp_path / "blocks")
    loaded = PrefixCachedEngine(InferenceEngine(network), 32)
    loaded.load(tmp_path / "blocks")
    with PrefixCachedEngine(InferenceEngine(network), 32, autosave=tmp_path / "tier") as tiered:
        for engine, hits in ((loaded, 144), (tiered, 128)):
            found = engine.complete(long, GREEDY, prefix=prefix)
            assert (found.tokens, found.cached_tokens) == (want.tokens, hits)
            assert engine.complete(long, GREEDY).cached_tokens == 0


def test_a_preempted_request_goes_on_behind_its_prefix(network, prefix):
    params = GREEDY.changed({"max_tokens": 40})
    want = InferenceEngine(network).generate(TAIL, params, prefix=prefix)
    batch = BatchEngine(network, num_blocks=7, block_size=16, max_running=4, clock=Clock())  # no thread
    requests = [batch.submit(TAIL, params, prefix=prefix, namespace=i) for i in range(3)]
    assert [request.result() for request in requests] == [want] * 3
    assert batch.stats().preemptions > 0


def test_positions_go_on_behind_it(network, prefix):
    engine, count = InferenceEngine(network), len(TOKENS)
    engine.reset(prefix)
    first = engine.prefill_from_pos(TAIL, count)
    with pytest.raises(InvalidOperationError, match="pos: expected 75 or more, behind the prefix, or reset, got 3"):
        engine.prefill_from_pos(TAIL, 3)
    np.testing.assert_array_equal(engine.prefill_from_pos(TAIL, count), first)
    engine.decode_step(5, count + len(TAIL))
    assert engine.num_tokens == count + len(TAIL) + 1
    engine.check()
    most = engine.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"positions below max_position_embeddings .{most}.*from position 75"):
        engine.generate(np.ones(most - count + 1, int), prefix=prefix)
    params, longest = GREEDY.changed({"ignore_eos": True}), np.ones(most - count - 2, int)
    assert len(engine.generate(longest, params, prefix=prefix)) == 3
    with BatchEngine(network) as batch:
        assert len(batch.submit(longest, params, prefix=prefix).result()) == 3
    engine.reset()
    assert engine.prefill_from_pos(TAIL, 0).shape == first.shape


def test_refusals(network, prefix, tmp_path):
    engine, evicts = InferenceEngine(network), InferenceEngine(network, eviction_policy=TOVA(), kv_budget=9)
    sparse = InferenceEngine(network, sparse_tokens=16)
    for call, error, message in [
        (lambda: engine.compress(TOKENS, KVzip()), ValueError, "policy: expected one with token ids"),
        (lambda: engine.compress(TOKENS, KVzip), TypeError, "policy: expected an object with `keep` or `probes`"),
        (lambda: engine.compress(TOKENS, kvzip(), ratio=0.0), ValueError, "ratio: expected a finite number above 0"),
        (lambda: engine.compress([], kvzip()), ValueError, "tokens: expected at least one"),
        (lambda: evicts.compress(TOKENS, kvzip()), ValueError, "engine: expected none with an eviction_policy"),
        (lambda: sparse.compress(TOKENS, kvzip()), ValueError, "engine: expected none with sparse_tokens, got 16"),
        (lambda: sparse.generate(TAIL, prefix=prefix), ValueError, "prefix: expected None with sparse_tokens"),
        (lambda: evicts.generate(TAIL, prefix=prefix), ValueError, "prefix: expected None with an eviction_policy"),
        (lambda: engine.generate(TAIL, prefix="x"), TypeError, "prefix: expected a CompressedPrefix, got str"),
        (lambda: InferenceEngine(network, eviction_policy=kvzip(), kv_budget=9), TypeError, "an object with `keep`"),
        (lambda: InferenceEngine(network, num_blocks=6).compress(TOKENS, kvzip()), OutOfMemoryError, None),
    ]:
        with pytest.raises(error, match=message):
            call()
    other = InferenceEngine(Transformer.from_pretrained(GOLDEN / "qwen2"))
    with pytest.raises(ValueError, match="prefix: expected one of this engine's network"):
        other.generate(TAIL, prefix=prefix)
    windows = InferenceEngine(Transformer.from_pretrained(GOLDEN / "mistral_window"))
    with pytest.raises(ValueError, match="policy: expected none with layers that have a window"):
        windows.compress(TOKENS, kvzip())
    most = network.config.max_position_embeddings
    with pytest.raises(ValueError, match="that ask about them"):
        engine.compress(np.ones(most, int), kvzip())
    prefix.save(tmp_path / "prefix")
    with pytest.raises(SnapshotError, match="expected model"):
        other.load_compressed(tmp_path / "prefix")
    engine.check()
    assert engine.num_tokens == 0


class Wrong:
    """A policy that returns `found`, or raises it."""

    def __init__(self, found, probes=(), sinks=0):
        self.found, self.asked, self.sinks = found, probes, sinks

    def probes(self, tokens, encode):
        return self.asked

    def keep_in_all(self, scores, budget):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(("found", "error", "message"), [
    (3, TypeError, "keep_in_all: expected indices of"), ([[[0]]], ValueError, "keep_in_all: expected indices of"),
    ("most", ValueError, "keep_in_all: expected 1 to"), ("none", ValueError, "keep_in_all: expected 1 to"),
    ("twice", ValueError, r"keep_in_all\[0\]\[0\]: expected ascending"), (KeyError("mine"), KeyError, "mine"),
])
def test_a_wrong_policy_is_told(network, found, error, message):
    config = network.config
    kinds = {"most": list(range(75)), "none": [], "twice": [1, 1]}
    if isinstance(found, str):
        found = [[kinds[found]] * config.num_kv_heads] * config.num_layers
    engine = InferenceEngine(network)
    with pytest.raises(error, match=message):
        engine.compress(TOKENS, Wrong(found), ratio=0.5)
    engine.check()
    assert engine.num_tokens == 0


@pytest.mark.one_build
def test_what_is_wrong_before_the_prefix_runs_leaves_the_text(network):
    engine = InferenceEngine(network)
    engine.prefill_from_pos([5, 6, 7], 0)
    for policy, error, message in [
        (Wrong("", [Probe(0, 9, [10**6])]), ValueError, r"probes\[0\].tokens: expected ids from 0 to 255, got 1000000"),
        (Wrong("", [Probe(0, 9, [3]), Probe(3, 9, [2.5])]), TypeError, r"probes\[1\].tokens: expected integers"),
        (Wrong("", [Probe(0, 9, [])]), ValueError, r"probes\[0\].tokens: expected at least one, got none"),
        (Wrong("", [Probe(9, 76, [3])]), ValueError, r"probes\[0\]: expected a part of 75 tokens, got 9 to 76"),
        (Wrong("", [Probe(9, 9, [3])]), ValueError, r"probes\[0\]: expected a part of 75 tokens, got 9 to 9"),
        (Wrong("", [Probe(-1, 9, [3])]), ValueError, r"probes\[0\].start: expected an int >= 0, got -1"),
        (Wrong("", [(0, 9, [3])]), TypeError, "probes: expected a list of Probe, got"),
        (Wrong("", 7), TypeError, "probes: expected a list of Probe, got 7"),
        (Wrong("", [], -1), ValueError, "sinks: expected an int >= 0, got -1"),
        (KVzip(), ValueError, "policy: expected one with token ids"),
    ]:
        with pytest.raises(error, match=message):
            engine.compress(TOKENS, policy)
    for wrong in ("q9", ("q4", "q8")):
        with pytest.raises(ValueError, match="dtype: expected one"):
            engine.compress(TOKENS, kvzip(), dtype=wrong)
    assert engine.num_tokens == 3
    for words in ([2.5], [-1], [2**32]):
        with pytest.raises((TypeError, ValueError), match="tokens: expected"):
            KVzip(prompt=words)


def test_first_tokens_stay_in_every_head_as_far_as_its_budget_goes(network):
    found = InferenceEngine(network).compress(TOKENS, kvzip(sinks=4), ratio=2 / 75)
    assert positions(found, network.config) == [[[0, 1]] * network.config.num_kv_heads] * network.config.num_layers
    for layer, head in ((network.config.num_layers, 0), (0, -1), (-1, None)):
        with pytest.raises(IndexError, match="expected an int in"):
            found.positions(layer, head)


def test_an_interrupted_call_leaves_nobody_watching(network):
    current = InferenceEngine(network).requests.sequence
    current.forward.watch = lambda *shown: pytest.fail("a later pass was shown")
    current.mend()  # as after an interrupt between any two lines
    current.extend(TAIL, 0)


def test_heads_may_keep_nothing(network):
    config = network.config
    kept = [[[]] * config.num_kv_heads for _ in range(config.num_layers)]
    kept[0][0] = list(range(30))
    engine = InferenceEngine(network)
    found = engine.compress(TOKENS, Wrong(kept), ratio=0.9)
    twin = DensePrefix(network, TOKENS)
    twin.kept = [[np.array(each, int) for each in layer] for layer in kept]
    engine.reset(found)
    np.testing.assert_allclose(engine.prefill_from_pos(TAIL, len(TOKENS)), twin.run(TAIL)[-1], atol=2e-4)


def test_a_prefix_of_other_bits(network, prefix, tmp_path):
    """It is taken when asked for; texts behind it are named by its K and V, so that their blocks are shared."""
    path, engine = tmp_path / "prefix", PrefixCachedEngine(InferenceEngine(network), 32)
    prefix.save(path)
    want = engine.complete(TAIL, GREEDY, prefix=prefix)
    for version, found in ((1, "version 1"), (0, "no version")):
        set_bits(path, version)
        with pytest.raises(SnapshotError, match=f"expected bits of version {BITS_VERSION}, got {found}"):
            engine.inner.load_compressed(path)
        loaded = engine.inner.load_compressed(path, exact=False)
        assert (prefix.exact, loaded.exact, loaded.name) == (True, False, prefix.name)
        answer = engine.complete(TAIL, GREEDY, prefix=loaded)
        assert (answer.tokens, answer.cached_tokens) == (want.tokens, 16)
        assert engine.cache_stats().exact
        loaded.save(path)
        with pytest.raises(SnapshotError, match=f"expected bits of version {BITS_VERSION}, got no version"):
            CompressedPrefix.load(path, network)
    prefix.save(path)
    assert engine.inner.load_compressed(path, exact=False).exact


def test_damaged_and_invented_files_are_refused(network, prefix, tmp_path, rng):
    path = tmp_path / "prefix"
    prefix.save(path)
    whole = path.read_bytes()
    for at in rng.integers(0, len(whole), 25).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            assert CompressedPrefix.load(path, network).name == prefix.name  # a byte that aligns pages
        except SnapshotError as error:
            assert re.match(re.escape(str(path)), str(error))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SnapshotError):
        CompressedPrefix.load(path, network)
    PrefixCachedEngine(InferenceEngine(network), 8).save(path)
    with pytest.raises(SnapshotError, match="expected saved prefix, got blocks"):
        CompressedPrefix.load(path, network)
