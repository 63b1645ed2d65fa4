"""Requests with adapters: each gives what it gives alone, shares prefixes with its like alone, and ends by name."""

from __future__ import annotations

import re
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pytest
from event_reader import Reader
from next_layers import with_next_layer
from places import GOLDEN
from posix_modules import needs_posix
from random_adapters import random_adapter
from seeded_weights import golden_folder
from serving import GREEDY, Clock, prompts, repeating, run, same, sampled, settled

from kvcache import BatchEngine, PrefixCachedEngine
from kvcache.engine import InferenceEngine, Transformer
from kvcache.errors import InvalidOperationError
from kvcache.policies import ExpectedAttention
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.saved.namespaces import encode_namespace
from kvcache.texts.behind import space_behind
from kvcache.texts.text_adapter import is_adapted

pytestmark = pytest.mark.one_build

BOTH = KvEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
INVOCATION = (7, 8)
STEM = np.random.default_rng(1).integers(10, 90, 50).tolist()


def adapters_of(model, **more):
    made = {name: random_adapter(model.config, seed, 2 + 3 * seed, name=name) for seed, name in enumerate("abc")}
    return made | {"late": random_adapter(model.config, 5, invocation=INVOCATION, name="late")} | more


def alone(model, adapters, asked, **options):
    """The answers of requests `(prompt, adapter, params)` one by one, without a prefix cache."""
    engine = InferenceEngine(model, adapters=adapters, **options)
    return [engine.complete(prompt, params, adapter=name) for prompt, name, params in asked]


def mixed(model, count=12, longest=40, seed=3):
    """Requests of one stem and others, with and without adapters; those with the activated one invoke it."""
    rng, vocabulary = np.random.default_rng(seed), model.config.vocab_size
    params = [GREEDY, sampled(3, 10, logprobs=2), repeating(4, 20, logprobs=0), repeating(5, 14)]
    names, found = [None, "a", "late", "b", "c", "late", "a", None], []
    for i, prompt in enumerate(prompts(seed, count, longest, vocabulary)):
        name, tokens = names[i % len(names)], prompt.tolist()
        if name == "late":
            at = int(rng.integers(len(tokens) + 1))
            tokens[at:at] = INVOCATION
        found.append((tokens, name, params[i % len(params)]))
    return found


