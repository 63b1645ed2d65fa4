"""Engines with tiers: every answer is that of an engine without, whatever the tiers have, do, and return."""

import sys

import numpy as np
import pytest
from pace import FAST
from places import GOLDEN, MODELS
from prefix_engines import SHORT, prompt, settled
from shared_folder import share
from tier_stores import GIVEN, SECRET, Faulty, ObjectStore
from windowed_networks import windowed

from kvcache import BatchEngine, simd_levels, use_simd
from kvcache.calibration.calibrating import measure
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer
from kvcache.kernels.kernels import FORMATS
from kvcache.tiers import DirectoryTier, Tiers

pytestmark = pytest.mark.one_build

SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=5, logprobs=1)


def engine_over(model, tiers, blocks=64, dtype="f32", **options):
    return PrefixCachedEngine(InferenceEngine(model, dtype=dtype, **options), blocks, tiers=tiers, strict=True)


def waiting(*tiers, **options):
    """Tiers that a prompt waits for, so that the number of its hits does not depend on time."""
    return Tiers(tiers, **{"secret": SECRET, "after_uses": 1, "head_start": 60, **options})


# Each format, with two of three sizes of blocks and its own residual, and residuals of other lengths with all sizes.
FOUND = [
    *((name, None, size) for i, name in enumerate(FORMATS) for size in ((16, 48), (48, 96), (96, 16))[i % 3]),
    *((name, residual, size) for name, residual in (("q4", 0), ("q3", 48)) for size in (16, 48, 96)),
]


