"""Whatever proposes draft tokens, and whatever layers keep them: texts are those without, and few steps are needed."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from next_layers import with_next_layer
from places import GOLDEN
from seeded_weights import seeded
from serving import GREEDY, Clock, penalised, prompts, repeating, run, same, sampled, settled

from kvcache import BatchEngine, Calibration, EvictionPolicy, KvCacheError, SamplingParams
from kvcache.drafts.ngrams import NGrams
from kvcache.engine import Transformer

pytestmark = pytest.mark.one_build

# Every kind of layer: all tokens, windows, four kinds of states, latents, two regimes of positions, numbers of heads,
# indexers.
TARGETS = [
    "llama_odd", "starcoder2_window", "qwen3_5", "lfm3", "granite_hybrid", "deepseek_v3", "kimi_linear", "laguna",
    "glm_moe_dsa",
]
DRAFTS = ["same", "q4", "starcoder2_window", "qwen3_5", "glm4_moe_lite"]
# Networks with an MTP layer, those of the last two with a window, and what it says.
HEADS = [f"{name} {says}" for says in ("anything", "what follows") for name in (
    "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "mimo_v2_flash", "step3p7",
)]


@cache
def opened(name, weights="auto"):
    if " " in name:
        with TemporaryDirectory() as place:
            folder = with_next_layer(name.split()[0], Path(place) / "x", name.endswith("follows"))
            return Transformer.from_pretrained(folder, weights=weights, draft_layer=True)
    return Transformer.from_pretrained(seeded(name) if (GOLDEN / "seeded" / name).exists() else GOLDEN / name,
                                       weights=weights)


def draft_of(name, target):
    """The sources of a draw: n-grams, a twin of the target, the same in q4, or another network."""
    return [
        each if each in ("ngram", "mtp") else opened(target) if each == "same" else opened(target, "q4") if each == "q4"
        else opened(each)
        for each in name
    ]


@cache
def wanted(target):
    """Requests, and their answers without draft tokens."""
    draws = (repeating, penalised, sampled)
    asked = [(prompt, draws[i % 3](i, 12, logprobs=1)) for i, prompt in enumerate(prompts(0, 5, 40, 96))]
    engine = BatchEngine(opened(target), num_blocks=200, draft=None)
    requests = [engine.submit(*each) for each in asked]
    run(engine, check=False)
    assert engine.stats().draft_tokens == 0
    return [(*each, request.completions()[0]) for each, request in zip(asked, requests, strict=True)]


ANY = ["ngram", *DRAFTS]


def sources(names):
    return st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)


@given(
    st.one_of(
        st.tuples(st.sampled_from(TARGETS), sources(ANY)), st.tuples(st.sampled_from(HEADS), sources(["mtp", *ANY])),
    ),
    st.integers(5, 24), st.integers(1, 5), st.integers(1, 16), st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_any_mix(drawn, blocks, running, most, late):
    """Few places and blocks; half of the requests come when others run, or behind their prefixes."""
    target, names = drawn
    engine = BatchEngine(
        opened(target), num_blocks=blocks, max_running=running, draft=draft_of(names, target), draft_tokens=most,
        clock=Clock(),
    )
    asked, requests = wanted(target), []
    for i, (prompt, params, want) in enumerate(asked):
        requests.append((engine.submit(prompt, params), want))
        for _ in range(9 * late * (i % 2)):
            engine.step()
        engine.check()
    run(engine, check=False)
    for request, want in requests:
        same(request.completions()[0], want)
    settled(engine)


@pytest.mark.parametrize("target", [*TARGETS, "phi3_longrope"])
def test_a_network_that_proposes_for_itself(target):
    """All draft tokens of greedy texts are drawn: many tokens come of a pass. A second run finds its prefixes."""
    model = opened(target)
    engine, plain = (BatchEngine(model, draft=each, clock=Clock()) for each in (model, None))
    params = replace(GREEDY, max_tokens=40)
    asked = prompts(5, 3, 40, 96)
    want = plain.generate_batch(asked, params, progress=False)
    assert engine.generate_batch(asked, params, progress=False) == want
    stats = engine.stats()
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 60
    assert stats.steps < 20
    assert engine.generate_batch(asked, params, progress=False) == want
    engine.check()


@pytest.mark.parametrize("target", [name for name in HEADS if name.endswith("follows")])
def test_mtp_layers_that_know_what_follows(target):
    """Many tokens come of a pass, of samples and behind cached prefixes too."""
    model, params = opened(target), replace(GREEDY, max_tokens=40)
    engine, plain = (BatchEngine(model, draft=each, clock=Clock()) for each in ("mtp", None))
    prompt = prompts(5, 1, 60, 96)[0]
    want = plain.submit(prompt, params, n=2).result()
    for _ in range(2):
        before = engine.stats()
        assert engine.submit(prompt, params, n=2).result() == want
        stats = engine.stats()
        assert stats.accepted_tokens - before.accepted_tokens > 40
        assert stats.steps - before.steps < 25
    assert stats.cached_tokens > 0
    settled(engine)


def test_mtp_layers_keep_the_group_that_a_text_is_in():
    """Draft tokens are appended one by one; one in another group of the residual would pack what the text reads."""
    model, params = opened("deepseek_v3 anything"), replace(GREEDY, max_tokens=20)
    asked = [(prompt, params) for prompt in prompts(5, 2, 60, 96)]
    engine, plain = (
        BatchEngine(model, draft=each, dtype="q2", residual_length=12, clock=Clock()) for each in ("mtp", None)
    )
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    assert [each.result() for each in requests] == [plain.submit(*each).result() for each in asked]


def test_a_budget_of_bits_is_divided_as_without_the_layer():
    """Else a network with an MTP layer would have other formats, another residual by default, and other texts."""
    losses, asked, found = np.array([[1.0, 0], [8, 0], [0.02, 0]]), prompts(5, 2, 60, 96), []
    for name, draft in (("deepseek_v3", None), ("deepseek_v3 anything", "mtp")):
        more = draft is not None
        known = Calibration(np.zeros((3 + more, 1, 96)), losses=np.pad(losses, ((0, more), (0, 0))))
        engine = BatchEngine(opened(name), dtype="auto:3.4", calibrate=known, draft=draft, clock=Clock())
        texts = [engine.submit(prompt, replace(GREEDY, max_tokens=20, logprobs=0)).completions()[0] for prompt in asked]
        found.append((engine._settings.storage.dtypes[0], engine.residual_length, texts))
    (plain, *want), (formats, *given) = found
    assert (given, formats) == (want, [*plain, min(plain)])
    assert len({*plain}) > 1


def test_the_mtp_layer_may_be_absent():
    model = opened("llama_odd")
    with pytest.raises(ValueError, match="draft: expected a network with an MTP layer for mtp"):
        BatchEngine(model, draft="mtp")
    assert BatchEngine(model, draft="auto").submit([5, 6, 5, 6, 5, 6], GREEDY).result()


def test_prefixes_are_shared_by_shadows():
    """Where the network finds a cached prompt, the small one does: it does not read it again."""
    model, rows = opened("llama_odd"), []

    class Counted:
        config, selects_rows = model.config, True

        def forward(self, tokens, positions, attend, logits, **places):
            rows.append(len(tokens))
            return model.forward(tokens, positions, attend, logits, **places)

    engine = BatchEngine(model, draft=Counted(), clock=Clock())
    prompt = np.arange(150, dtype=np.uint32) % 96
    first = engine.submit(prompt, GREEDY).result()
    read = sum(rows)
    assert read > 150
    rows.clear()
    assert engine.submit(prompt, GREEDY).result() == first
    assert sum(rows) < 40
    rows.clear()
    assert engine.submit(prompt, GREEDY, namespace="other").result() == first
    assert sum(rows) == read, "nothing is shared with another namespace"


def test_ends_among_draft_tokens(network):
    """A text ends where it ends without, also among draft tokens that would hold."""
    for most, stops in ((1, ()), (2, ()), (9, ()), (60, (5, 17)), (60, tuple(range(40)))):
        params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=most, stop_token_ids=stops)
        for prompt in prompts(7, 2, 30):
            engines = [BatchEngine(network, draft=each, clock=Clock()) for each in (network, None)]
            found = [engine.submit(prompt, params).completions()[0] for engine in engines]
            same(*found)
            settled(engines[0])


def test_a_source_that_fails_is_given_up(caplog, monkeypatch):
    model = opened("llama_odd")

    class Failing:
        config = model.config

        def forward(self, *_, **__):
            raise FloatingPointError("too hot")

    engine = BatchEngine(model, draft=(Failing(), "ngram"), clock=Clock())
    asked = [(prompt, repeating(0, 20)) for prompt in prompts(3, 2, 30, 96)]
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    want = BatchEngine(model, draft=None)
    assert [each.result() for each in requests] == [want.submit(*each).result() for each in asked]
    assert caplog.text.count("draft: the network has failed, and is not asked again: FloatingPointError") == 1
    assert engine.stats().draft_tokens > 0, "n-grams go on"
    monkeypatch.setattr(NGrams, "knows", Failing.forward)
    engine = BatchEngine(model, draft="ngram", clock=Clock())
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    assert [each.result() for each in requests] == [want.submit(*each).result() for each in asked]
    assert caplog.text.count("draft: ngram has failed, and is not asked again: FloatingPointError") == 1


def test_memory_is_shared_with_the_draft():
    model = opened("llama_odd")
    plain, drafted = (BatchEngine(model, max_memory_bytes="1MiB", draft=each) for each in (None, model))
    assert plain.memory()["kv"] > drafted.memory()["kv"] / 2
    assert drafted.memory()["kv"] <= 2**20
    assert drafted.memory()["weights"] == 2 * plain.memory()["weights"]


def test_what_is_refused(network):
    model = opened("llama_odd")
    for draft, message in (
        (network, "draft: expected a vocabulary of 96 tokens, or up to 128 more or less, got 256"),
        (7, "draft: expected None, a name or a network, got int"),
        ("nowhere/at/all", "nowhere/at/all"),
    ):
        with pytest.raises((ValueError, TypeError, OSError, KvCacheError), match=message):
            BatchEngine(model, draft=draft)
    with pytest.raises(ValueError, match="draft: expected None or ngram with an eviction_policy"):
        BatchEngine(model, draft=model, eviction_policy=EvictionPolicy.StreamingLLM(4, 16))
    with pytest.raises(ValueError, match="draft_tokens: expected an int <= 16, got 17"):
        BatchEngine(model, draft_tokens=17)


@pytest.mark.parametrize("size", [90, 100, 224])
def test_vocabularies_of_other_sizes(size):
    """Tokens that the network does not have are not proposed, and none behind one that the small one lacks."""
    model = opened("llama_odd")
    small = cut_to(model, size)
    engine, plain = (BatchEngine(model, draft=each, clock=Clock()) for each in (small, None))
    asked, requests = [np.array([5, 6, 7, 8], np.uint32), np.array([5, 95, 7], np.uint32)], []
    params = replace(GREEDY, max_tokens=20, logit_bias=dict.fromkeys(range(90, 96), -1e9))
    for prompt in asked:
        requests.append(engine.submit(prompt, params))
        assert requests[-1].result() == plain.submit(prompt, params).result()
    held = [request.works[0].drafts.paces[0].accepted for request in requests]
    assert held[0] > 9
    assert (held[1] > 9) == (size > 95)
    settled(engine)


def cut_to(model, size):
    """A network that says what another does, with other sizes of its vocabulary: it likes rows of filling best."""
    vocab = model.config.vocab_size

    class Cut:
        config, selects_rows = replace(model.config, vocab_size=size), True

        def forward(self, tokens, *place, **options):
            assert tokens.max() < size
            logits = model.forward(tokens, *place, **options)
            filling = np.full((len(logits), max(0, size - vocab)), 1e9, np.float32)
            return np.concatenate([logits[:, :size], filling], axis=1)

    return Cut()