NETWORKS = {
    "llama": lambda: Transformer.from_pretrained(GOLDEN / "llama"),
    "q4": lambda: Transformer.from_pretrained(GOLDEN / "qwen2", weights="q4"),
    "windows": lambda: Transformer.from_pretrained(GOLDEN / "gemma3"),
    "regimes": lambda: Transformer.from_pretrained(GOLDEN / "phi3_longrope"),
    "states": lambda: Transformer.from_pretrained(golden_folder("qwen3_5")),
    "paired": lambda: Transformer.from_pretrained(golden_folder("falcon_h1")),
    "experts": lambda: Transformer.from_pretrained(GOLDEN / "mixtral"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_gives_what_it_gives_alone(name):
    """Beside others with other adapters and without, on hits, after preemptions and with draft tokens."""
    model = NETWORKS[name]()
    adapters, asked = adapters_of(model), mixed(model)
    want = alone(model, adapters, asked)
    for options in ({"num_blocks": 300}, {"num_blocks": 16, "block_size": 8}, {"num_blocks": 40, "draft": None}):
        engine = BatchEngine(model, adapters=adapters, clock=Clock(), **options)
        for _ in range(2):
            requests = [engine.submit(prompt, params, adapter=adapter) for prompt, adapter, params in asked]
            run(engine)
            for request, each in zip(requests, want, strict=True):
                same(request.completions()[0], each)
        settled(engine)
        if options["num_blocks"] == 300:
            assert engine.cache_stats().hit_tokens
            assert engine.stats().accepted_tokens
    cached = PrefixCachedEngine(InferenceEngine(model, adapters=adapters), 200)
    for _ in range(2):
        for (prompt, adapter, params), each in zip(asked, want, strict=True):
            same(cached.complete(prompt, params, adapter=adapter), each)
            cached.check()
    assert [answer.tokens != plain.tokens for answer, plain in zip(
        want, alone(model, {}, [(prompt, None, params) for prompt, _, params in asked]), strict=True
    )].count(True) > 4


@pytest.mark.parametrize("options", [{"dtype": "q4", "rotate": True}, {"dtype": "q4", "residual_length": 16}])
def test_stored_in_codes(network, options):
    adapters, asked = adapters_of(network), mixed(network, 8)
    engine = BatchEngine(network, adapters=adapters, num_blocks=100, **options)
    for _ in range(2):
        requests = [engine.submit(prompt, params, adapter=adapter) for prompt, adapter, params in asked]
        run(engine)
        for request, want in zip(requests, alone(network, adapters, asked, **options), strict=True):
            same(request.completions()[0], want)


def test_with_an_mtp_layer_and_with_a_network_that_drafts(network, tmp_path):
    """An MTP layer reads hidden rows that adapters have changed; a drafting network has none of them."""
    model = Transformer.from_pretrained(with_next_layer("glm4_moe", tmp_path / "made"), draft_layer=True)
    for network_, draft in ((model, "mtp"), (network, Transformer.from_pretrained(GOLDEN / "llama"))):
        adapters, asked = adapters_of(network_), mixed(network_, 8)
        engine = BatchEngine(network_, adapters=adapters, num_blocks=100, draft=draft)
        requests = [engine.submit(prompt, params, adapter=adapter) for prompt, adapter, params in asked]
        run(engine)
        for request, want in zip(requests, alone(network_, adapters, asked), strict=True):
            same(request.completions()[0], want)


def test_step_by_step_in_pieces_and_scores(network):
    adapters = adapters_of(network)
    engine = InferenceEngine(network, adapters=adapters, prefill_chunk=16)
    tokens = np.array([*STEM, *INVOCATION, *STEM[:9]], np.uint32)
    for name in ("a", "late"):
        whole = InferenceEngine(network, adapters=adapters).score(tokens, adapter=name)
        np.testing.assert_array_equal(engine.score(tokens, adapter=name), whole)
        assert (engine.score(tokens) != whole).any()
        first = engine.complete(tokens, GREEDY, adapter=name).tokens
        assert list(engine.stream(tokens, GREEDY, adapter=name)) == first
        assert engine.generate(tokens, GREEDY, adapter=name) == first
    engine.reset(adapter="b")
    logits = [engine.prefill_from_pos(tokens[:20], 0), engine.prefill_from_pos(tokens[20:], 20)][1]
    want = InferenceEngine(network, adapters=adapters)
    want.reset(adapter="b")
    np.testing.assert_array_equal(logits, want.prefill_from_pos(tokens, 0))
    engine.reset()
    assert (engine.prefill_from_pos(tokens, 0) != logits).any()
    with pytest.raises(ValueError, match="prompt: expected one with the invocation tokens"):
        engine.reset(adapter="late")
    evicts = {"eviction_policy": ExpectedAttention(), "kv_budget": 24}
    evicting = InferenceEngine(network, adapters=adapters, **evicts)
    batch = BatchEngine(network, adapters=adapters, num_blocks=300, **evicts)
    requests = [batch.submit(tokens, GREEDY, adapter=name) for name in ("a", None, "late")]
    run(batch)
    for request, name in zip(requests, ("a", None, "late"), strict=True):
        assert request.result() == evicting.generate(tokens, GREEDY, adapter=name)


def hits(engine, prompt, **options):
    return engine.complete(prompt, GREEDY, **options).cached_tokens


def test_prefixes_are_shared_by_the_numbers_of_an_adapter(network, tmp_path):
    """Not by its name: a reload of the same name finds nothing of the old one; the old numbers find their own again."""
    adapters = adapters_of(network)
    engine = PrefixCachedEngine(InferenceEngine(network, adapters=adapters), 200)
    prompt = STEM[:48]
    assert [hits(engine, prompt, adapter=name) for name in (None, "a", "b", "a", None, "b")] == [0, 0, 0, 48, 48, 48]
    assert hits(engine, prompt, adapter="a", namespace="other") == 0
    engine.load_adapter("a", random_adapter(network.config, 9))
    want = alone(network, {"a": engine.adapters["a"]}, [(prompt, "a", GREEDY)])[0]
    assert engine.complete(prompt, GREEDY, adapter="a").tokens == want.tokens
    engine.clear_cache()
    hits(engine, prompt, adapter="b")
    engine.load_adapter("a", adapters["b"])
    assert hits(engine, prompt, adapter="a") == 48
    engine.save(tmp_path / "cache")
    later = BatchEngine(network, adapters=adapters, num_blocks=200)
    later.load(tmp_path / "cache")
    found = {}
    for name in ("a", "b", None):
        later.submit(prompt, GREEDY, adapter=name, namespace=f"of {name}").result()
        request = later.submit(prompt, GREEDY, adapter=name)
        request.result()
        found[name] = request.metrics.cached_tokens
    assert found == {"a": 0, "b": 47, None: 0}
    counts = later.namespace_stats()
    assert {*counts} == {None, "of a", "of b", "of None"}
    assert not any(is_adapted(name) for name in counts)
    assert counts["of a"].cached_tokens == 48


def test_no_namespace_of_a_caller_is_that_of_an_adapter_or_of_a_prefix(network):
    engine, cached = BatchEngine(network, num_blocks=20), PrefixCachedEngine(InferenceEngine(network), 20)
    calls = [
        partial(engine.submit, STEM), partial(engine.generate_batch, [STEM]), partial(engine.prepare, [STEM]),
        partial(engine.hint, "pin", STEM), partial(cached.generate, STEM), partial(cached.stream, STEM),
        partial(cached.complete, STEM), partial(cached.prepare, [STEM]), partial(cached.hint, "release", STEM),
    ]
    for name in (("with an adapter", b"", None), space_behind(b"", None), space_behind(b"", None, parts=True)):
        for call in calls:
            with pytest.raises(ValueError, match="namespace: expected none that a prefix or an adapter names"):
                call(namespace=name)


def test_an_activated_adapter_shares_what_is_before_its_invocation(network):
    """With the network alone, both ways; what is behind it is not cached."""
    adapters = adapters_of(network)
    prompt = [*STEM, *INVOCATION, *STEM[:20]]
    for first, second in ((None, "late"), ("late", None), ("late", "late")):
        engine = PrefixCachedEngine(InferenceEngine(network, adapters=adapters), 200)
        batch = BatchEngine(network, adapters=adapters, num_blocks=200)
        for name, found in ((first, 0), (second, 50 if first is None else 48)):
            want = alone(network, adapters, [(prompt, name, GREEDY)])[0]
            answer = engine.complete(prompt, GREEDY, adapter=name)
            assert (answer.tokens, answer.cached_tokens) == (want.tokens, found)
            request = batch.submit(prompt, GREEDY, adapter=name)
            assert request.result() == want.tokens
            assert request.metrics.cached_tokens == found
            settled(batch)
    twice = [*INVOCATION, *prompt]  # the last invocation counts
    assert hits(engine, twice, adapter="late") == 0
    assert hits(engine, twice, adapter="late") == 48
    with pytest.raises(ValueError, match=re.escape("expected one with the invocation tokens [7, 8] of adapter 'late'")):
        batch.submit(STEM, adapter="late")


def test_events_tell_blocks_with_an_adapter_apart(network):
    adapters = adapters_of(network)
    engine = BatchEngine(network, adapters=adapters, num_blocks=200, kv_events=BOTH)
    with Reader(engine.kv_events) as reader:
        for name in (None, "a", "b", "late"):
            engine.submit([*STEM, *INVOCATION], GREEDY, adapter=name, namespace="mine").result()
        reader.read_until(
            engine._pool.prefixes[0],
            lambda space: blake2b(encode_namespace(space), digest_size=16).hexdigest() if is_adapted(space) else space,
        )
        salts = {salt for salt, _ in reader.mirror.texts()}
    assert "mine" in salts
    assert len(salts) == 3


def test_unloading_ends_the_requests_of_that_adapter_alone(network):
    adapters = adapters_of(network)
    engine = BatchEngine(network, adapters=adapters, num_blocks=200, max_running=4)
    long = sampled(1, 30)
    names = ["a", None, "b", "a", "a", None]
    requests = [engine.submit(STEM, long, adapter=name) for name in names]
    for _ in range(4):
        engine.step()
    assert [request.metrics.queued is not None for request in requests] == [True] * 4 + [False] * 2
    engine.unload_adapter("a")
    message = "adapter: expected one that is loaded, got 'a', which was unloaded"
    for request, name in zip(requests, names, strict=True):
        assert request.is_finished == (name == "a")
        if name == "a":
            with pytest.raises(InvalidOperationError, match=message):
                request.result()
    run(engine)
    for request, name in zip(requests, names, strict=True):
        if name != "a":
            assert request.result() == alone(network, adapters, [(STEM, name, long)])[0].tokens
    settled(engine)
    with pytest.raises(ValueError, match=re.escape("adapter: expected one of ['b', 'c', 'late'], got 'a'")):
        engine.submit(STEM, adapter="a")
    with pytest.raises(ValueError, match="adapter: expected one of"):
        engine.unload_adapter("a")
    engine.load_adapter("a", adapters["c"])
    assert engine.submit(STEM, GREEDY, adapter="a").result() == engine.submit(STEM, GREEDY, adapter="c").result()


def test_a_reload_leaves_running_requests_their_own(network):
    adapters = adapters_of(network)
    engine = BatchEngine(network, adapters=adapters, num_blocks=200)
    long = sampled(2, 20)
    first = engine.submit(STEM, long, adapter="a")
    engine.step()
    engine.step()
    engine.load_adapter("a", adapters["b"])
    second = engine.submit(STEM, long, adapter="a")
    run(engine)
    want = alone(network, adapters, [(STEM, "a", long), (STEM, "b", long)])
    assert [first.result(), second.result()] == [each.tokens for each in want]
    third = engine.submit(STEM, long, adapter="a")
    engine.step()
    engine.load_adapter("a", adapters["c"])
    engine.unload_adapter("a")  # and what it had replaced
    assert third.is_finished


def test_a_stream_whose_adapter_is_unloaded(network):
    adapters = adapters_of(network)
    plain = InferenceEngine(network, adapters=adapters)
    for engine in (plain, PrefixCachedEngine(InferenceEngine(network, adapters=adapters), 100)):
        stream = engine.stream(STEM, sampled(3, 30), adapter="a")
        found = [next(stream) for _ in range(3)]
        assert found == alone(network, adapters, [(STEM, "a", sampled(3, 30))])[0].tokens[:3]
        engine.unload_adapter("a")
        with pytest.raises(InvalidOperationError, match="adapter: expected one that is loaded, got 'a'"):
            list(stream)
        engine.check()
        assert engine.complete(STEM, GREEDY).tokens == InferenceEngine(network).complete(STEM, GREEDY).tokens


def test_what_is_refused(network):
    adapters = adapters_of(network)
    engine = InferenceEngine(network, adapters=adapters)
    prefix = engine.compress(STEM, ExpectedAttention(per_head=True))
    batch = BatchEngine(network, adapters=adapters, num_blocks=100)
    cached = PrefixCachedEngine(engine, 100)
    for call in (engine.complete, engine.generate, engine.stream, cached.complete, cached.generate, batch.submit):
        for name in ("d", 5, ""):
            with pytest.raises(ValueError, match=re.escape("adapter: expected one of ['a', 'b', 'c', 'late'], got")):
                call(STEM, adapter=name)
        with pytest.raises(ValueError, match="prefix: expected None with an adapter"):
            call(STEM, adapter="a", prefix=prefix)
    other = Transformer.from_pretrained(GOLDEN / "gemma2")
    with pytest.raises(ValueError, match="a: layer 0, q: expected matrices for"):
        InferenceEngine(other, adapters={"mine": adapters["a"]})
    for given in ([adapters["a"]], {"mine": 5}):
        with pytest.raises(TypeError, match=r"adapters?: expected"):
            InferenceEngine(network, adapters=given)
    for name in ("", 5):
        with pytest.raises((TypeError, ValueError), match="name: expected"):
            engine.load_adapter(name, adapters["a"])
    assert [*engine.adapters] == ["a", "b", "c", "late"]
    assert engine.memory()["weights"] > InferenceEngine(network).memory()["weights"]
    own = SimpleNamespace(config=network.config, forward=network.forward)
    with pytest.raises(TypeError, match="adapters: expected a network with prepare_adapter, got SimpleNamespace"):
        InferenceEngine(own, adapters=adapters)


def test_samples_pins_and_scores_of_prompts(network):
    """Samples fork the sequence of the first; a pin holds what its adapter computed; scores are those of `score`."""
    adapters = adapters_of(network)
    prompt, plain = [*STEM, *INVOCATION, *STEM[:25]], InferenceEngine(network, adapters=adapters)
    engine = BatchEngine(network, adapters=adapters, num_blocks=100, clock=Clock())
    for name in ("a", "late", None):
        scored = engine.submit(prompt, GREEDY, adapter=name, prompt_logprobs=0, max_tokens=0)
        run(engine)
        found = [each.logprob for each in scored.prompt_logprobs[1:]]
        np.testing.assert_allclose(found, plain.score(prompt, adapter=name), atol=1e-6)
        several = engine.submit(prompt, sampled(5), adapter=name, n=3)
        run(engine)
        for i, answer in enumerate(several.completions()):
            same(answer, plain.complete(prompt, sampled(5 + i), adapter=name))
        engine.clear_cache()
        kept = engine.submit(prompt, GREEDY, adapter=name, keep=60, max_tokens=0)
        run(engine)
        assert kept.result() == []
        for seed in range(12):  # others would push it out
            engine.submit(np.random.default_rng(seed).integers(10, 90, 150), GREEDY).result()
        engine.check()
        request = engine.submit(prompt, GREEDY, adapter=name)
        assert request.result() == plain.generate(prompt, GREEDY, adapter=name)
        assert request.metrics.cached_tokens == (50 if name == "late" else 64)
        engine.clear_cache()


@needs_posix
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_tiers_name_values_by_the_adapter(name, tmp_path):
    """A later engine finds what the same numbers have computed, and nothing of others; also windows and states."""
    model = Transformer.from_pretrained(golden_folder(name))
    adapters = adapters_of(model)
    stem = np.random.default_rng(4).integers(10, 90, 150).tolist()
    prompt = [*stem, *INVOCATION, *stem[:60]]
    asked = [(prompt, adapter, GREEDY) for adapter in ("a", "late", None, "b")]
    wanted = alone(model, adapters, asked)
    for turn in range(2):
        for (tokens, adapter, params), want in zip(asked, wanted, strict=True):
            engine = PrefixCachedEngine(InferenceEngine(model, adapters=adapters), 200, autosave=tmp_path)
            engine.tiers.head_start = 60  # or a short prompt would have run before its values are read
            answer = engine.complete(tokens, params, adapter=adapter)
            same(answer, want)
            # What is before the invocation is that of the network alone, in whole groups of 64 tokens.
            assert answer.cached_tokens == ((192, 128)[adapter == "late"] if turn else 128 * (adapter is None))
            assert engine.close()
    with BatchEngine(model, adapters=adapters, num_blocks=300, autosave=tmp_path) as engine:
        engine.tiers.head_start = 60
        for (tokens, adapter, params), want in zip(asked, wanted, strict=True):
            assert engine.submit(tokens, params, adapter=adapter).result() == want.tokens


def test_hints_are_about_the_texts_of_their_adapter(network):
    """They find, pin and forget the text with that adapter, not another one of the same tokens."""
    adapters = adapters_of(network)
    engine = BatchEngine(network, num_blocks=60, block_size=8, adapters=adapters)
    for name in (None, "a"):
        engine.submit(STEM, GREEDY, adapter=name, max_tokens=1)
    run(engine)
    found = {name: engine.hint("pin", STEM, adapter=name).tokens_found for name in (None, "a", "b", "late")}
    assert found == {None: 48, "a": 48, "b": 0, "late": 48}
    assert engine.hint("release", STEM, adapter="a").tokens_found == 48
    run(engine)
    assert [engine.hint("demote", STEM, adapter=name).tokens_found for name in (None, "a")] == [48, 0]
    for call in (engine.hint, PrefixCachedEngine(InferenceEngine(network, adapters=adapters), 40).hint):
        with pytest.raises(ValueError, match="adapter: expected one of"):
            call("release", STEM, adapter="none")
    cached = PrefixCachedEngine(InferenceEngine(network, adapters=adapters), 40)
    for name in ("a", "b"):
        cached.generate(STEM, GREEDY, adapter=name, max_tokens=1)
    assert cached.hint("release", STEM, adapter="a").tokens_found == 48
    assert [cached.hint("demote", STEM, adapter=name).tokens_found for name in "ab"] == [0, 48]