@pytest.mark.parametrize(("dtype", "residual", "block_size"), FOUND)
def test_another_process_finds_what_one_computed(network, dtype, residual, block_size):
    """All formats, with residual groups that do and do not end where values do, and blocks larger than a value."""
    options = {"dtype": dtype, "block_size": block_size, "residual_length": residual}
    store, tokens = ObjectStore(), prompt(1, 300)
    want = InferenceEngine(network, **options).complete(tokens, SEEDED)
    first, second = waiting(store), waiting(store)
    one = engine_over(network, first, **options)
    assert one.complete(tokens, SEEDED).logprobs == want.logprobs
    assert first.flush(60)
    size = max(64 // block_size * block_size, block_size)
    assert len(store.bucket) == 300 // size == first.stats()[0].stored
    two = engine_over(network, second, **options)
    answer = two.complete(tokens, SEEDED)
    assert (answer.tokens, answer.logprobs) == (want.tokens, want.logprobs)
    group = residual if residual is not None else two.inner.residual_length
    assert answer.cached_tokens == 300 // size * size // (group or 1) * (group or 1)
    assert second.stats()[0].hits == 300 // size
    assert two.complete(tokens, SEEDED).logprobs == want.logprobs
    settled(two)


@pytest.mark.parametrize("step", [1, -1], ids=["best first", "scalar first"])
def test_every_level_finds_what_one_computed(tmp_path, step):
    """In a folder of values and in saved caches, with the bits of a cold run."""
    computed = []
    for level in simd_levels()[::step]:
        with use_simd(level):
            computed.append(share(tmp_path))
    assert computed == [True] + [False] * (len(computed) - 1)


@pytest.mark.parametrize("head_start", [0, 60])
@pytest.mark.parametrize("options", [{"dtype": "q4"}, {"dtype": "q8"}, {"dtype": "q4", "residual_length": 0}])
def test_centred_keys_come_back_to_engines_of_their_calibration(network, options, head_start):
    """The first tokens, which every query reads in f16, run again."""
    options = options | {"calibrate": measure(network, prompt(7, 200))}
    store, tokens = ObjectStore(), prompt(1, 300)
    want = InferenceEngine(network, **options).complete(tokens, SEEDED)
    with waiting(store) as tiers:
        assert engine_over(network, tiers, **options).complete(tokens, SEEDED).logprobs == want.logprobs
    for _ in range(2):
        with waiting(store, head_start=head_start) as tiers:
            cached = engine_over(network, tiers, **options)
            answer = cached.complete(tokens, SEEDED)
            assert (answer.tokens, answer.logprobs) == (want.tokens, want.logprobs)
            assert answer.cached_tokens == 240 or not head_start
            assert cached.complete(tokens[:200], SEEDED).cached_tokens >= 150
            settled(cached)
    for other in (False, measure(network, prompt(8, 200))):
        with waiting(store) as tiers:
            cached = engine_over(network, tiers, **options | {"calibrate": other})
            assert cached.complete(tokens, SHORT).cached_tokens == 0


def test_nothing_is_shared_between_models_formats_namespaces_and_secrets(network):
    store, tokens = ObjectStore(), prompt(1, 200)
    with waiting(store) as tiers:
        engine_over(network, tiers).generate(tokens, SHORT, namespace="a")
        assert tiers.flush(60)
    other = Transformer.from_pretrained(GOLDEN / "llama_biases")
    cases = [
        (network, {}, {}, "b"), (network, {}, {}, None), (network, {"dtype": "f16"}, {}, "a"), (other, {}, {}, "a"),
        (network, {}, {"secret": SECRET[::-1]}, "a"), (network, {"block_size": 32}, {}, "a"),
        (network, {"residual_length": 32}, {}, "a"),
    ]
    for model, options, settings, namespace in cases:
        with waiting(store, **settings) as tiers:
            cached = engine_over(model, tiers, **options)
            assert cached.complete(tokens, SHORT, namespace=namespace).cached_tokens == 0
            assert tiers.stats()[0].hits == 0
    with waiting(store) as tiers:
        assert engine_over(network, tiers).complete(tokens, SHORT, namespace="a").cached_tokens == 192


def test_encrypted_values(network, monkeypatch):
    """No value has the bytes of the prompt; without encryption they are others' values."""
    store, tokens = ObjectStore(), prompt(1, 200)
    with waiting(store, encrypt=True) as tiers:
        want = engine_over(network, tiers).generate(tokens, SHORT, namespace="a")
        assert tiers.flush(60)
    assert not any(tokens[i : i + 8].tobytes() in value for value in store.bucket.values() for i in range(190))
    for encrypt, cached in ((True, 192), (False, 0)):
        with waiting(store, encrypt=encrypt) as tiers:
            answer = engine_over(network, tiers).complete(tokens, SHORT, namespace="a")
            assert (answer.tokens, answer.cached_tokens) == (want, cached)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ImportError, match=r"cryptography package: pip install 'kvcache-cpu\[encryption\]'"):
        Tiers([store], secret=SECRET, encrypt=True)


def test_a_namespace_without_bytes_is_not_shared(network):
    store = ObjectStore()
    with waiting(store) as tiers:
        cached = engine_over(network, tiers)
        namespace = frozenset("a")
        assert cached.generate(prompt(1, 200), SHORT, namespace=namespace)
        assert cached.complete(prompt(1, 200), SHORT, namespace=namespace).cached_tokens == 192
    assert store.calls == []


def test_what_is_evicted_is_written_and_comes_back(network):
    """A prefix cache of 16 blocks over texts of 14: each one evicts the one before."""
    store, texts = ObjectStore(), [prompt(seed, 230) for seed in range(4)]
    with waiting(store, after_uses=100) as tiers:
        cached = engine_over(network, tiers, blocks=16)
        want = [cached.generate(text, SHORT) for text in texts]
        assert tiers.flush(60)
        assert tiers.stats()[0].stored == 9
        for text, tokens in zip(texts[:3], want, strict=False):
            answer = cached.complete(text, SHORT)
            assert answer.tokens == tokens
            assert answer.cached_tokens == 192
            settled(cached)


def test_the_second_use_is_written(network):
    store, text = ObjectStore(), prompt(1, 130)
    with waiting(store, after_uses=2) as tiers:
        cached = engine_over(network, tiers)
        for stored in (0, 2, 2):
            cached.generate(text, SHORT)
            assert tiers.flush(60)
            assert len(store.bucket) == tiers.stats()[0].stored == stored


