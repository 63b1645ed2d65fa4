"""Pairs of calls that take several locks, in two threads; `test_lock_order.py` runs them in a separate process.

python -m systems.lock_order PAIR ROUNDS FOLDER
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from pathlib import Path

import numpy as np
from contents import pairs, state
from places import GOLDEN

from kvcache import InvalidOperationError, KvCache, PagedKvCache, PrefixCache, PrefixCacheConfig, PrefixKvCache
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams, Transformer

TEXT = np.arange(24, dtype=np.uint32)
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=2)
PROMPT = np.arange(3, 40, dtype=np.uint32)


def both(rounds, *work):
    """Run each function of `work` repeatedly in its own thread; returns the number of calls."""
    errors, start = [], threading.Barrier(len(work))

    def loop(call):
        try:
            start.wait(60)
            for i in range(rounds):
                call(i)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=loop, args=(call,), daemon=True) for call in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return rounds * len(work)


def filled(name):
    cache = PrefixCache(8, 4, 2, 1, 8)
    cache.store(TEXT, 0, pairs(name, TEXT, 4, 1, 8), name)
    return cache


def holds(cache, name):
    """Check that the cache has the text, with the rows of this name."""
    matched, blocks = cache.lookup(TEXT, name)
    assert matched == 24, f"{matched} tokens of {name}"
    for block, (keys, values) in zip(blocks, pairs(name, TEXT, 4, 1, 8), strict=True):
        for got, want in zip([*block.keys, *block.values], [*keys, *values], strict=True):
            np.testing.assert_array_equal(got, want)
        cache.release(block.index)


def saves(rounds, folder):
    """`save(beside=)` and `load(beside=)` of two caches, in both orders."""
    one, two = filled("one"), filled("two")

    def work(first, second, names, path):
        def call(i):
            first.save(path, beside=[second])
            fresh = [PrefixCache(8, 4, 2, 1, 8) for _ in names]
            order = (0, 1) if i % 2 else (1, 0)
            if order[0] == 0:
                assert fresh[0].load(path, beside=[fresh[1]]) == 6
                for cache, name in zip(fresh, names, strict=True):
                    holds(cache, name)
            holds(first, names[0])
            holds(second, names[1])

        return call

    return both(rounds, work(one, two, ("one", "two"), folder / "a"), work(two, one, ("two", "one"), folder / "b"))


def saves_over_one(rounds, folder):
    """The same with two caches over one paged cache and two over another, while sequences adopt blocks."""
    names = ("one", "two")
    pools = [PagedKvCache(40, 4, 1, 8, num_layers=2, dtype="f32") for _ in range(2)]
    caches = [PrefixCache.over(pool, 16) for pool in (pools[0], pools[0], pools[1])]
    for cache, name in zip(caches, (*names, "three"), strict=True):
        cache.store(TEXT, 0, pairs(name, TEXT, 4, 1, 8), name)

    def work(first, others, seq, path):
        def call(i):
            caches[first].save(path, beside=[caches[other] for other in others])
            holds(caches[first], (*names, "three")[first])
            pool = pools[first == 2]
            with caches[first].open_session(TEXT, (*names, "three")[first]) as session:
                pool.adopt(seq, session.shared_blocks, session.num_tokens)
            pool.append(seq, 3)
            pool.free(seq)
            try:
                caches[first].load(path, beside=[caches[other] for other in others])
                raise AssertionError("loaded into a cache that is full")
            except InvalidOperationError:
                pass

        return call

    orders = ((0, (1, 2)), (1, (2, 0)), (2, (0, 1)), (2, (1, 0)))
    count = both(rounds, *(work(first, others, n, folder / str(n)) for n, (first, others) in enumerate(orders)))
    for cache in caches:
        cache.check()
        cache.clear()
    assert all(pool.free_block_count == 40 for pool in pools)
    return count


def states(rounds, folder):
    """Two caches that store each other's states and restore them to one live cache."""
    config = PrefixCacheConfig(min_prefix_len=1, max_entries=200, dtype="q8")
    caches, live = [PrefixKvCache(config) for _ in range(2)], [KvCache(2, 30, 8) for _ in range(2)]
    whole = state(None, TEXT, 8)
    for cache in caches:
        cache.store_snapshot(TEXT, whole)

    def work(here, there):
        def call(i):
            n = 1 + i % 24
            matched, lent = caches[there].lookup(TEXT[:n])
            assert matched == n
            caches[here].store_snapshot(np.concatenate([TEXT[:n] + here + 100]), lent)
            caches[here].restore(lent, live[i % 2])
            caches[here].store(TEXT[:n], live[here], 0, 8, 2) if n < 1 else None
            error = max(np.abs(a - b[: n * 8]).max() for a, b in zip(lent.keys, map(np.ravel, whole.keys), strict=True))
            assert error < 0.02, f"rows of another text, off by {error}"
            live[(i + 1) % 2].snapshot()
            if i % 50 == 0:
                caches[here].save(folder / str(here))

        return call

    count = both(rounds, work(0, 1), work(1, 0), work(0, 0), work(1, 1))
    for it in (*caches, *live):
        it.check()
    return count


