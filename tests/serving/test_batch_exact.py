"""A request in a batch gives what it gives alone, bit for bit: on every network, in every format, however it ran."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pace import half
from places import GOLDEN
from recording_network import RecordingNetwork
from seeded_weights import golden_folder
from serving import GREEDY, Alone, Clock, penalised, prompts, repeating, run, same, sampled, settled
from windowed_networks import KINDS, Windowed

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.demo import DIRECTORY
from kvcache.engine import Transformer
from kvcache.networks.protocols import LayerAttention

pytestmark = pytest.mark.one_build

NETWORKS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
FORMATS = ("f32", "f16", "q8", "q4", "q2")  # the last two with a residual
MIXED = [GREEDY, sampled(3), sampled(4, 12, logprobs=2), SamplingParams(temperature=0.0, max_tokens=30, logprobs=0)]


def all_of(model, asked, blocks, **options):
    """Run all requests at once and compare each with itself alone."""
    alone = Alone(model, **options)
    engine = BatchEngine(model, num_blocks=blocks, clock=Clock(), **options)
    assert engine.residual_length == alone.texts.cache.residual_length
    requests = [engine.submit(prompt, params) for prompt, params in asked]
    run(engine)
    for request, (prompt, params) in zip(requests, asked, strict=True):
        same(request.completions()[0], alone(prompt, params))
    settled(engine)
    return engine.stats()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name):
    model = Transformer.from_pretrained(GOLDEN / name)
    asked = list(zip(prompts(1, 12, 40, model.config.vocab_size), MIXED * 3, strict=True))
    all_of(model, asked, 200)


def test_texts_of_a_least_length_and_without_an_end(network):
    """Beside each other, with guesses and preemptions; 9 of 10 tokens end a text that may end."""
    ends = tuple(token for token in range(network.config.vocab_size) if token % 10)
    asked = [
        (prompt, sampled(i, 40, min_tokens=least, stop_token_ids=ends))
        for i, (prompt, least) in enumerate(zip(prompts(31, 10, 60), (0, 1, 7, 30, 40) * 2, strict=True))
    ]
    all_of(network, asked, 16, block_size=8)
    engine = BatchEngine(network, num_blocks=100)
    found = [engine.submit(prompt, params).result() for prompt, params in asked]
    assert all(len(tokens) >= params.min_tokens for tokens, (_, params) in zip(found, asked, strict=True))
    assert all(token % 10 == 0 for tokens, (_, params) in zip(found, asked, strict=True) for token in tokens)
    assert any(len(tokens) > params.min_tokens for tokens, (_, params) in zip(found, asked, strict=True))
    assert min(map(len, found)) < 10
    end = 7
    ending = SimpleNamespace(config=replace(network.config, eos_token_ids=(end,)), forward=network.forward)
    engine = BatchEngine(ending, num_blocks=100)
    likely = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={end: 1e6})
    assert engine.submit([5, 6], likely).result() == []
    assert engine.submit([5, 6], likely, ignore_eos=True).result() == [end] * 9
    assert engine.submit([5, 6], likely, ignore_eos=True, stop_token_ids=(end,)).result() == []
    assert end not in engine.submit([5, 6], likely, min_tokens=9).result()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_format_and_little_memory(network, dtype):
    """Requests that grow far beyond their prompts, in a pool that holds few of them."""
    asked = [(prompt, sampled(i, 40, logprobs=1)) for i, prompt in enumerate(prompts(2, 10, 60))]
    stats = all_of(network, asked, 16, dtype=dtype, block_size=8, residual_length=0)
    assert stats.preemptions > 0, "nothing was preempted"
    assert stats.cached_tokens > 0, "nothing was shared"


@pytest.mark.parametrize(
    ("dtype", "length"), [*(("q4", length) for length in (0, 1, 5, 12, 64)), ("f32", 12), ("q8", 0), ("q8", 12)]
)
def test_every_length_of_groups(network, dtype, length):
    """Requests that share prefixes of whole groups and of parts of them, with guesses and preemptions."""
    asked = [(prompt, repeating(i, 40, logprobs=1)) for i, prompt in enumerate(prompts(12, 9, 90))]
    stats = all_of(network, asked, 14, dtype=dtype, residual_length=length)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0
    assert length == 64 or stats.cached_tokens > 0
    all_of(network, asked, 90, dtype=dtype, residual_length=length, block_size=6)


@pytest.mark.parametrize("weights", ["f16", "q8", "q4"])
def test_packed_weights(weights):
    model = Transformer.from_pretrained(GOLDEN / "llama", weights=weights)
    all_of(model, list(zip(prompts(3, 12, 50), MIXED * 3, strict=True)), 40, dtype="q8")


def test_a_text_that_enters_another_regime():
    """It runs again from its start, and its prefixes are those of the new regime."""
    model = Transformer.from_pretrained(GOLDEN / "phi3_longrope")
    border = next(n for n in range(model.config.max_position_embeddings) if model.regime(n + 1))
    rng = np.random.default_rng(4)
    text = rng.integers(0, model.config.vocab_size, border + 20).astype(np.uint32)
    asked = [(text[: border + offset], sampled(7, 12, logprobs=1)) for offset in (-20, -6, -5, -1, 0, 1, 9)]
    all_of(model, asked, 200)
    all_of(model, asked[1:3], 200)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_windows(kind):
    """The attention of every query is that of the engine alone."""
    text = np.random.default_rng(5).integers(0, 50, 150)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    outputs = []
    for make in (InferenceEngine, BatchEngine):
        model = RecordingNetwork(KINDS[kind])
        model.expect(text, None)
        engine = make(model, num_blocks=40)
        answer = engine.generate(text, params) if make is InferenceEngine else engine.submit(text, params).result()
        outputs.append((answer, {key: row.tobytes() for key, row in model.outputs.items()}))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    half([("gemma3", "f32"), ("gemma3", "q4"), ("qwen2_windows", "q4"), ("mistral_window", "f32"), ("gemma4", "q4"),
          ("gemma4_experts", "f32"), ("llama4", "q4"), ("gemma3n", "q8")]),
)
def test_windows_and_little_memory(name, dtype):
    """Texts share prefixes, grow past their windows, guess, are preempted, and continue at cached windows."""
    model = Transformer.from_pretrained(golden_folder(name))
    made = prompts(15, 9, 60, model.config.vocab_size)
    asked = [(prompt, repeating(i, 60, logprobs=1)) for i, prompt in enumerate(made)]
    stats = all_of(model, asked, 18, dtype=dtype, block_size=8)
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.accepted_tokens > 0


def test_a_window_that_has_left_is_a_miss_that_says_so(network):
    """Two texts part where the window has left: the second one runs from its start, and the window stays cached."""
    engine, alone = BatchEngine(Windowed(network, 12), num_blocks=80), Alone(Windowed(network, 12))
    text = np.random.default_rng(16).integers(0, 250, 200).astype(np.uint32)
    cached = []
    for i in range(3):
        prompt = np.concatenate([text[: 96 if i else 200], np.array([i, 7, 7], np.uint32)])
        request = engine.submit(prompt, sampled(i))
        same(request.completions()[0], alone(prompt, sampled(i)))
        cached.append(request.metrics.cached_tokens)
    assert cached == [0, 0, 96]
    stats = engine.cache_stats()
    assert stats.miss_reasons["window"] == 1
    assert stats.hit_tokens == 96
    settled(engine)


def test_twins_wait_for_a_window():
    """Requests that share a prefix, at once: it runs once, and its window is there for those that waited for it."""
    model = RecordingNetwork(KINDS["longer"])
    engine, shared = BatchEngine(model, num_blocks=200), np.arange(300) % 41
    requests = [engine.submit([*shared, 42, i, 3], sampled(i)) for i in range(5)]
    run(engine)
    assert [request.metrics.cached_tokens for request in requests] == [0] + [288] * 4
    assert engine.cache_stats().miss_reasons["window"] == 0


def test_the_memory_of_windows():
    """Five of six layers have a window of 512: at 32,768 tokens for each of four texts, 0.25 of keeping all."""

    class Wide:
        config = SimpleNamespace(
            num_layers=6, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=9, max_position_embeddings=32768
        )

        def __init__(self, attention):
            self.attention = attention

        def forward(self, tokens, positions, attend, logits):
            rows = np.ones((len(tokens), 1, 8), np.float32)
            for layer in range(6):
                attend(layer, rows, rows, rows)
            return np.ones(({"last": 1, "all": len(tokens), "none": 0}[logits], 9), np.float32)

    model, whole = Wide([*[LayerAttention(window=512)] * 5, LayerAttention()]), Wide([LayerAttention()] * 6)
    options = {"dtype": "f16", "max_running": 4, "num_blocks": 4 * 2048}
    engine, whole = BatchEngine(model, **options), BatchEngine(whole, **options)
    assert engine.memory()["kv"] <= 0.25 * whole.memory()["kv"]
    _, windows = engine._pool.groups
    request = engine.submit(np.arange(2000) % 9, SamplingParams(temperature=0.0, max_tokens=30))
    used = []
    while engine.step():
        used.append(windows.cache.used_block_count - windows.pages.idle_blocks)
    assert max(used) <= 2 * 32 + 1, "a window, and the piece of a step"
    assert request.metrics.ttft is not None
    limit = 300 * 2**10
    bounded = BatchEngine(model, dtype="f16", max_running=4, max_memory_bytes=limit)
    assert 0.9 * limit < bounded.memory()["kv"] <= limit
    settled(engine)


def test_saved_windows(network, tmp_path):
    """A file of `PrefixCachedEngine` serves a batch, and the other way round, windows included."""
    model = Windowed(network, 12)
    prompt = np.arange(3, 60).astype(np.uint32)
    want = InferenceEngine(model).generate(prompt, GREEDY)
    single, engine = PrefixCachedEngine(InferenceEngine(model), 20, strict=True), BatchEngine(model, num_blocks=30)
    assert single.generate(prompt, GREEDY) == want
    single.save(tmp_path / "single", "name")
    engine.load(tmp_path / "single", "name")
    request = engine.submit(prompt, GREEDY)
    assert (request.result(), request.metrics.cached_tokens) == (want, 56)
    engine.save(tmp_path / "batch", "name")
    single.clear_cache()
    single.load(tmp_path / "batch", "name")
    answer = single.complete(prompt, GREEDY)
    assert (answer.tokens, answer.cached_tokens) == (want, 57), "its last token ran by itself"


def test_a_network_that_gives_all_rows(network):
    """One without `selects_rows` is asked for all rows, where more than the last one is due."""

    class Plain:
        config = network.config

        def forward(self, tokens, positions, attend, logits):
            assert logits in ("last", "all", "none")
            return network.forward(tokens, positions, attend, logits)

    all_of(Plain(), list(zip(prompts(6, 8, 40), MIXED * 2, strict=True)), 60)


@pytest.mark.parametrize("dtype", FORMATS)
def test_guesses_that_hold_and_others(network, dtype):
    """Greedy and sampled; tokens and log-probabilities are those without guesses, in fewer passes."""
    draws = (repeating, penalised)
    asked = [(prompt, draws[i % 2](i, 60, logprobs=1)) for i, prompt in enumerate(prompts(10, 4, 30))]
    stats = all_of(network, asked, 60, dtype=dtype)
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.steps < 60
    asked = [(prompt, repeating(i, 200, logprobs=1)) for i, prompt in enumerate(prompts(10, 3, 30))]
    assert all_of(network, asked, 40, dtype=dtype, block_size=6).preemptions > 0
    engine = BatchEngine(network, draft=None)
    engine.submit(*asked[0]).result()
    assert engine.stats().draft_tokens == 0


def test_guesses_end_where_the_text_ends():
    """At the last position, after `max_tokens`, at a stop token: no row runs behind it."""
    for most in (1, 2, 7, 40, 400):
        model = RecordingNetwork()
        engine, text = BatchEngine(model, num_blocks=40), [5, 0, 0, 0, 0, 0]
        model.expect(text, None)
        params = SamplingParams(temperature=0.0, max_tokens=most)
        assert engine.submit(text, params).result() == InferenceEngine(RecordingNetwork()).generate(text, params)
        assert max(pos for _, pos in model.outputs) <= min(6 + most, 400) - 1
        assert most < 7 or engine.stats().steps < most
        settled(engine)
    engine = BatchEngine(RecordingNetwork(), num_blocks=40)
    request = engine.submit(text, SamplingParams(temperature=0.0, stop_token_ids=(0,), max_tokens=9))
    assert (request.result(), request.finish_reason) == ([], "stop")
    settled(engine)


def test_scores(network):
    texts = prompts(7, 9, 70)
    alone = InferenceEngine(network, num_blocks=12)
    engine = BatchEngine(network, num_blocks=12)
    engine.submit(texts[0], sampled(1, 20))  # beside a text that is written
    for text, scores in zip(texts, engine.score_batch(texts, progress=False), strict=True):
        assert scores.tobytes() == alone.score(text).tobytes()
    run(engine)
    settled(engine)


def test_samples_are_the_requests_one_after_another(network):
    """Without a seed of their own they have the engine's next numbers; with one, the seeds that follow it."""
    prompt = prompts(8, 1, 40)[0]
    free = SamplingParams(temperature=1.0, top_k=0, max_tokens=9, logprobs=1)
    alone = InferenceEngine(network, seed=5)
    want = [alone.complete(prompt, free) for _ in range(4)]
    engine = BatchEngine(network, seed=5, num_blocks=30)
    request = engine.submit(prompt, free, n=4)
    assert request.result() == [each.tokens for each in want]
    for got, expected in zip(request.completions(), want, strict=True):
        same(got, expected)
    assert engine.stats().prefilled_tokens == len(prompt), "the prompt ran once"
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    seeded = engine.submit(prompt, sampled(20, **penalties), n=3).result()
    assert seeded == [alone.generate(prompt, sampled(20 + i, **penalties)) for i in range(3)]
    settled(engine)