def test_tiers_in_order_of_speed(network, tmp_path):
    """The second tier delivers what the first one lacks, and the first one gets it then."""
    near, far, text = DirectoryTier(tmp_path, "1GiB", **GIVEN), ObjectStore(), prompt(1, 300)
    with waiting(far) as tiers:
        want = engine_over(network, tiers).generate(text, SHORT)
        assert tiers.flush(60)
    with waiting(near) as tiers:
        engine_over(network, tiers).generate(text[:150], SHORT)
        assert tiers.flush(60)
    with waiting(near, far) as tiers:
        cached = engine_over(network, tiers)
        answer = cached.complete(text, SHORT)
        assert (answer.tokens, answer.cached_tokens) == (want, 256)
        assert [each.hits for each in tiers.stats()] == [2, 2]
        assert tiers.flush(60)
        assert [each.stored for each in tiers.stats()] == [2, 0]
    with waiting(near) as tiers:
        assert engine_over(network, tiers).complete(text, SHORT).cached_tokens == 256


def test_a_prompt_that_runs_jumps_ahead(network):
    """Values arrive window by window while the prompt runs, with the tokens of a run without tiers."""
    store, text = ObjectStore(), prompt(1, 480)
    want = InferenceEngine(network).complete(text, SEEDED)
    with waiting(store) as tiers:
        engine_over(network, tiers).generate(text, SHORT)
    with waiting(store, head_start=0) as tiers:
        cached = engine_over(network, tiers)
        answer = cached.complete(text, SEEDED)
        assert (answer.tokens, answer.logprobs) == (want.tokens, want.logprobs)
        settled(cached)


WINDOWED = [
    ("gemma2", 16), ("gemma3", 16), ("gpt_oss", 16), ("qwen2_windows", 16), ("olmo3", 48), ("mixtral", 16),
    ("mistral_window", 16), ("gemma3", 96), ("chunks", 16),
]


