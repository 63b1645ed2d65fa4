"""Ctrl-C at every line of a request that fetches and stores: nothing is pinned, and the next request works."""

import pytest
from pace import FAST
from places import GOLDEN
from prefix_engines import SHORT, prompt, settled
from subjects.interrupts import Lines, places, spread
from tier_stores import SECRET, ObjectStore

from kvcache.engine import InferenceEngine, PrefixCachedEngine, Transformer
from kvcache.tiers import Tiers

pytestmark = [pytest.mark.exhaustive, pytest.mark.one_build]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_interrupted_at_every_line(name, long):
    model, text = Transformer.from_pretrained(GOLDEN / name), prompt(1, 200)
    want = InferenceEngine(model).generate(text, SHORT)
    store = ObjectStore()
    with Tiers([store], secret=SECRET, after_uses=1) as tiers:
        PrefixCachedEngine(InferenceEngine(model), 20, tiers=tiers).generate(text, SHORT)
        assert tiers.flush(60)

    def served(bucket):
        """A cache that is full of another text, which a request evicts while it fetches."""
        tiers = Tiers([ObjectStore(dict(bucket))], secret=SECRET, after_uses=1, head_start=60)
        cached = PrefixCachedEngine(InferenceEngine(model), 20, tiers=tiers, strict=True)
        cached.generate(prompt(2, 300), SHORT)
        assert tiers.flush(60)
        return cached

    for bucket in (store.bucket, {}):
        clean = served(bucket)
        with Lines() as lines:
            clean.generate(text, SHORT)
        for stop in spread(places(lines.seen, every=long), 10**9 if long else 10 if FAST else 30):
            cached = served(bucket)
            try:
                with Lines(stop):
                    assert cached.generate(text, SHORT) == want
            except KeyboardInterrupt:
                pass
            settled(cached)
            assert cached.generate(text, SHORT) == want
            assert cached.generate(prompt(2, 300), SHORT)
            settled(cached)
            assert cached._arrivals.source._lookups == []
            assert cached._arrivals.source._expected == {}
            assert cached.close(60)
