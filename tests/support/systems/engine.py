"""Systems of the engines for `reentry.py`: requests with known answers."""

import gc
from typing import ClassVar

import numpy as np
from places import GOLDEN
from systems.system import System, pure, release
from windowed_networks import Windowed

from kvcache import EvictionPolicy
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

MODEL = Transformer.from_pretrained(GOLDEN / "llama")
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=3)
TEXT = np.random.default_rng(5).integers(0, 200, 90).astype(np.uint32)
PROMPTS = [TEXT[:20], TEXT[:33], TEXT[40:60]]


class Network:
    """A network that makes nested calls before and after its attention."""

    def __init__(self, system, model=MODEL):
        self.system, self.model, self.config, self.fingerprint = system, model, model.config, "a network"
        self.attention = getattr(model, "attention", None)

    def forward(self, tokens, positions, attend, logits, **places):
        def calling(*args):
            self.system.wrap.run()
            mixed = attend(*args)
            self.system.wrap.run()
            return mixed

        return self.model.forward(tokens, positions, calling, logits, **places)


class EngineSystem(System):
    options: ClassVar[dict[str, object]] = {}
    model: ClassVar[object] = MODEL
    answers: ClassVar[dict[object, list[list[int]]]] = {}
    rare = ("enlarge", "score", "generate")
    slow = 8

    def _build(self):
        self.engine = InferenceEngine(Network(self, self.model), prefill_chunk=16, num_blocks=24, **self.options)
        self.streams = []
        self.engine.generate(PROMPTS[0], GREEDY)
        self._remember(type(self))

    @classmethod
    def _remember(cls, key):
        if key not in cls.answers:
            cls.answers[key] = [
                InferenceEngine(cls.model, prefill_chunk=16, **cls.options).generate(p, GREEDY) for p in PROMPTS
            ]

    def _face(self):
        return self.engine

    def _which(self):
        return self.random.randrange(len(PROMPTS))

    def generate(self, wrap):
        which = self._which()
        answer = self._face().generate(wrap.tokens(PROMPTS[which]), GREEDY)
        assert answer == self.answers[type(self)][which], f"answered {answer}"
        return answer

    def open_stream(self, wrap):
        which = self._which()
        self.streams.append([self._face().stream(wrap.tokens(PROMPTS[which]), GREEDY), which, []])

    def next_token(self, wrap):
        entry = self.random.choice(self.streams)
        stream, which, got = entry
        for token in stream:
            got.append(token)
            assert got == self.answers[type(self)][which][: len(got)], f"streamed {got}"
            return token
        return None

    @release
    def close_stream(self, wrap):
        self.streams.pop()[0].close()

    @release
    def drop_stream(self, wrap):
        self.streams.pop(0)

    def score(self, wrap):
        return self.engine.score(wrap.tokens(PROMPTS[1]))

    def reset(self, wrap):
        self.engine.reset()

    def begin(self, wrap):
        def share(cache, seq_id):
            wrap.run()
            cache.allocate(seq_id, 0)
            wrap.run()
            return 0

        return self.engine.begin(share)

    def prefill(self, wrap):
        return self.engine.prefill_from_pos(wrap.tokens(TEXT[60:70]), wrap.integer(self.engine.num_tokens))

    def prefill_anew(self, wrap):
        return self.engine.prefill_from_pos(wrap.tokens(TEXT[60:80]), 0)

    def decode_step(self, wrap):
        return self.engine.decode_step(wrap.integer(7), self.engine.num_tokens)

    def decode(self, wrap):
        logits = self.engine.prefill_from_pos(TEXT[:5], 0)
        stream = self.engine.decode(logits, GREEDY, wrap.array(TEXT[:5]))
        return [next(stream), next(stream)]

    @pure
    def reports(self, wrap):
        it = self.engine
        return it.num_tokens, it.prefill_token_count, repr(it), it.kv_budget, str(it.eviction_policy), it.tokenizer

    @pure
    def kept(self, wrap):
        return self.engine.kept_positions(wrap.integer(1)), self.engine.alive_tokens(wrap.integer(0))

    @pure
    def ids(self, wrap):
        return self.engine.seq_id, self.engine.version

    @pure
    def check(self, wrap):
        self.engine.check()

    def reseed(self, wrap):
        self.engine.reseed(wrap.integer(3))

    def set_reclaim(self, wrap):
        def reclaim(error):
            wrap.run()
            return False

        self.engine.reclaim = reclaim
        return self.engine.reclaim is reclaim

    def enlarge(self, wrap):
        if self.engine.cache.total_blocks < 30:
            self.engine.enlarge(wrap.integer(1))

    @pure
    def cache_reports(self, wrap):
        cache = self.engine.cache
        return cache.sequence_ids(), cache.num_sequences, str(cache.block_table(wrap.array(cache.sequence_ids())))

    @pure
    def cache_check(self, wrap):
        self.engine.cache.check()

    def cache_read(self, wrap):
        return self.engine.cache.read(0, self.engine.cache.sequence_ids()[0])[0].shape

    def cache_allocate(self, wrap):
        self.engine.cache.allocate(100 + self.random.randrange(5), 3)

    @release
    def cache_free(self, wrap):
        self.engine.cache.free(100 + self.random.randrange(5))

    def _verify(self):
        for entry in self.streams:
            entry[0].close()
        self.streams.clear()
        gc.collect()
        self.engine.check()
        self.engine.reclaim = None
        cache = self.engine.cache
        cache.free_batch([seq for seq in cache.sequence_ids() if seq >= 100])
        self._counted()
        answer = self._face().generate(PROMPTS[1], GREEDY)
        assert answer == self.answers[type(self)][1], f"answered {answer}"
        self.engine.check()

    def _counted(self):
        cache, layers = self.engine.cache, self.engine.config.num_layers if self.engine.kv_budget else 1
        owned = cache.sequence_ids()
        assert len(owned) == layers, f"sequences {owned}"
        held = {block for seq in owned for block in cache.get_sequence(seq).block_ids}
        assert cache.used_block_count == len(held), "blocks are lost"

    def _finish(self):
        self.engine.reset()
        assert self.engine.cache.used_block_count == 0