def new_engine(cached, **options):
    model = Transformer.from_pretrained(GOLDEN / "llama")
    engine = InferenceEngine(model, prefill_chunk=16, num_blocks=12, **options)
    return PrefixCachedEngine(engine, 6, strict=True) if cached else engine


def answering(it, answers):
    def call(i):
        cut = 20 + i % 3 * 8
        answer = it.generate(PROMPT[:cut], GREEDY)
        assert answers.setdefault(cut, answer) == answer, f"answered {answer}"

    return call


def engines(rounds, folder):
    """Two engines that share a network, with streams of both in both threads."""
    one, two, answers = new_engine(False), new_engine(True), {}

    def streams(first, second):
        def call(i):
            for it in (first, second):
                stream = it.stream(PROMPT[:20], GREEDY)
                answers.setdefault("stream", next(stream))
                stream.close() if i % 2 else list(stream)

        return call

    return both(rounds, streams(one, two), streams(two, one), answering(one, answers), answering(two, answers))


def engine_and_cache(rounds, folder):
    """An engine, and calls on its cache and its prefix cache at the same time."""
    it, answers = new_engine(True, dtype="q4", residual_length=12), {}
    cache, prefixes = it.inner.cache, it.prefix_cache

    def beside(i):
        cache.stats()
        cache.check()
        with prefixes.prepare(PROMPT)[0] as session:
            cache.reference_counts(session.shared_blocks)
        it.check() if i % 5 == 0 else it.cache_stats()
        if i % 7 == 0:
            it.clear_cache()

    count = both(rounds, answering(it, answers), answering(it, answers), beside, beside)
    it.check()
    assert prefixes.cache.pinned_blocks == 0
    return count


def engine_and_save(rounds, folder):
    """An engine saves its caches, the cache of unpacked groups included, while streams run."""
    it, answers = new_engine(True, dtype="q4", residual_length=12), {}

    def saving(i):
        it.save(folder / "engine", "m")
        if i % 10 == 0:
            fresh = new_engine(True, dtype="q4", residual_length=12)
            fresh.load(folder / "engine", "m")
            answering(fresh, answers)(i)
            fresh.check()

    def streaming(i):
        stream = it.stream(PROMPT[: 20 + i % 3 * 8], GREEDY)
        next(stream)
        del stream

    return both(rounds, saving, streaming, answering(it, answers))


PAIRS = {call.__name__: call for call in (saves, saves_over_one, states, engines, engine_and_cache, engine_and_save)}


def main(pair, rounds, folder):
    logging.disable()
    faulthandler.dump_traceback_later(60 + int(rounds), exit=True)
    print(PAIRS[pair](int(rounds), Path(folder)), "calls")


if __name__ == "__main__":
    main(*sys.argv[1:])