@pytest.mark.parametrize(("name", "block_size"), WINDOWED)
def test_networks_with_windows(name, block_size):
    """A text goes on where the tiers have its windows: at the end of a prompt, and of an answer."""
    model, store, tokens = windowed(name), ObjectStore(), prompt(1, 300)
    options = {"dtype": "q8", "block_size": block_size}
    with waiting(store) as tiers:
        first = engine_over(model, tiers, **options)
        answer = first.generate(tokens, SEEDED)
        assert first.inner._sequence.pool.groups[1:]
        assert tiers.flush(60)
    size, chat = max(64 // block_size * block_size, block_size), np.append(tokens, [*answer, *prompt(2, 60)])
    for text in (tokens, chat.astype(np.uint32)):
        want = InferenceEngine(model, **options).complete(text, SEEDED)
        for head_start in (60, 0):
            with waiting(store, head_start=head_start) as tiers:
                cached = engine_over(model, tiers, **options)
                found = cached.complete(text, SEEDED)
                assert (found.tokens, found.logprobs) == (want.tokens, want.logprobs)
                assert not head_start or found.cached_tokens == (300 + len(answer) - 1) // size * size
                assert cached.complete(text, SEEDED).logprobs == want.logprobs
                settled(cached)


@pytest.mark.parametrize("name", MODELS)
def test_every_network(name):
    """Texts that share beginnings, end at groups and between them: twice through both kinds of engine."""
    model, store, rng = Transformer.from_pretrained(GOLDEN / name), ObjectStore(), np.random.default_rng(1)
    texts = [rng.integers(0, 200, n).astype(np.uint32) for n in (300, 130, 64, 200)]
    texts.append(np.concatenate([texts[0][:200], texts[1]]))
    for dtype in ("f16", "q4"):
        plain = InferenceEngine(model, dtype=dtype)
        want = [plain.complete(text, SEEDED) for text in texts]
        for turn in range(2):
            with waiting(store) as tiers:
                cached = engine_over(model, tiers, 40, dtype)
                for text, each in zip(texts, want, strict=True):
                    found = cached.complete(text, SEEDED)
                    assert (found.tokens, found.logprobs) == (each.tokens, each.logprobs)
                assert tiers.flush(60)
                settled(cached)
                assert tiers.stats()[0].wrong == 0
                assert not turn or tiers.stats()[0].hits > 0
            with waiting(store) as tiers, BatchEngine(model, dtype=dtype, tiers=tiers) as batch:
                requests = [batch.submit(text, SEEDED) for text in texts]
                for request, each in zip(requests, want, strict=True):
                    (found,) = request.completions()
                    assert (found.tokens, found.logprobs) == (each.tokens, each.logprobs)


def run_random(network, tiers, seed, num_requests, dtype="q8"):
    """Random requests that share prefixes, in three namespaces, in a cache that is much too small."""
    rng = np.random.default_rng(seed)
    plain, cached = InferenceEngine(network, dtype=dtype), engine_over(network, tiers, blocks=20, dtype=dtype)
    texts, want = [rng.integers(0, 250, 300).astype(np.uint32) for _ in range(3)], {}
    for _ in range(num_requests):
        which, parted, length = (int(rng.integers(n)) for n in (3, 4, 300))
        text = texts[which][: length + 1].copy()
        text[len(text) // 2 :] += parted
        if (which, parted, length) not in want:
            want[which, parted, length] = plain.generate(text, SHORT)
        assert cached.generate(text, SHORT, namespace=int(rng.integers(3))) == want[which, parted, length]
        if rng.random() < 0.05:
            settled(cached)
        if rng.random() < 0.05:
            cached.clear_cache()
    return cached


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("head_start", [0, 60])
def test_random_faults_change_no_answer(name, long, monkeypatch, head_start):
    """Two tiers that fail, forget, and return damaged, truncated, exchanged and repeated values."""
    monkeypatch.setattr("kvcache.tiers.links.PAUSE", 0.001)
    store = ObjectStore()
    options = {"secret": SECRET, "after_uses": 1, "head_start": head_start, "queue_bytes": 1 << 18}
    with Tiers([Faulty(ObjectStore(), 1), Faulty(store, 2, 0.1)], **options) as tiers:
        network = Transformer.from_pretrained(GOLDEN / name)
        for seed in range(3, 13):  # how many faults a run meets depends on the threads of the tiers
            run_random(network, tiers, seed, 10_000 if long else 20 if FAST else 100)
            first, second = tiers.stats()
            met = first.errors, first.wrong + second.wrong, first.hits + second.hits
            if all(met) or not head_start or FAST:
                break
        else:
            raise AssertionError(f"expected errors, wrong values and hits, got {met}")
    assert tiers.stats()[0].queued_bytes == 0


def test_refused_by_name(network, tmp_path):
    tiers = Tiers([ObjectStore()], secret=SECRET)
    with pytest.raises(ValueError, match="autosave: expected None with tiers"):
        PrefixCachedEngine(InferenceEngine(network), 8, tiers=tiers, autosave=tmp_path)
    with pytest.raises(TypeError, match="tiers: expected a Tiers, got list"):
        PrefixCachedEngine(InferenceEngine(network), 8, tiers=[ObjectStore()])
    for given, options, message in [
        ([], {}, "tiers: expected 1 to 8, got 0"),
        (5, {}, "tiers: expected a list of tiers, got int"),
        ([object()], {}, "tiers: expected objects with get_many, got object"),
        ([ObjectStore()], {}, "secret: expected one for ObjectStore"),
        ([ObjectStore()], {"secret": "text"}, "secret: expected bytes, got str"),
        ([ObjectStore()], {"secret": SECRET, "after_uses": 0}, "after_uses: expected"),
        ([ObjectStore()], {"secret": SECRET, "queue_bytes": "many"}, "queue_bytes: expected"),
        ([ObjectStore()], {"secret": SECRET, "head_start": -1}, "head_start: expected"),
        ([ObjectStore()], {"secret": SECRET, "deadline": float("nan")}, "deadline: expected"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            Tiers(given, **options)
