"""A pool of each kind of group: random verbs over many texts keep every invariant, and change no bit of a text."""

from contextlib import suppress

import numpy as np
import pytest
from oracles.text import PlainTexts
from places import GOLDEN
from state_networks import StateNetwork
from windowed_networks import Windowed

from kvcache import EvictionPolicy, OutOfMemoryError
from kvcache.engine import Transformer
from kvcache.texts.forward import Forward
from kvcache.texts.kv_settings import Settings
from kvcache.texts.settings import CacheSettings, Load
from kvcache.texts.text import Text

pytestmark = pytest.mark.one_build

NETWORK = Transformer.from_pretrained(GOLDEN / "llama")
KINDS = {
    "whole": (NETWORK, {}),
    "groups of 12": (NETWORK, {"dtype": "q4", "residual_length": 12}),
    "a window": (Windowed(NETWORK, 10), {"dtype": "q8"}),
    "windows alone": (Windowed(NETWORK, 30, 5), {"dtype": "f16"}),
    "a state": (StateNetwork("one of each"), {}),
    "a state, groups of 12": (StateNetwork("one of each"), {"dtype": "q4", "residual_length": 12}),
    "states alone": (StateNetwork("states alone"), {}),
    "a state behind a window": (StateNetwork("behind a window"), {"dtype": "q8"}),
    "evicting": (NETWORK, {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 20}),
}


class Texts:
    """A pool, and texts of which each is compared to the plain twin that ran the same tokens."""

    def __init__(self, kind, seed, **limits):
        model, options = KINDS[kind]
        self.rng, self.evicts = np.random.default_rng(seed), kind == "evicting"
        settings = CacheSettings.of(model, Load(4, 512, spare=1), Settings(block_size=8, **limits, **options))
        self.pool = settings.pool(settings.total_blocks())
        self.forward, self.plain = Forward(model, self.pool), PlainTexts(model, block_size=8, **options)
        self.texts = []
        self.stem = self.rng.integers(0, 250, 60).astype(np.uint32)

    def start(self):
        head = self.stem[: int(self.rng.integers(1, 60))]
        tokens = np.concatenate([head, self.rng.integers(0, 250, int(self.rng.integers(1, 9))).astype(np.uint32)])
        text = Text(tokens)
        text.shares = not self.evicts
        if len(self.texts) < 4 and self.pool.start(text, self.texts):
            self.texts.append(text)

    def run(self):
        """One pass over all texts: a piece of each, as a scheduler chooses it."""
        pieces = []
        for text in self.texts:
            if not text.remaining:
                text.add(int(self.rng.integers(250)))
            if self.evicts:  # evictions depend on the pieces
                pieces.append((text, max(1, text.num_prompt - text.computed)))
            else:
                pieces.append((text, int(self.rng.integers(1, text.remaining + 1))))
        if not pieces:
            return
        try:
            self.pool.append(pieces)
        except OutOfMemoryError:
            return
        rows = self.forward.run([(text, count, 1) for text, count in pieces])
        for (text, count), logits in zip(pieces, rows, strict=True):
            self.pool.ran(text, count)
            self.pool.compact(text)
            if self.rng.random() < 0.4:
                self.pool.index(text)
            self.plain.begin()
            if self.evicts:
                want = self.plain.run(text.tokens[: text.num_prompt])
                for token in text.tokens[text.num_prompt : text.computed]:
                    want = self.plain.run(np.array([token]))
            else:
                want = self.plain.run(text.tokens[: text.computed])
            assert logits[-1].tobytes() == want[-1].tobytes()

    def fork(self):
        if self.texts and len(self.texts) < 4 and not self.evicts:
            text = self.texts[int(self.rng.integers(len(self.texts)))]
            other = Text(text.tokens.copy())
            self.pool.fork(text, other, text.computed)
            self.texts.append(other)

    def stop(self):
        if self.texts:
            self.pool.stop(self.texts.pop(int(self.rng.integers(len(self.texts)))))

    def broken(self):
        """A pass that ends behind its append: all texts begin again behind what is cached of them."""
        began, self.texts = self.texts, []
        if began:
            with suppress(OutOfMemoryError):
                self.pool.append([(text, 3) for text in began])
        for text in began:
            text.moved(-1, 0, ())
        self.pool.settle()
        self.pool.check([])
        for text in began:
            if self.pool.start(text, self.texts):
                self.texts.append(text)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_random_verbs(kind, seed):
    it = Texts(kind, seed)
    for _ in range(60):
        name = it.rng.choice(["start", "start", "run", "run", "run", "run", "fork", "stop", "broken"])
        getattr(it, name)()
        it.pool.check(it.texts)
    while it.texts:
        it.stop()
    it.pool.check([])
    it.pool.clear()
    assert it.pool.count()["free"] == it.pool.total_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_format_is_refused_by_name(kind):
    model, options = KINDS[kind]
    for length in (None, 0):
        with pytest.raises(ValueError, match="q9"):
            CacheSettings.of(model, Load(4, 512), Settings(**options | {"dtype": "q9", "residual_length": length}))


@pytest.mark.parametrize("kind", ["whole", "a window"])
def test_too_little_room_changes_nothing(kind):
    """An append that fails in the last group leaves the others as they were."""
    it = Texts(kind, 5, num_blocks=12)
    it.start()
    it.run()
    (text,) = it.texts
    before = text.computed, text.places, it.pool.count()["free"]
    with pytest.raises(OutOfMemoryError):
        it.pool.append([(text, 500)])
    assert (text.computed, text.places) == before[:2]
    it.pool.check([text])
