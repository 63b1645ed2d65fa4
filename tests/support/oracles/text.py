"""A plain twin of the engines: one text at a time, from its start, in a `PagedKvCache` that is made for it alone.

It has no pieces but those of a policy, no forks, no sharing, and it drops nothing but what a policy evicts: a layer
with a window keeps all tokens and attends to its window. So an engine with the same bits has lost nothing it reads.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from kvcache import InferenceEngine, PagedKvCache
from kvcache.core.locks import CallLock
from kvcache.engine import requests as single
from kvcache.engine.new_requests import NewRequests
from kvcache.networks.protocols import layer_attention, layer_recurrences
from kvcache.sampling.text_stream import TextStream

PIECE = 512  # tokens after which layers evict


class PlainTexts:
    """The answers of an `InferenceEngine` with `options`, one text after another.

    The engine is asked for its settings alone: how it stores K and V, and what a policy keeps.
    """

    def __init__(self, model, **options):
        settings = InferenceEngine(model, **options)
        cache = settings.cache
        self.model, self.attention = model, layer_attention(model)
        self.recurrences = layer_recurrences(model)
        self.budgets, self.lock = settings._budgets, threading.Lock()
        known = cache.calibration
        # The cache has some layers alone.
        if any(each and each.window for each in self.attention) and options.get("calibrate"):
            known = options["calibrate"].without_centres(range(model.config.num_layers))
        self.sparse_tokens = options.get("sparse_tokens")
        self.lists = self.budgets.lists if self.budgets else 1
        self.num_lists = model.config.num_layers * self.lists  # of tokens: a layer, or a KV head of it
        self.storage = {
            "block_size": cache.block_size, "num_heads": cache.num_heads, "head_dim": cache.head_dim,
            "num_layers": self.num_lists, "rotate": options.get("rotate", "auto"),
            "separate_layers": self.budgets is not None, "calibration": known,
            "residual_length": cache.residual_length, "first_tokens": cache.first_tokens,
            "key_dtype": options.get("key_dtype") or options.get("dtype", "f32"),
            "value_dtype": options.get("value_dtype") or options.get("dtype", "f32"),
        }
        if cache.index is not None:
            self.storage |= dict(zip(("index_layers", "index_dim", "index_dtype"), cache.index, strict=True))
        self.most = None if self.budgets and self.budgets.endless else model.config.max_position_embeddings
        self.tokenizer = None
        self.new = NewRequests(model.config, self.most, 0, CallLock(), lambda: self.tokenizer)
        self.begin()

    # -- a text ---------------------------------------------------------------------------------------------

    def begin(self):
        evicts = self.budgets is not None
        blocks, heads = self.num_lists * 200 if evicts else 1, self.lists
        attention = [each for each in self.attention if each is not None]
        sizes = {(each.num_kv_heads // heads, each.head_dim): each.latent for each in attention}
        self.caches = {
            size: PagedKvCache(blocks, **self.storage | _names_of(*size, latent)) for size, latent in sizes.items()
        }
        self.cache = next(iter(self.caches.values()), None)
        self.num_tokens, self.length = 0, 0
        for cache in self.caches.values():
            for i in range(self.num_lists if evicts else 1):
                cache.allocate(i, 0)
        self.states = {layer: np.zeros((1, each.size), np.float32) for layer, each in self.recurrences.items()}
        self.alive = [self.budgets.scoring.no_tokens] * self.num_lists if evicts else []

    def run(self, tokens, logits="last"):
        """Run the next tokens of the text; float32 `(1 or n, vocab)`."""
        rows = []
        run = self.run_whole if self.budgets is None else self.run_and_evict
        while len(tokens):
            most = len(tokens) if self.budgets is None else self.piece - self.num_tokens % self.piece
            piece, tokens = tokens[:most], tokens[most:]
            rows.append(run(piece, "all" if logits == "all" else "none" if len(tokens) else "last"))
            self.num_tokens += len(piece)
        return np.concatenate(rows)

    @property
    def piece(self):
        return self.budgets.piece(PIECE, self.model.config.max_position_embeddings)

    def places(self):
        regime = getattr(self.model, "regime", None)
        if regime is None or regime(1) == regime(self.model.config.max_position_embeddings):
            return {}
        return {"regime": regime(self.length)}

    def run_whole(self, tokens, logits):
        count = len(tokens)
        for cache in self.caches.values():
            cache.grow(max(0, -(-(self.num_tokens + count) // cache.block_size) - cache.total_blocks))
            cache.append(0, count)

        chosen = None

        def attend(layer, queries, keys, values, _=None, rows=None):
            nonlocal chosen
            attention = self.attention[layer]
            owner, cache = attention.kv_layer, self.caches[attention.num_kv_heads, attention.head_dim]
            if owner is None:
                cache.write(layer, 0, keys, values)
            own = layer if owner is None else owner
            top = None if attention.window else self.sparse_tokens
            options = attention.options() | {"top_tokens": top}
            mixed = cache.attention(own, queries, [0], query_lens=[len(queries)], **options)
            if (index := attention.index) is None:
                return mixed
            if index.own:
                number = len(self.attention) + sum(each.index.own for each in self.attention[:layer])
                cache.write(number, 0, rows.keys)
                chosen = cache.choose_tokens(
                    number, rows.queries, rows.weights, [0], index.most, query_lens=[len(queries)]
                )
            few = max(0, index.most - self.num_tokens)  # the queries that see all tokens
            listed = cache.attention(own, queries, [0], query_lens=[len(queries)], tokens=chosen, **options)
            return np.concatenate([mixed[:few], listed[few:]])

        def recur(layer, rows):
            zero = np.zeros(1, np.int64)
            return self.recurrences[layer].run(rows, self.states[layer], zero, np.array([count]))

        positions = np.arange(self.num_tokens, self.num_tokens + count)
        states = {"recur": recur} if self.recurrences else {}
        return self.model.forward(tokens, positions, attend, logits, **self.places(), **states)

    def run_and_evict(self, tokens, logits):
        cache, count, budgets, pos = self.cache, len(tokens), self.budgets, self.num_tokens
        hole = pos - len(self.alive[0].positions) if budgets.endless else 0
        drawn = {}

        def attend(layer, queries, keys, values, sink_queries=None):
            mixed = []
            for head in range(self.lists):
                i, options = layer * self.lists + head, self.attention[layer].options()
                cache.append(i, count)
                mine, own, turned = (
                    rows if rows is None else np.split(rows, self.lists, axis=1)[head].copy()
                    for rows in (queries, np.stack([keys, values], axis=2), sink_queries)
                )
                cache.write(i, i, own[:, :, 0], own[:, :, 1])
                if "sinks" in options:
                    options["sinks"] = np.split(options["sinks"], self.lists)[head]
                options, ids = {**options, "sink_queries": turned}, np.array([i], np.uint64)
                found, drawn[i] = budgets.scoring.attend(cache, i, mine, ids, np.array([count]), options)
                mixed.append(found)
            return np.concatenate(mixed, axis=1)

        places = {"sink_positions": np.arange(pos - hole, pos - hole + count)} if hole else {}
        rows = self.model.forward(tokens, np.arange(pos, pos + count), attend, logits, **places)
        for layer, rule in enumerate(budgets.rules):
            own = range(layer * self.lists, (layer + 1) * self.lists)
            lists = [budgets.scoring.add(self.alive[i], pos, count, drawn[i]) for i in own]
            if sum(len(each.positions) for each in lists) > self.lists * rule.limit:
                kept = budgets.keep(layer, lists, pos + count, [partial(cache.read, i, i) for i in own])
                lists = [budgets.scoring.keep(*each) for each in zip(lists, kept, strict=True)]
                for i, each in zip(own, kept, strict=True):
                    if budgets.endless:
                        cache.apply_streaming_llm(i, rule.front, rule.back)
                    else:
                        cache.keep_tokens(i, each)
                    cache.compact(i)
            self.alive[own.start : own.stop] = lists
        return rows

    # -- answers --------------------------------------------------------------------------------------------

    def complete(self, prompt, params, tokenizer=None):
        with self.lock:  # tests ask from several threads
            self.tokenizer = tokenizer
            shared = self.new.shared(params, with_text=True)
            request = self.new.request(self.new.prompt(prompt), shared)
            if tokenizer is not None:
                request.text = TextStream(tokenizer, request.tokens, shared.stop_strings)
            return request.complete(self.answer(request))

    def answer(self, request):
        self.begin()
        self.length = len(request.tokens)
        logits, text = self.run(request.tokens)[-1], list(request.tokens)
        stops = {*request.params.stop_token_ids, *getattr(self.model.config, "eos_token_ids", ())}
        for left in reversed(range(request.params.max_tokens)):
            token = request.sampler.sample(logits)
            if token in stops:
                request.finish_reason = "stop"
                return
            request.observe(token, logits)
            yield token
            text.append(token)
            if left == 0 or request.is_stopped() or len(text) - 1 == self.most:
                return
            logits = self.go_on(text)

    def go_on(self, text):
        """The logits after the newest token; a text that enters another regime runs again from its start."""
        before, self.length = self.places(), len(text)
        new = text[-1:]
        if self.places() != before:
            self.begin()
            self.length, new = len(text), text
        return self.run(np.array(new, np.uint32))[-1]

    def score(self, tokens):
        """As `InferenceEngine.score`."""
        with self.lock:
            self.begin()
            self.length = len(tokens) - 1
            scores, chunk = [], max(1, min(PIECE, single.SCORE_FLOATS // self.model.config.vocab_size))
            if self.budgets is not None:
                chunk = min(chunk, self.piece)
            for start in range(0, len(tokens) - 1, chunk):
                piece = tokens[start : min(start + chunk, len(tokens) - 1)]
                targets = tokens[start + 1 : start + 1 + len(piece)]
                scores.append(single.log_probabilities(self.run(piece, "all"), targets))
        return np.concatenate([np.empty(0), *scores]).astype(np.float32)


def _names_of(num_heads, head_dim, latent):
    """The arguments of a cache about its sizes."""
    if latent is None:
        return {"num_heads": num_heads, "head_dim": head_dim}
    return {"num_heads": None, "head_dim": None, "latent": (latent, head_dim - latent)}
