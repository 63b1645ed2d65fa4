"""The engine: requests, the step-by-step calls, a user's own network, and what failures leave behind."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from oracle_engine import DenseKvCache, dense_attention

from kvcache.engine import InferenceEngine, SamplingParams, Transformer
from kvcache.errors import CheckpointError, InvalidOperationError, OutOfMemoryError
from kvcache.paged import PagedKvCache

GOLDEN = Path(__file__).parent / "golden"
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=10)
PROMPT = np.arange(3, 40, dtype=np.uint32)


class DenseEngine(InferenceEngine):
    def _make_cache(self, **options):
        return DenseKvCache(**options)


@pytest.fixture(scope="module")
def network():
    return Transformer.from_pretrained(GOLDEN / "llama")


@pytest.fixture(params=[DenseEngine, InferenceEngine])
def make(request, network):
    def make_engine(model=network, **options):
        return request.param(model, **options)

    return make_engine


@pytest.fixture
def engine(make):
    return make()


def state(engine):
    """Everything that a failing call must leave as it was."""
    engine.check()
    cache, seq = engine.cache, engine.seq_id
    held = [np.array(rows) for layer in range(engine.config.num_layers) for rows in read(cache, layer, seq)]
    return engine.num_tokens, engine.prefill_token_count, cache.free_block_count, held


def read(cache, layer, seq):
    if isinstance(cache, DenseKvCache):
        return cache.sequences[seq][layer]
    return cache.read(layer, seq)


def assert_same_state(engine, before):
    now = state(engine)
    assert now[:3] == before[:3]
    for a, b in zip(now[3], before[3], strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- requests


def test_generate_again_gives_the_same(engine):
    first = engine.generate(PROMPT, GREEDY)
    engine.generate(PROMPT[5:], GREEDY)
    assert engine.generate(PROMPT, GREEDY) == first
    assert len(first) == 10
    assert all(type(token) is int for token in first)
    assert engine.prefill_token_count == 37 + 32 + 37
    assert engine.num_tokens == 37 + 9  # the last token was not run
    engine.check()


def test_stream_is_generate(engine):
    assert list(engine.stream(PROMPT, GREEDY)) == engine.generate(PROMPT, GREEDY)


def test_prompt_types(engine):
    expected = engine.generate(PROMPT, GREEDY)
    for prompt in (PROMPT.tolist(), tuple(PROMPT.tolist()), PROMPT.astype(np.int64), range(3, 40)):
        assert engine.generate(prompt, GREEDY) == expected


def test_max_tokens(engine):
    whole = engine.generate(PROMPT, GREEDY)
    for count in (0, 1, 2):
        params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=count)
        assert engine.generate(PROMPT, params) == whole[:count]
        assert engine.num_tokens == len(PROMPT) + max(0, count - 1)


def test_stop_tokens_end_and_are_not_returned(engine):
    whole = engine.generate(PROMPT, GREEDY)
    stop = whole[4]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, stop_token_ids=(stop, 10**9))
    assert engine.generate(PROMPT, params) == whole[: whole.index(stop)]


def test_eos_of_the_checkpoint_stops(tmp_path, network):
    whole = InferenceEngine(network).generate(PROMPT, GREEDY)
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[3]]}))
    assert InferenceEngine.from_pretrained(tmp_path).generate(PROMPT, GREEDY) == whole[: whole.index(whole[3])]


def test_text_ends_where_positions_end(engine):
    limit = engine.config.max_position_embeddings
    prompt = np.arange(limit - 3) % 256
    params = SamplingParams(temperature=0.0, max_tokens=50)
    assert len(engine.generate(prompt, params)) == 4  # three more positions, and what follows the last of them
    assert engine.num_tokens == limit
    assert len(engine.generate(np.arange(limit) % 256, params)) == 1


def test_own_sampling_params_are_the_default(make):
    assert make(sampling_params=GREEDY).generate(PROMPT) == make().generate(PROMPT, GREEDY)


def test_seeds(make):
    params = SamplingParams(temperature=1.5, max_tokens=12)
    one, other = make(seed=1), make(seed=2)
    first, second = one.generate(PROMPT, params), one.generate(PROMPT, params)
    assert first != second  # each request has its own random numbers
    assert first != other.generate(PROMPT, params)  # and each engine
    again = make(seed=1)
    assert [again.generate(PROMPT, params), again.generate(PROMPT, params)] == [first, second]
    fixed = SamplingParams(temperature=1.5, max_tokens=12, seed=5)
    assert one.generate(PROMPT, fixed) == other.generate(PROMPT, fixed) == one.generate(PROMPT, fixed)


def test_seed_is_drawn_when_the_stream_is_asked_for(make):
    """Two streams made in one order and run in the other still have their own seeds."""
    params = SamplingParams(temperature=1.5, max_tokens=6)
    expected = make()
    first, second = expected.generate(PROMPT, params), expected.generate(PROMPT, params)
    engine = make()
    streams = engine.stream(PROMPT, params), engine.stream(PROMPT, params)
    assert list(streams[1]) == second
    assert list(streams[0]) == first


def test_repetition_penalty_counts_the_prompt(engine):
    logits = engine.prefill_from_pos(PROMPT, 0)
    likeliest = int(np.argmax(logits))
    prompt = np.append(PROMPT, likeliest)
    engine.reset()
    favourite = int(np.argmax(engine.prefill_from_pos(prompt, 0)))
    strong = SamplingParams(temperature=0.0, repetition_penalty=1000.0, max_tokens=30)
    new = engine.generate(np.append(prompt, favourite), strong)
    assert len(set(new)) == len(new) == 30
    assert not set(new) & set(prompt.tolist())


# ---------------------------------------------------------------- step by step


def test_steps_agree_with_whole_prompts(engine):
    whole = engine.prefill_from_pos(PROMPT, 0)
    engine.reset()
    assert engine.num_tokens == 0
    engine.prefill_from_pos(PROMPT[:20], 0)
    for pos in range(20, 36):
        engine.decode_step(int(PROMPT[pos]), pos)
    last = engine.prefill_from_pos(PROMPT[36:], 36)
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-4)
    assert last.shape == (256,)
    assert last.dtype == np.float32
    assert engine.prefill_token_count == 37 + 20 + 1


@pytest.mark.parametrize("pos", [0, 1, 15, 16, 17, 32, 36])
def test_going_back(engine, pos):
    """Positions before the end: the sequence is cut there, as if the rest had never been."""
    expected = engine.prefill_from_pos(PROMPT, 0)
    engine.prefill_from_pos(PROMPT[::-1].copy(), 37)
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT[pos:], pos), expected, rtol=0, atol=1e-4)
    assert engine.num_tokens == 37
    np.testing.assert_allclose(engine.decode_step(int(PROMPT[36]), 36), expected, rtol=0, atol=1e-4)
    engine.check()


def test_going_back_in_a_full_cache(network):
    """The whole context, and then the last token again: room for one copied block is there by default."""
    engine = InferenceEngine(network)
    limit = engine.config.max_position_embeddings
    tokens = np.arange(limit) % 256
    expected = engine.prefill_from_pos(tokens, 0)
    again = engine.decode_step(int(tokens[-1]), limit - 1)
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-4)
    engine.check()


def test_score(engine):
    logits = np.array([engine.decode_step(token, pos) for pos, token in enumerate(PROMPT[:-1])], np.float64)
    expected = logits[np.arange(36), PROMPT[1:]] - np.log(np.exp(logits).sum(axis=1))
    count = engine.prefill_token_count
    scores = engine.score(PROMPT)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)
    assert engine.num_tokens == 36
    assert engine.prefill_token_count == count
    assert engine.score([5]).shape == (0,)
    limit = engine.config.max_position_embeddings
    assert engine.score(np.zeros(limit + 1, int)).shape == (limit,)


def test_decode_goes_on_from_any_logits(engine):
    expected = engine.generate(PROMPT, GREEDY)
    engine.reset()
    engine.prefill_from_pos(PROMPT[:20], 0)
    logits = engine.prefill_from_pos(PROMPT[20:], 20)
    assert list(engine.decode(logits, GREEDY, PROMPT)) == expected


def test_begin_replaces_the_sequence(engine):
    engine.prefill_from_pos(PROMPT, 0)
    expected = engine.prefill_from_pos(PROMPT[20:25], 20)
    old = engine.seq_id

    def share(cache, seq_id):
        cache.fork(old, seq_id)
        cache.truncate(seq_id, 20)
        return 20

    assert engine.begin(share) == engine.num_tokens == 20
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT[20:25], 20), expected, rtol=0, atol=1e-4)
    engine.check()


@pytest.mark.parametrize("created", [False, True])
def test_begin_that_fails_changes_nothing(engine, created):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)

    def share(cache, seq_id):
        if created:
            cache.allocate(seq_id, 5)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        engine.begin(share)
    assert_same_state(engine, before)


def test_begin_checks_what_it_was_given(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    with pytest.raises(ValueError, match="of 5 tokens, got no sequence"):
        engine.begin(lambda cache, seq_id: 5)
    with pytest.raises(ValueError, match="of 5 tokens, got 3 tokens"):
        engine.begin(lambda cache, seq_id: cache.allocate(seq_id, 3) or 5)
    assert_same_state(engine, before)


def test_version_counts_changes(engine):
    versions = [engine.version]
    for change in (
        lambda: engine.prefill_from_pos(PROMPT, 0),
        lambda: engine.decode_step(1, 37),
        lambda: engine.decode_step(1, 5),
        engine.reset,
        lambda: engine.enlarge(1),
    ):
        change()
        versions.append(engine.version)
    assert sorted(set(versions)) == versions
    with pytest.raises(ValueError, match="tokens"):
        engine.prefill_from_pos([], 0)
    assert engine.version == versions[-1]


def test_enlarge(make):
    engine = make(num_blocks=2)
    engine.reclaim = lambda error: False
    stream = engine.stream(PROMPT[:5], GREEDY)
    next(stream)
    engine.enlarge(3)
    assert (engine.cache.total_blocks, engine.num_tokens) == (5, 0)
    assert engine.reclaim is not None
    with pytest.raises(InvalidOperationError):
        next(stream)
    assert engine.generate(PROMPT, GREEDY) == make().generate(PROMPT, GREEDY)
    engine.check()
    with pytest.raises(ValueError, match="blocks"):
        engine.enlarge(-1)


def test_reseed(make):
    params = SamplingParams(temperature=1.5, max_tokens=8)
    engine = make(seed=1)
    first = engine.generate(PROMPT, params)
    engine.reseed(1)
    assert engine.generate(PROMPT, params) == first
    engine.reseed(2)
    assert engine.generate(PROMPT, params) == make(seed=2).generate(PROMPT, params)


# ---------------------------------------------------------------- mistakes of the caller


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ValueError),
        ([1, 256], ValueError),
        ([1, -1], ValueError),
        ([2**40], ValueError),
        ([[1, 2]], TypeError),
        (np.ones((2, 2), int), ValueError),
        ([1.0], TypeError),
        ([True], TypeError),
        ("text", (TypeError, ValueError)),
        (None, (TypeError, ValueError)),
        ([1] * 514, ValueError),
    ],
    ids=repr,
)
def test_bad_prompts_change_nothing(engine, prompt, error):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    calls = engine.generate, engine.stream, engine.score, lambda tokens: engine.prefill_from_pos(tokens, 0)
    for call in calls:
        with pytest.raises(error):
            call(prompt)
        assert_same_state(engine, before)


def test_bad_positions_change_nothing(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    for pos, error in ((38, ValueError), (-1, ValueError), (1.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match="pos"):
            engine.prefill_from_pos([1], pos)
        with pytest.raises(error, match="pos"):
            engine.decode_step(1, pos)
    with pytest.raises(ValueError, match=r"max_position_embeddings \(512\), got 500 tokens from position 37"):
        engine.prefill_from_pos([1] * 500, 37)
    with pytest.raises(ValueError, match="from 0 to 255, got 256"):
        engine.decode_step(256, 37)
    assert_same_state(engine, before)


def test_bad_params_change_nothing(engine):
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    for call in (engine.generate, engine.stream):
        with pytest.raises(TypeError, match="expected SamplingParams, got dict"):
            call(PROMPT, {"temperature": 0})
    assert_same_state(engine, before)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 0.5}, TypeError),
        ({"prefill_chunk": 0}, ValueError),
        ({"block_size": 0}, ValueError),
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": 1.5}, TypeError),
        ({"sampling_params": 3}, TypeError),
        ({"dtype": "f8"}, ValueError),
        ({"eviction": "LRU"}, TypeError),
    ],
    ids=str,
)
def test_bad_options(network, options, error):
    with pytest.raises(error):
        InferenceEngine(network, **options)


# ---------------------------------------------------------------- failures


class Failing:
    """A network that fails at a chosen call of `attend`, counted over all forward passes."""

    def __init__(self, network, error):
        self.network, self.config, self.error = network, network.config, error
        self.countdown = -1

    def forward(self, tokens, positions, attend, logits):
        def counted(*args):
            self.countdown -= 1
            if self.countdown == 0:
                raise self.error
            return attend(*args)

        return self.network.forward(tokens, positions, counted, logits)


@pytest.mark.parametrize("error", [OutOfMemoryError(1, 0), RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("pos", [0, 5, 16, 37])
@pytest.mark.parametrize("attends", [1, 2, 3, 7])
def test_failure_in_the_middle_of_prefill(make, network, error, pos, attends):
    model = Failing(network, error)
    engine = make(model, prefill_chunk=7)
    engine.prefill_from_pos(PROMPT, 0)
    expected = engine.prefill_from_pos(PROMPT, 37)
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    model.countdown = attends
    with pytest.raises(type(error)):
        engine.prefill_from_pos(PROMPT, pos)
    assert_same_state(engine, before)
    np.testing.assert_allclose(engine.prefill_from_pos(PROMPT, 37), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pos", [5, 32, 37])
def test_failure_in_a_step(make, network, pos):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model)
    engine.prefill_from_pos(PROMPT, 0)
    before = state(engine)
    model.countdown = 2
    with pytest.raises(RuntimeError, match="broken"):
        engine.decode_step(1, pos)
    assert_same_state(engine, before)


def test_failure_in_generate_and_score_leaves_an_empty_sequence(make, network):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model, prefill_chunk=16)
    expected = engine.generate(PROMPT, GREEDY)
    for call, attends in ((engine.generate, 3), (engine.generate, 15), (engine.score, 3)):
        engine.generate(PROMPT, GREEDY)
        model.countdown = attends
        with pytest.raises(RuntimeError, match="broken"):
            call(PROMPT)
        assert engine.num_tokens == 0
        engine.check()
        assert engine.generate(PROMPT, GREEDY) == expected


def test_failure_in_a_stream_leaves_what_it_delivered(make, network):
    model = Failing(network, RuntimeError("broken"))
    engine = make(model)
    expected = engine.generate(PROMPT, GREEDY)
    model.countdown = 2 + 2 * 3 + 1  # two layers: the prompt, three steps, and one layer more
    delivered = []
    with pytest.raises(RuntimeError, match="broken"):
        delivered.extend(engine.stream(PROMPT, GREEDY))
    assert delivered == expected[:4]
    assert engine.num_tokens == 37 + 3
    logits = engine.decode_step(delivered[-1], engine.num_tokens)
    assert int(np.argmax(logits)) == expected[4]


def test_prompt_beyond_memory_is_refused_before_work(make, network):
    model = Failing(network, AssertionError("the network was run"))
    engine = make(model, num_blocks=4, prefill_chunk=16)
    engine.prefill_from_pos(PROMPT[:20], 0)
    before = state(engine)
    model.countdown = 1
    with pytest.raises(OutOfMemoryError) as raised:
        engine.prefill_from_pos([1] * 100, 20)
    assert (raised.value.requested, raised.value.available) == (6, 2)
    assert_same_state(engine, before)


def test_memory_runs_out_while_decoding(make):
    engine = make(num_blocks=3)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    delivered = []
    with pytest.raises(OutOfMemoryError):
        delivered.extend(engine.stream(PROMPT, params))
    assert engine.num_tokens == 48
    assert len(delivered) == 12  # eleven of them are in the cache
    engine.check()
    assert len(engine.generate(PROMPT, GREEDY)) == 10


def test_reclaim_makes_room(make):
    engine = make(num_blocks=4)
    engine.cache.allocate(7, 40)
    with pytest.raises(OutOfMemoryError):
        engine.generate(PROMPT, GREEDY)
    asked = []

    def reclaim(error):
        asked.append((error.requested, error.available))
        if len(asked) == 1:
            engine.cache.free(7)
        return len(asked) == 1

    engine.reclaim = reclaim
    assert len(engine.generate(PROMPT, GREEDY)) == 10
    assert asked == [(3, 1)]
    with pytest.raises(OutOfMemoryError):
        engine.generate([1] * 100, GREEDY)
    assert len(asked) == 2


def test_wrong_logits_are_named(make, network):
    model = SimpleNamespace(config=network.config, forward=lambda *args: network.forward(*args)[0])
    with pytest.raises(ValueError, match=r"expected logits of shape \(1, 256\), got \(256,\)"):
        make(model).generate(PROMPT)


def test_logits_that_are_no_numbers(make, network):
    def forward(*args):
        return network.forward(*args) * np.float32(np.nan)

    engine = make(SimpleNamespace(config=network.config, forward=forward))
    with pytest.raises(ValueError, match="finite maximum"):
        engine.generate(PROMPT)
    assert engine.num_tokens == 0


# ---------------------------------------------------------------- one engine, many users


def test_interrupted_stream_says_so(engine):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    expected = engine.generate(PROMPT[5:], GREEDY)
    before = state(engine)
    with pytest.raises(InvalidOperationError, match="another call"):
        next(stream)
    assert_same_state(engine, before)
    assert engine.generate(PROMPT[5:], GREEDY) == expected


def test_a_step_between_interrupts_a_stream(engine):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.decode_step(1, 37)
    with pytest.raises(InvalidOperationError):
        next(stream)


def test_abandoned_stream(engine):
    expected = engine.generate(PROMPT, GREEDY)
    next(engine.stream(PROMPT, GREEDY))
    assert engine.generate(PROMPT, GREEDY) == expected


def test_threads_share_an_engine(engine):
    prompts = [PROMPT[i:] for i in range(4)]
    expected = [engine.generate(prompt, GREEDY) for prompt in prompts]
    found = [None] * 4

    def work(i):
        for _ in range(5):
            found[i] = engine.generate(prompts[i], GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    engine.check()


# ---------------------------------------------------------------- a network of one's own


class ToyNetwork:
    """Two layers of bare attention with learned positions: nothing of the Transformer but the protocol."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.config = SimpleNamespace(
            num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=50, max_position_embeddings=64
        )
        self.embedding, self.places = (rng.standard_normal((n, 32)).astype(np.float32) for n in (50, 64))
        self.projections = rng.standard_normal((2, 32, 64)).astype(np.float32) / 4

    def forward(self, tokens, positions, attend, logits):
        x = self.embedding[tokens] + self.places[positions]
        for layer, matrix in enumerate(self.projections):
            heads = (x @ matrix).reshape(len(x), 8, 8)
            x = x + attend(layer, heads[:, :4], heads[:, 4:6], heads[:, 6:]).reshape(len(x), 32)
        rows = {"all": slice(None), "last": slice(-1, None), "none": slice(0, 0)}[logits]
        return x[rows] @ self.embedding.T


