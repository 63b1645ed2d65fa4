"""`InferenceEngine` and `PrefixCachedEngine` give what the plain twin of one text gives, bit for bit."""

import numpy as np
import pytest
from oracles.text import PlainTexts
from places import GOLDEN
from seeded_weights import golden_folder
from serving import prompts, same, sampled
from windowed_networks import Windowed

from kvcache import EvictionPolicy, InferenceEngine, PrefixCachedEngine
from kvcache.engine import Transformer

pytestmark = pytest.mark.one_build

NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
KINDS = {
    "f32": (NETWORK, {"dtype": "f32"}),
    "q8": (NETWORK, {"dtype": "q8"}),
    "groups of 12": (NETWORK, {"dtype": "q4", "residual_length": 12}),
    "a window": (Windowed(NETWORK, 10), {"dtype": "q8"}),
    "windows alone": (Windowed(NETWORK, 30, 5), {"dtype": "f16"}),
    "h2o": (NETWORK, {"dtype": "q8", "eviction_policy": EvictionPolicy.H2O(), "kv_budget": 20}),
    "streaming": (NETWORK, {"eviction_policy": EvictionPolicy.StreamingLLM(4, 16)}),
    "several sizes": (Transformer.from_pretrained(golden_folder("gemma4")), {"dtype": "q8"}),
    "values are keys": (Transformer.from_pretrained(golden_folder("gemma4_experts")), {"dtype": "f16"}),
    "several streams": (Transformer.from_pretrained(golden_folder("gemma3n_streams")), {"dtype": "q8"}),
    "longrope": (Transformer.from_pretrained(GOLDEN / "phi3_longrope"), {"dtype": "q4"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_text_after_another(kind):
    model, options = KINDS[kind]
    plain, engine = PlainTexts(model, **options), InferenceEngine(model, **options)
    cached = None if "h2o" in kind or "streaming" in kind else PrefixCachedEngine(InferenceEngine(model, **options), 40)
    most = 90 if kind != "longrope" else 40
    for i, prompt in enumerate(prompts(31, 8, most, min(250, model.config.vocab_size))):
        params = sampled(i, 24, logprobs=1)
        want = plain.complete(prompt, params)
        same(engine.complete(prompt, params), want)
        if cached is not None:
            same(cached.complete(prompt, params), want)
            same(cached.complete(prompt, params), want)
            cached.check()
        assert engine.score(prompt).tobytes() == plain.score(prompt).tobytes()
        engine.check()


# Evictions depend on pieces, and under longrope a text of another length has other positions.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("h2o", "streaming", "longrope")])
def test_steps_of_any_length(kind):
    """Prefill in pieces, decode, go back and write over, as far as the layers allow."""
    model, options = KINDS[kind]
    plain, engine = PlainTexts(model, **options), InferenceEngine(model, **options)
    rng, text = np.random.default_rng(3), np.empty(0, np.uint32)
    for _ in range(40):
        back = 0 if options.get("residual_length") else int(rng.integers(0, min(4, len(text)) + 1))
        new = rng.integers(0, min(250, model.config.vocab_size), int(rng.integers(1, 9))).astype(np.uint32)
        at = len(text) - back
        text = np.concatenate([text[:at], new])
        logits = engine.prefill_from_pos(new, at)
        plain.begin()
        assert plain.run(text)[-1].tobytes() == logits.tobytes()
        engine.check()
