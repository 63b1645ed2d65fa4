"""Subjects of the engines."""

import gc
from typing import ClassVar

import numpy as np
from places import GOLDEN
from seeded_weights import seeded
from subjects.caches import sequences
from subjects.subject import Subject
from windowed_networks import Windowed

from kvcache import Calibration, EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

MODEL = Transformer.from_pretrained(GOLDEN / "llama")
CALIBRATION = Calibration(np.random.default_rng(0).standard_normal((2, 2, 16)))
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=3)


class Engine(Subject):
    options: ClassVar[dict[str, object]] = {}

    def _build(self):
        engine = InferenceEngine(MODEL, prefill_chunk=16, num_blocks=40, **self.options)
        self.text = np.arange(3, 43, dtype=np.uint32)
        engine.prefill_from_pos(self.text, 0)
        return engine

    def _state(self):
        it = self.it
        seqs, _, free, *_ = sequences(it.cache)
        content = [entry[3] for _, entry in sorted(seqs.items())]
        return content, free, it.num_tokens, it.prefill_token_count

    def prefill(self):
        self.it.prefill_from_pos(self.text[:37], 40)

    def go_back(self):
        self.it.prefill_from_pos(self.text[:20], 30)

    def decode_step(self):
        self.it.decode_step(7, 40)


class Residual(Engine):
    """An engine with the newest group in full beside the cache; one piece of the prompt fills several groups."""

    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}
    prefill = Engine.prefill
    go_back = Engine.go_back
    decode_step = Engine.decode_step

    def _state(self):
        cache, seq_id = self.it.cache, self.it.seq_id
        rows = [[side.tobytes() for side in cache.read_unpacked(layer, seq_id)] for layer in range(cache.num_layers)]
        return *super()._state(), cache.unpacked_tokens(seq_id), rows


class Calibrated(Residual):
    """An engine with centred keys, and the first tokens in full before each group."""

    options: ClassVar[dict[str, object]] = Residual.options | {"calibrate": CALIBRATION}
    prefill = Engine.prefill
    decode_step = Engine.decode_step

    def go_back(self):
        self.it.prefill_from_pos(self.text[:20], 5)


class CalibratedAlone(Calibrated):
    """An engine with the first tokens in full and no group."""

    options: ClassVar[dict[str, object]] = Calibrated.options | {"residual_length": 0}
    prefill = Engine.prefill
    go_back = Calibrated.go_back
    decode_step = Engine.decode_step


class WindowedLayers(Engine):
    """A layer keeps its window alone; both operations drop tokens of it, one cuts the text before."""

    def _build(self):
        engine = InferenceEngine(Windowed(MODEL, 10), prefill_chunk=16, num_blocks=60, block_size=4)
        self.text = np.arange(3, 203, dtype=np.uint32)
        engine.prefill_from_pos(self.text[:120], 0)
        return engine

    def _state(self):
        windows = [sequences(group.cache)[0] for group in self.it._sequence.pool.groups[1:]]
        content = [[entry[3] for _, entry in sorted(seqs.items())] for seqs in windows]
        firsts = [place.first for place in self.it._sequence.text.places[1:]]
        return *super()._state(), content, firsts

    def prefill(self):
        self.it.prefill_from_pos(self.text[:37], 120)

    def go_back(self):
        self.it.prefill_from_pos(self.text[:35], 110)


class Evicting(Engine):
    """Without memory it compacts later, so the number of free blocks may differ."""

    options: ClassVar[dict[str, object]] = {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 24}
    prefill = Engine.prefill
    decode_step = Engine.decode_step

    def _state(self):
        content, _, *rest = super()._state()
        return content, rest


class EvictingResidual(Evicting):
    """The same with the newest tokens in full."""

    options: ClassVar[dict[str, object]] = Evicting.options | {"dtype": "q4", "residual_length": 12}
    prefill = Engine.prefill
    decode_step = Engine.decode_step


class Served(Subject):
    """A request replaces the sequence before it. The prefix cache must stay, and the next answer must be right."""

    options: ClassVar[dict[str, object]] = {}
    model: ClassVar[object] = MODEL

    def _build(self):
        engine = InferenceEngine(self.model, prefill_chunk=16, num_blocks=12, **self.options)
        cached = PrefixCachedEngine(engine, 5, strict=True)
        self.text = np.arange(3, 63, dtype=np.uint32)
        cached.generate(self.text[:40], GREEDY)
        cached.generate(self.text[20:60], GREEDY)
        return cached

    def _state(self):
        return self.answer if hasattr(self, "answer") else None

    def _check(self):
        gc.collect()
        self.it.check()
        for prefixes in (self.it.prefix_cache.cache, *self.it._pool.prefixes[1:]):
            assert prefixes.references().sum() == len(prefixes), "something is pinned or lost"

    def generate(self):
        self.answer = self.it.generate(self.text[:50], GREEDY)

    def stream(self):
        self.answer = list(self.it.stream(self.text[20:55], GREEDY))


class ServedResidual(Served):
    """The same where groups are kept in full: the second request finds them in the cache."""

    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}
    generate = Served.generate
    stream = Served.stream


class ServedStates(Served):
    """The same if layers keep a state, of which few are cached."""

    model = Transformer.from_pretrained(seeded("lfm2"))
    generate = Served.generate
    stream = Served.stream


class ServedWindows(Served):
    """The same where a layer keeps its window alone, and one window fits the cache beside the request's."""

    model = Windowed(MODEL, 20)
    generate = Served.generate
    stream = Served.stream
