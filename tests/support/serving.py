"""Requests for the tests of `BatchEngine`, and what one engine alone answers."""

import numpy as np
from oracles.text import PlainTexts

from kvcache import BatchEngine, InferenceEngine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=8)
ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def sampled(seed, max_tokens=8, **options):
    return SamplingParams(temperature=0.9, top_k=0, top_p=0.95, seed=seed, max_tokens=max_tokens, **options)


def repeat(text, logits):
    """A logits processor: the text goes round in a circle, but for some places at which the network chooses."""
    if len(text) % 11 and len(text) % 17:
        logits[(37 * (len(text) % 5) + 3) % len(logits)] += 1000.0


def repeating(seed, max_tokens=8, **options):
    """Sampling that guesses often hold under: greedy for even seeds."""
    return SamplingParams(
        temperature=seed % 2 * 0.9, top_k=0, seed=seed, max_tokens=max_tokens, logits_processor=repeat, **options
    )


def penalised(seed, max_tokens=8, **options):
    """As `repeating`, but a token becomes less likely with each time that it was drawn."""
    return repeating(seed, max_tokens, presence_penalty=0.75, frequency_penalty=0.5, **options)


def prompts(seed, count, longest, vocab_size=250):
    """Random prompts, many of which share their beginning with others."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, vocab_size, longest).astype(np.uint32) for _ in range(3)]
    made = []
    for _ in range(count):
        stem, own = stems[rng.integers(3)], rng.integers(0, vocab_size, longest).astype(np.uint32)
        length, shared = int(rng.integers(1, longest + 1)), int(rng.integers(0, longest + 1))
        made.append(np.concatenate([stem[:shared], own[shared:]])[:length])
    return made


class Alone:
    """The answer of each request alone, by the plain twin of the engines; answers are remembered.

    What stands behind parts of cached texts is answered by an `InferenceEngine`, which has no cache between requests.
    """

    def __init__(self, model, **options):
        self.texts, self.answers = PlainTexts(model, **options), {}
        self.model, self.options = model, options

    def __call__(self, prompt, params, prefix=None):
        key = prompt.tobytes(), params, *(() if prefix is None else (prefix.name,))
        if key not in self.answers:
            if prefix is None:
                self.answers[key] = self.texts.complete(prompt, params)
            else:
                engine = InferenceEngine(self.model, **self.options)
                self.answers[key] = engine.complete(prompt, params, prefix=prefix)
        return self.answers[key]

    def score(self, tokens):
        return self.texts.score(tokens)


def run(engine, check=True):
    """Step until nothing is left; returns the number of steps."""
    steps = 1
    while engine.step():
        steps += 1
        if check:
            engine.check()
    engine.check()
    return steps


def clocked(network, blocks=40, **options):
    """An engine with blocks of eight tokens, and its clock."""
    clock = Clock()
    return BatchEngine(network, block_size=8, num_blocks=blocks, clock=clock, **options), clock


def asked(engine, prompt, params=ONE, **options):
    """Submit a request, and step until it has ended."""
    request = engine.submit(prompt, params, **options)
    run(engine)
    return request


def same(completion, want):
    """Verify that a request gave what it gives alone, bit for bit in its log-probabilities."""
    assert completion.tokens == want.tokens
    assert completion.logprobs == want.logprobs
    assert completion.text == want.text
    assert completion.finish_reason == want.finish_reason


def settled(engine):
    """Verify that without requests only the prefix index holds blocks."""
    engine.check()
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.claimed_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == engine._pool.total_blocks