def test_samples_of_a_network_with_regimes():
    """Samples index their blocks under the name that the regime gives, as their leader does."""
    model = Transformer.from_pretrained(GOLDEN / "phi3_longrope")
    engine = BatchEngine(model, num_blocks=60, block_size=4)
    other = engine.submit(np.arange(30), sampled(1, 60))
    samples = engine.submit(np.arange(10), sampled(2, 12), namespace="alice", n=2)
    run(engine)
    alone = InferenceEngine(model)
    assert other.result() == alone.generate(np.arange(30), sampled(1, 60))
    assert samples.result() == [alone.generate(np.arange(10), sampled(2 + i, 12)) for i in range(2)]
    assert set(engine.namespace_stats()) == {None, "alice"}
    settled(engine)


def test_random_numbers_of_requests_that_waited_outside(network):
    """A request that the queue refused has taken none."""
    asked = prompts(16, 8, 20)
    free = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=6)
    alone = InferenceEngine(network, seed=5)
    want = [alone.generate(prompt, free) for prompt in asked]
    for most in (1, 2, 100):
        assert BatchEngine(network, seed=5, max_queue=most).generate_batch(asked, free, progress=False) == want


def test_guesses_that_hold_to_the_end(network):
    """Draft tokens that are drawn count as accepted, also where the text ends with one of them, or after it."""

    def cycle(text, logits):
        logits[3 + (int(text[-1]) - 2) % 4] = 1000.0

    for stops, most in (((6,), 40), ((), 5), ((), 6), ((), 7)):
        engine = BatchEngine(network, num_blocks=20)
        params = SamplingParams(temperature=0.0, max_tokens=most, logits_processor=cycle, stop_token_ids=stops)
        request = engine.submit([3, 4, 5, 6] * 6, params)
        new = request.result()
        assert new == ([3, 4, 5] if stops else ([3, 4, 5, 6] * 2)[:most])
        stats = engine.stats()
        # In each step all guesses hold, and one token is drawn behind them, unless the text ends.
        assert stats.accepted_tokens >= len(new) - stats.steps + bool(stops)
        assert stats.accepted_tokens == request.works[0].drafts.paces[0].accepted


def test_a_stop_string_in_the_text_that_waited():
    """The last token is a part of a character, whose text is known when no token follows."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    part = next(i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]) == "\ufffd")
    params = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={part: 1e6}, stop="\ufffd")
    want = InferenceEngine.from_pretrained(DIRECTORY).complete("import", params)
    got = BatchEngine.from_pretrained(DIRECTORY).submit("import", params).completions()[0]
    assert (got.finish_reason, got.text) == (want.finish_reason, want.text) == ("stop", "")
