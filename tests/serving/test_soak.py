"""Many requests over a pool twenty times too small for those at once in flight; --long: 10,000 of them."""

import gc

import numpy as np
import pytest
from pace import FAST
from serving import Alone, Clock, prompts, repeating, same, sampled, settled
from windowed_networks import Windowed

from kvcache import BatchEngine, QueueFullError

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]


OPTIONS = {"q8": {"dtype": "q8"}, "residual": {"dtype": "q4", "residual_length": 12}, "windows": {"dtype": "f16"}}


@pytest.mark.parametrize("kind", OPTIONS)
def test_soak(network, long, kind):
    """64 in flight need some 64 * 6 blocks of 16 tokens; there are 18. Every answer is right, and nothing is left."""
    options, network = OPTIONS[kind], Windowed(network, 20) if kind == "windows" else network
    count, rng = 5_000 if long else 40 if FAST else 80, np.random.default_rng(11)
    alone, texts = Alone(network, **options), prompts(13, 40, 60)
    engine = BatchEngine(network, num_blocks=18, max_queue=64, clock=Clock(), **options)
    flying, ended, cancelled = [], 0, 0
    while ended < count:
        while len(flying) < 64 and ended + len(flying) < count:
            which, seed = int(rng.integers(len(texts))), int(rng.integers(3))
            params = (sampled, repeating)[seed % 2](seed, int(rng.integers(1, 5)) * 24, logprobs=0)
            try:
                request = engine.submit(texts[which], params, priority=int(rng.integers(2)))
            except QueueFullError:
                break
            flying.append((request, texts[which], params))
        if rng.random() < 0.05:
            flying[rng.integers(len(flying))][0].cancel()
        engine.step()
        for entry in [entry for entry in flying if entry[0].is_finished]:
            flying.remove(entry)
            ended += 1
            request, prompt, params = entry
            want = alone(prompt, params)
            if request.finish_reason == "cancelled":
                cancelled += 1
                assert request.tokens == want.tokens[: len(request.tokens)]
            else:
                same(request.completions()[0], want)
    gc.collect()
    settled(engine)
    stats = engine.stats()
    assert (stats.finished, len(engine._steps._pending)) == (count, 0)
    assert cancelled > 0
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