def toy_logits(network, tokens):
    """The same without any cache."""
    stored = {}

    def attend(layer, queries, keys, values):
        stored[layer] = keys
        return dense_attention(queries, keys, values).astype(np.float32)

    return network.forward(np.array(tokens), np.arange(len(tokens)), attend, "last")[0]


def test_own_network(make):
    network = ToyNetwork()
    engine = make(network, prefill_chunk=5, block_size=4)
    tokens = list(range(17))
    for token in engine.stream(tokens, GREEDY):
        assert token == int(np.argmax(toy_logits(network, tokens)))
        tokens.append(token)
    assert len(tokens) == 27
    assert engine.config is network.config
    assert engine.tokenizer is None
    assert "ToyNetwork" in repr(engine)


@pytest.mark.parametrize("options", [{"dtype": "f16"}, {"key_dtype": "f16", "value_dtype": "q8"}], ids=str)
def test_formats_are_passed_on(network, options):
    cache = InferenceEngine(network, **options).cache
    assert (cache.key_dtype, cache.value_dtype) == ("f16", options.get("value_dtype", "f16"))


def test_default_pool_is_bounded(make):
    config = SimpleNamespace(**{**vars(ToyNetwork().config), "max_position_embeddings": 10**6})
    cache = make(SimpleNamespace(config=config)).cache
    assert cache.total_blocks == 8192 // 16 + 1