class ResidualSystem(EngineSystem):
    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}


class EvictingSystem(EngineSystem):
    options: ClassVar[dict[str, object]] = {"eviction_policy": EvictionPolicy.H2O(), "kv_budget": 24, "block_size": 4}

    def _build(self):
        self.engine = InferenceEngine(Network(self, self.model), prefill_chunk=16, **self.options)
        self.streams = []
        self.engine.generate(PROMPTS[0], GREEDY)
        self._remember(type(self))

    def enlarge(self, wrap):
        pass


class CachedSystem(EngineSystem):
    """An engine with a prefix cache; half of the requests are in a namespace."""

    rare = ("save", "load", "enlarge", "score", "generate", "enlarge")

    def _build(self):
        engine = InferenceEngine(Network(self, self.model), prefill_chunk=16, num_blocks=16, **self.options)
        self.cached = PrefixCachedEngine(engine, 6, strict=True)
        self.engine, self.streams, self.sessions = engine, [], []
        self.cached.generate(PROMPTS[0], GREEDY)
        self._remember(type(self))

    def _face(self):
        return self.cached

    def enlarge(self, wrap):
        pass  # the prefix cache uses the current cache

    def generate_in_a_namespace(self, wrap):
        which = self._which()
        answer = self.cached.generate(wrap.tokens(PROMPTS[which]), GREEDY, namespace=wrap.name("b"))
        assert answer == self.answers[type(self)][which], f"answered {answer}"
        return answer

    def clear_cache(self, wrap):
        self.cached.clear_cache()

    def save(self, wrap):
        self.cached.save(self.path / type(self).__name__, "m")

    def load(self, wrap):
        self.save(wrap)
        self.cached.clear_cache()
        return self.cached.load(self.path / type(self).__name__, "m")

    @pure
    def cache_stats(self, wrap):
        return str(self.cached.cache_stats())

    @pure
    def cached_check(self, wrap):
        self.cached.check()

    def prepare(self, wrap):
        self.sessions.append(self.cached.prefix_cache.prepare(wrap.tokens(PROMPTS[0]))[0])

    @release
    def release_session(self, wrap):
        self.cached.prefix_cache.release_session(self.sessions.pop())

    def evict(self, wrap):
        return self.cached.prefix_cache.cache.evict(2)

    def _counted(self):
        self.sessions.clear()
        self.cached.check()
        cache, prefixes = self.engine.cache, self.cached.prefix_cache.cache
        assert len(cache.sequence_ids()) == 1
        for each in (prefixes, *self.cached._pool.prefixes[1:]):
            assert each.pinned_blocks == 0, "something is held"
            assert each.references().sum() == len(each)
        held = set(cache.get_sequence(self.engine.seq_id).block_ids) | set(prefixes.block_ids())
        assert cache.used_block_count == len(held), "blocks are lost"

    def _finish(self):
        self.engine.reset()
        self.cached.clear_cache()
        assert self.engine.cache.used_block_count == 0


class CachedResidualSystem(CachedSystem):
    options: ClassVar[dict[str, object]] = {"dtype": "q4", "residual_length": 12}


class CachedWindowsSystem(CachedSystem):
    model = Windowed(MODEL, 10)

    def begin(self, wrap):
        pass  # needs the windows of the text too
