"""A kind of layers that the library does not have, in one row and one class: it runs wherever layers do."""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pytest
from serving import Alone, Clock, prompts, repeating, run, same, sampled, settled
from state_networks import DIM, FULL, KV_HEADS, StateNetwork
from tier_stores import SECRET, ObjectStore

from kvcache import BatchEngine, InferenceEngine, InvalidOperationError, PrefixCachedEngine
from kvcache.texts.block_index import CachedStart
from kvcache.texts.cached_states import CachedStates, page_shape
from kvcache.texts.kinds import KINDS
from kvcache.texts.kinds.base import LayerKind, Layers
from kvcache.tiers import Tiers

pytestmark = pytest.mark.one_build

SIZE = KV_HEADS * DIM  # of V of a token
OPTIONS = {"block_size": 8, "dtype": "q8"}


class Sums(NamedTuple):
    """The place of a text: for each of its lengths from `first` on, the sum of V in each layer, `(layers, n, SIZE)`."""

    first: int
    sums: np.ndarray

    @property
    def end(self):
        return self.first + self.sums.shape[1] - 1


class MeanLayers(Layers):
    """Layers whose queries get the mean of V of all tokens up to their own, which is all that they keep."""

    reason, exact = "mean", True

    def __init__(self, layers, kept):
        self.layers, self.kept, self.ends = layers, kept, 1
        self.prefixes = () if kept is None else (kept.index,)
        self.new = {}  # by sequence, the sums of the pass that runs

    def has_room(self, text, found, start, running):
        return True

    def begin(self, seq_id, found, start):
        if not found:
            return Sums(0, np.zeros((len(self.layers), 1, SIZE), np.float32))
        if not len(start.blocks):
            raise InvalidOperationError("share: expected the sums of a prefix, got K and V alone")
        return Sums(found, np.stack(self.kept.read(start.blocks))[:, None])

    def fork(self, text, index, seq_id):
        return text.places[index]

    def attend(self, texts, index, ids, lens):
        def attend(layer, queries, keys, values, *_):
            i, stop, found = self.layers.index(layer), 0, np.empty((len(values), SIZE), np.float32)
            for text, count in zip(texts, lens.tolist(), strict=True):
                rows, stop = slice(stop, stop + count), stop + count
                before = self.sums(text, index).sums[i, text.computed - text.places[index].first]
                sums = np.add.accumulate([before, *values[rows].reshape(count, SIZE)])[1:]
                self.new.setdefault(text.seq_id, {})[i] = sums
                found[rows] = sums / np.arange(text.computed + 1, text.computed + count + 1, dtype=np.float32)[:, None]
            return found.reshape(-1, KV_HEADS, DIM).repeat(queries.shape[1] // KV_HEADS, axis=1)

        return attend, {}

    def sums(self, text, index):
        """The place of a text with the tokens of the pass that has run."""
        place, new = text.places[index], self.new.get(text.seq_id, {})
        if place.end >= text.computed or len(new) < len(self.layers):
            return place
        more = np.stack([new[i][: text.computed - place.end] for i in range(len(new))])
        return place._replace(sums=np.concatenate([place.sums, more], axis=1))

    def put(self, text, index, place):
        text.places = (*text.places[:index], place, *text.places[index + 1 :])

    def ran(self, text, index, before):
        self.put(text, index, self.sums(text, index))
        self.new.pop(text.seq_id, None)

    def nearest(self, text, index, pos):
        return pos if pos >= text.places[index].first else 0

    def cut(self, text, index, pos):
        first, sums = text.places[index]
        if pos < first:
            return self.begin(text.seq_id, 0, CachedStart(0))
        return Sums(first, sums[:, : pos - first + 1])

    def settle(self, text, index):
        self.new.clear()
        if self.kept is not None:
            self.kept.settle()
        return text is not None and text.places[index].end >= text.computed and super().settle(text, index)

    def longest(self, tokens, stop, space):
        return self.kept.longest(tokens, stop, space)

    def hold(self, tokens, stop, space, held):
        page = self.kept.hold(tokens, stop, space, held) if stop else np.empty(0, np.int64)
        return None if page is None else CachedStart(stop, stop, page)

    def keep(self, text, index, stop, ends=False):
        place = self.sums(text, index)
        for length in {stop, stop - 1, stop // self.ends * self.ends} if text.shares else ():
            if place.first < length <= place.end:
                self.kept.store(text.tokens[:length], text.space, list(place.sums[:, length - place.first]))

    def connect(self, tiers, name, index):
        self.ends = index.format.group_tokens
        source = tiers.state_source(f"means of {self.layers} of {blake2b(index.context).hexdigest()}", self.ends)
        self.kept.index.source = source
        return source

    def offered(self, text):
        return self.kept.offered(text.tokens[: text.computed], text.space, self.ends)

    def take(self, tokens, stop, space, bodies):
        self.kept.take(tokens, stop, space, bodies, self.ends)

    def positions(self, text, index, layer, head):
        return np.empty(0, np.int64)

    def memory(self, texts, index):
        return [] if self.kept is None else self.kept.memory()

    def check(self, texts, index):
        assert all(text.places[index].end == text.computed for text in texts)
        if self.kept is not None:
            self.kept.check()


def of(made, left):
    return [made.model.means] if hasattr(made.model, "means") else []


def nbytes(made, layers, blocks, cached):
    heads, dim = page_shape(SIZE)
    return 8 * heads * dim * len(layers) * (blocks if made.load.texts else cached)


def make(made, layers, blocks, cached):
    pages = blocks if cached is None else cached
    return MeanLayers(layers, CachedStates([SIZE] * len(layers), pages) if made.shares(cached) else None)


@pytest.fixture(autouse=True)
def a_row():
    row = LayerKind("mean", of, nbytes, make)
    KINDS.insert(0, row)
    yield
    KINDS.remove(row)


class Means(StateNetwork):
    """Four layers with K and V, two of which have `MeanLayers`."""

    means = (1, 3)

    def __init__(self):
        super().__init__("one of each")
        self.attention, self.recurrences = (FULL,) * 4, (None,) * 4
        self.fingerprint = "means"


class PlainMeans:
    """The same network for the plain twin: V of the mean's layers, of all tokens, is kept here."""

    def __init__(self):
        self.model = Means()
        self.config = self.model.config
        self.attention = tuple(None if layer in Means.means else FULL for layer in range(4))

    def forward(self, tokens, positions, attend, logits, **places):
        if positions[0] == 0:
            self.seen = {layer: np.zeros((0, SIZE), np.float32) for layer in Means.means}

        def attend_or_mean(layer, queries, keys, values):
            if layer not in Means.means:
                return attend(layer, queries, keys, values)
            self.seen[layer] = np.concatenate([self.seen[layer], values.reshape(-1, SIZE)])
            sums, count = np.zeros(SIZE, np.float32), np.float32(0)
            found = []
            for row in self.seen[layer]:
                sums, count = sums + row, count + np.float32(1)
                found.append(sums / count)
            return np.array(found[-len(queries) :]).reshape(-1, KV_HEADS, DIM).repeat(2, axis=1)

        return self.model.forward(tokens, positions, attend_or_mean, logits, **places)


def test_a_new_kind_runs_in_all_engines():
    """Texts that share beginnings, draft tokens, too little room, a step back: the bits of the plain twin."""
    model, alone = Means(), Alone(PlainMeans(), **OPTIONS)
    asked = [(text, repeating(i, 6, logprobs=1)) for i, text in enumerate(prompts(4, 9, 70))]
    one = InferenceEngine(model, **OPTIONS)
    assert [group.layers for group in one._sequence.pool.groups] == [(0, 2), (1, 3)]
    cached = PrefixCachedEngine(InferenceEngine(model, **OPTIONS), 40, strict=True)
    sizes = (60, None), (14, "ngram")
    many = [BatchEngine(model, num_blocks=blocks, draft=draft, clock=Clock(), **OPTIONS) for blocks, draft in sizes]
    for _ in range(2):
        for text, params in asked:
            want = alone(text, params)
            for engine in (one, cached):
                same(engine.complete(text, params), want)
                engine.check()
        for engine in many:
            requests = [(engine.submit(text, params), alone(text, params)) for text, params in asked]
            run(engine)
            for request, want in requests:
                same(request.completions()[0], want)
    assert many[1].stats().preemptions > 0
    found = cached.cache_stats(), many[0].cache_stats()
    assert all(stats.hit_tokens > 100 for stats in found)
    assert sum(stats.miss_reasons["mean"] for stats in found) > 0
    text = max((text for text, _ in asked), key=len)
    want = one.prefill_from_pos(text, 0)
    for engine in (one, cached.inner):  # behind a cached prefix there are no sums of its beginning: it begins anew
        for pos in (20, 5):
            cached.generate(text, max_tokens=1)
            found = engine.prefill_from_pos(text[pos:], pos)
            np.testing.assert_array_equal(found, want)
            engine.check()


def test_a_new_kind_is_counted_saved_and_in_tiers(tmp_path, monkeypatch):
    monkeypatch.setattr("kvcache.texts.arrivals.fingerprint", lambda model: model.fingerprint)
    model, text, params = Means(), prompts(4, 1, 300)[0], sampled(3, 12, logprobs=1)
    text = np.resize(text, 300).astype(np.uint32)
    want = Alone(PlainMeans(), **OPTIONS)(text, params)
    small = BatchEngine(model, max_memory_bytes=100_000, **OPTIONS)
    settings, blocks = small._settings, small._pool.total_blocks
    assert settings.kv_bytes(blocks) == blocks * (settings.block_bytes((0, 2)) + 2 * 4 * SIZE)
    assert settings.kv_bytes(blocks) <= 100_000 < settings.kv_bytes(blocks + 1)
    assert small.memory()["kv"] == settings.kv_bytes(blocks)

    first = PrefixCachedEngine(InferenceEngine(model, **OPTIONS), 80)
    same(first.complete(text, params), want)
    first.save(tmp_path / "saved", "means")
    again = PrefixCachedEngine(InferenceEngine(model, **OPTIONS), 80)
    assert again.load(tmp_path / "saved", "means") > 0
    found = again.complete(text, params)
    same(found, want)
    assert found.cached_tokens == 300
    again.check()

    store, tiers_over = ObjectStore(), lambda: Tiers([store], secret=SECRET, after_uses=1, head_start=60)
    for turn in range(2):
        with tiers_over() as tiers, BatchEngine(model, tiers=tiers, **OPTIONS) as engine:
            request = engine.submit(text, params)
            same(request.completions()[0], want)
            assert request.metrics.cached_tokens == turn * 256
            settled(engine)
            assert tiers.flush(60)
    with tiers_over() as tiers:
        cached = PrefixCachedEngine(InferenceEngine(model, **OPTIONS), 80, tiers=tiers)
        found = cached.complete(text, params)
        same(found, want)
        assert found.cached_tokens == 256