@pytest.mark.parametrize("name", ["llama_biases", "mistral_yarn", "qwen3_tied"])
def test_several_sequences_in_one_forward_pass(name):
    """A chunk of one sequence and steps of two others side by side: each as if it were alone."""
    network = Transformer.from_pretrained(GOLDEN / name)
    config = network.config
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, config.vocab_size, n).astype(np.uint32) for n in (30, 17, 70)]
    counts = [13, 1, 1]
    cache = PagedKvCache(20, 16, config.num_kv_heads, config.head_dim, num_layers=config.num_layers, dtype="f32")

    def forward(seq_ids, tokens, positions, counts):
        def attend(layer, queries, keys, values):
            row = 0
            for seq_id, count in zip(seq_ids, counts, strict=True):
                cache.write(layer, seq_id, keys[row : row + count], values[row : row + count])
                row += count
            return cache.attention(layer, queries, seq_ids, query_lens=counts)

        return network.forward(np.concatenate(tokens), np.concatenate(positions), attend, "all")

    for seq_id, (text, count) in enumerate(zip(texts, counts, strict=True)):
        cache.allocate(seq_id, len(text) - count)
        forward([seq_id], [text[:-count]], [np.arange(len(text) - count)], [len(text) - count])
        cache.append(seq_id, count)
    tails = [text[-count:] for text, count in zip(texts, counts, strict=True)]
    places = [np.arange(len(text))[-count:] for text, count in zip(texts, counts, strict=True)]
    together = forward([0, 1, 2], tails, places, counts)
    for text, row in zip(texts, (12, 13, 14), strict=True):
        alone = InferenceEngine(network).prefill_from_pos(text, 0)
        np.testing.assert_allclose(together[row], alone, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- tokenizer


@pytest.fixture
def with_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN / "llama", tmp_path, dirs_exist_ok=True)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer(with_tokenizer):
    tokenizer = InferenceEngine.from_pretrained(with_tokenizer).tokenizer
    assert tokenizer.encode("b a c").ids == [1, 0, 2]


def test_no_tokenizer_file():
    assert InferenceEngine.from_pretrained(GOLDEN / "llama").tokenizer is None


def test_damaged_tokenizer(with_tokenizer):
    (with_tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = InferenceEngine.from_pretrained(with_tokenizer).tokenizer


def test_tokenizers_not_installed(with_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    engine = InferenceEngine.from_pretrained(with_tokenizer)
    with pytest.raises(ImportError, match=r"kvcache\[text\]"):
        _ = engine.tokenizer
    assert engine.generate(PROMPT, GREEDY)
