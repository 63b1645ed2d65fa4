"""Figures of a `BatchEngine` for servers: evictions, counters of namespaces, times, log lines; and an exporter."""

from __future__ import annotations

import logging
import os
import re
import threading
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from places import GOLDEN
from prefix_states import config, state
from serving import GREEDY, Clock, prompts, repeat

from kvcache import BatchEngine, InvalidOperationError, PrefixCache, PrefixKvCache, SamplingParams
from kvcache.engine import Transformer
from kvcache.serving import exposition, observed
from kvcache.tiers.links import FAILURES, Link

pytestmark = pytest.mark.one_build
SIZE = 4


def make(network, **options):
    return BatchEngine(network, block_size=SIZE, **{"num_blocks": 24, "max_running": 4} | options)


def run(engine):
    while engine.step():
        pass


def test_evictions_are_told(network):
    """Each eviction names its text, its cause and its tokens; the sums are those of the index."""
    events, texts, clock = [], {}, Clock()

    def told(event):
        counted = threading.Thread(target=engine.check)  # waits for ever if a lock of the engine is held
        counted.start()
        counted.join(20)
        assert not counted.is_alive()
        events.append(event)

    engine = make(network, on_eviction=told, clock=clock)
    for i, prompt in enumerate(prompts(3, 40, 40)):
        name = ("a", "b", None, 7)[i % 4]
        request = engine.submit(prompt, GREEDY, namespace=name)
        texts.setdefault(name, []).append((request, prompt))
        if i % 3 == 2:
            run(engine)
    run(engine)
    requests = {request for held in texts.values() for request, _ in held}
    assert len(events) > 10
    for event in events:
        assert event.num_tokens % SIZE == 0
        assert 0 < event.num_tokens <= len(event.tokens)
        assert set(event.requests) <= requests
        assert any(
            np.array_equal([*prompt, *request.tokens][: len(event.tokens)], event.tokens)
            for request, prompt in texts[event.namespace]
        )
    assert sum(bool(event.requests) for event in events) > 0.9 * len(events)
    stats, found = engine.cache_stats(), engine.namespace_stats()
    assert sum(event.num_tokens for event in events) == stats.total_evictions * SIZE
    for name, held in texts.items():
        own = found[name]
        assert own.queries == len(held)
        assert own.query_tokens == sum(len(prompt) for _, prompt in held)
        assert own.hit_tokens == sum(request.metrics.cached_tokens for request, _ in held)
        assert own.hits == sum(request.metrics.cached_tokens > 0 for request, _ in held)
        assert own.evicted_tokens == sum(event.num_tokens for event in events if event.namespace == name)
    assert sum(own.cached_tokens for own in found.values()) == engine.stats().cached_blocks * SIZE
    assert sum(own.hits for own in found.values()) > 2
    engine.check()


def test_a_thread_outlives_a_callback_that_exits(network, caplog):
    def told(event):
        raise SystemExit("bye")

    texts = prompts(5, 6, 40)
    expected = make(network).generate_batch(texts, GREEDY)
    with caplog.at_level(logging.ERROR, "kvcache"), make(network, on_eviction=told) as engine:
        assert engine.generate_batch(texts, GREEDY) == expected
        assert engine.is_running
    assert any(record.message == "on_eviction failed" for record in caplog.records)


def test_failing_callbacks_leave_nothing_inconsistent(network, caplog):
    calls, failure = [], RuntimeError("broken")

    def told(event):
        calls.append(event)
        if failure is not None:
            raise failure

    engine = make(network, on_eviction=told)
    texts = prompts(5, 12, 40)
    expected = make(network).generate_batch(texts[:6], GREEDY)
    with caplog.at_level(logging.ERROR, "kvcache"):
        assert engine.generate_batch(texts[:6], GREEDY) == expected
    assert calls
    assert sum(record.message == "on_eviction failed" for record in caplog.records) == len(calls)
    failure, before = KeyboardInterrupt(), len(calls)
    requests = [engine.submit(text, GREEDY) for text in texts[6:]]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert len(calls) == before + 1
    engine.check()
    failure = None
    assert [request.result() for request in requests] == make(network).generate_batch(texts[6:], GREEDY)
    assert sum(event.num_tokens for event in calls) == engine.cache_stats().total_evictions * SIZE


def test_a_callback_may_use_the_engine(network):
    """It submits a request, and its thread steps the engine."""
    more = []

    def told(event):
        if len(more) < 3:
            more.append(engine.submit(event.tokens, GREEDY, namespace="told"))

    engine = make(network, on_eviction=told)
    with engine:
        for prompt in prompts(3, 20, 40):
            engine.submit(prompt, GREEDY).result(60)
    assert [request.finish_reason for request in more] == ["length"] * 3
    assert engine.namespace_stats()["told"].queries == 3


def test_a_callback_may_close_the_engine(network):
    """Its own thread cannot be waited for: `close` then runs the rest itself."""
    closed = []

    def told(event):
        engine.close()
        closed.append(event)

    engine = make(network, on_eviction=told)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(3, 12, 40)]
    engine.start()
    assert [request.result(60) for request in requests] == make(network).generate_batch(prompts(3, 12, 40), GREEDY)
    engine.close()
    assert closed
    with pytest.raises(InvalidOperationError):
        engine.submit(np.arange(3))


def test_names_of_one_text_count_together(network):
    engine = make(network)
    for name in (None, "", 1, "1", "1"):
        engine.submit(np.arange(5), GREEDY, namespace=name).result()
    lines = exposition(engine.stats(), engine.namespace_stats()).splitlines()
    assert [line for line in lines if line.startswith("kvcache_namespace_queries_total")] == [
        'kvcache_namespace_queries_total{namespace=""} 2', 'kvcache_namespace_queries_total{namespace="1"} 3',
    ]


def test_times_of_requests(network):
    clock = Clock()
    engine = make(network, max_running=1, clock=clock)
    requests = [engine.submit(np.arange(9), GREEDY, n=1 + i % 2) for i in range(5)]
    while engine.step():
        clock.now += 0.3
    stats = engine.stats()
    samples = [sample for request in requests for sample in request._samples]
    for histogram, times in (
        (stats.queued, [sample.started for sample in samples]),
        (stats.first_token, [sample.times[0] for sample in samples]),
    ):
        bounds = [-1.0, *histogram.bounds, np.inf]
        expected = [sum(a < t <= b for t in times) for a, b in pairwise(bounds)]
        assert list(histogram.counts) == expected
        assert histogram.total == pytest.approx(sum(times))
        assert sum(histogram.counts) == 7
        assert max(times) > 1
    gaps = [b - a for sample in samples for a, b in pairwise(sample.times)]
    assert sum(stats.gap.counts) == len(gaps) == 7 * 7
    assert stats.gap.total == pytest.approx(sum(gaps))
    assert stats.gap.counts[bisect_left(stats.gap.bounds, 0.3)] == sum(0.2 < gap < 0.4 for gap in gaps) > 0


class Blocking:
    """A network whose passes wait for `go`."""

    def __init__(self, network):
        self.network, self.config = network, network.config
        self.begun, self.go = threading.Event(), threading.Event()

    def forward(self, *args, **options):
        self.begun.set()
        assert self.go.wait(60)
        return self.network.forward(*args, **options)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_tokens_that_were_drawn_before_an_error_count(network, error):
    """Guesses that held, before the logits processor failed behind them: each token has its time."""
    prompt, drawn = [3, 40, 77, 114, 151] * 5, 0

    def failing(text, logits):
        if len(text) == fails_at:
            broken.append(len(text))
            raise error
        repeat(text, logits)

    for fails_at in range(len(prompt) + 1, len(prompt) + 30):
        engine, broken = BatchEngine(network, num_blocks=8, clock=Clock()), []
        params = SamplingParams(temperature=0.0, max_tokens=60, logits_processor=failing)
        request = engine.submit(prompt, params)
        try:
            while not broken:
                engine.step()
        except KeyboardInterrupt:
            request.cancel()
        metrics = request.metrics
        assert metrics.new_tokens == len(request.tokens) == fails_at - len(prompt)
        assert len(metrics.itl) == metrics.new_tokens - 1
        assert engine.stats().new_tokens == metrics.new_tokens
        assert sum(engine.stats().first_token.counts) == 1
        drawn += engine.stats().accepted_tokens
    assert drawn > 0


def test_reports_wait_for_no_pass(network):
    model = Blocking(network)
    model.go.set()
    engine = make(model)
    engine.submit(np.arange(9), GREEDY, namespace="a").result()
    before, spaces = engine.stats(), engine.namespace_stats()
    assert (before.finished, before.waiting, before.running) == (1, 0, 0)
    model.go.clear()
    model.begun.clear()
    try:
        first = engine.submit(np.arange(20), GREEDY, namespace="a")
        stepping = threading.Thread(target=run, args=[engine], daemon=True)
        stepping.start()
        assert model.begun.wait(60)
        engine.submit(np.arange(20), GREEDY, n=2)
        reports = []
        ask = [engine.stats, engine.namespace_stats]
        asking = threading.Thread(target=lambda: reports.extend(each() for each in ask), daemon=True)
        asking.start()
        asking.join(20)
        assert not asking.is_alive(), "a report waits for the pass"
        assert (reports[0].waiting, reports[0].running, reports[0].finished) == (3, 0, 1)
        assert reports[0].new_tokens == before.new_tokens
        assert reports[1]["a"].queries == spaces["a"].queries + 1, "it has begun"
        assert exposition(*reports)
    finally:
        model.go.set()
    stepping.join(60)
    after = engine.stats()
    assert (after.waiting, after.running, after.finished) == (0, 0, 4)
    assert after.new_tokens == before.new_tokens + 3 * len(first.tokens)
    engine.clear_cache()
    assert engine.stats().cached_blocks == 0


def test_counters_of_submitted_requests_add_up_at_any_time(network):
    """All requests are waiting, running or finished, in every report that another thread makes beside the steps."""
    engine, found, done = make(network), [], threading.Event()

    def ask():
        while not done.is_set():
            before = submitted[0]
            stats = engine.stats()
            found.append(before <= stats.waiting + stats.running + stats.finished <= submitted[1])
            found.append(stats.free_blocks + stats.claimed_blocks + stats.cached_blocks == 24)
            found.append(min(stats.waiting, stats.running, stats.finished) >= 0)

    submitted = [0, 0]  # at least, and at most
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with engine:
            for prompt in prompts(7, 40, 30):
                submitted[1] += 1
                request = engine.submit(prompt, GREEDY)
                submitted[0] += 1
            request.result()
    finally:
        done.set()
        asking.join()
    assert len(found) > 100
    assert all(found)


def test_names_are_the_callers_own_and_bounded(monkeypatch):
    """A network with several regimes has a namespace of the index for each; the caller sees one."""
    monkeypatch.setattr(observed, "MOST_NAMESPACES", 3)
    network = Transformer.from_pretrained(GOLDEN / "phi3_longrope")
    engine = BatchEngine(network, block_size=4)
    longest = network.config.max_position_embeddings - 20
    for length in (10, longest):
        engine.submit(np.arange(length) % 100, GREEDY, namespace="x").result()
    assert set(engine.namespace_stats()) == {"x"}
    assert engine.namespace_stats()["x"].queries == 2
    assert engine.namespace_stats()["x"].cached_tokens == engine.stats().cached_blocks * 4
    for name in "abcdb":
        engine.submit(np.arange(3), GREEDY, namespace=name).result()
    engine.clear_cache()
    assert list(engine.namespace_stats()) == ["c", "d", "b"]
    assert engine.namespace_stats()["b"].queries == 2


def test_on_eviction_is_checked(network):
    with pytest.raises(TypeError, match=r"^on_eviction: expected a function, got int$"):
        make(network, on_eviction=3)


# ---------------------------------------------------------------- logs


def test_evictions_are_logged_at_a_bounded_rate(network, caplog):
    clock = Clock()
    engine = make(network, clock=clock)
    with caplog.at_level(logging.INFO, "kvcache"):
        for prompt in prompts(3, 30, 40):
            engine.submit(prompt, GREEDY).result()
            clock.now += 1.0
    lines = [re.fullmatch(r"(\d+) cached tokens evicted in (\d+) pieces", record.message) for record in caplog.records]
    assert 2 <= len(lines) <= 4
    assert all(lines)
    assert 0 < sum(int(line[1]) for line in lines) <= engine.cache_stats().total_evictions * SIZE


def test_files_are_logged_and_closed(network, tmp_path, caplog):
    path, text = tmp_path / "file", list(range(64))
    engine = make(network)
    engine.submit(text, SamplingParams(max_tokens=1)).result()
    entries, other = PrefixKvCache(config()), PrefixKvCache(config())
    entries.store_snapshot(text, state(64))
    with caplog.at_level(logging.INFO, "kvcache"):
        engine.save(path)
        again = make(network)
        again.load(path)
        entries.save(tmp_path / "entries")
        other.load(tmp_path / "entries")
    assert [record.message for record in caplog.records] == [
        f"{path}: saved 16 blocks", f"{path}: loaded 16 blocks", f"{tmp_path / 'entries'}: saved 1 entries",
        f"{tmp_path / 'entries'}: loaded 1 entries",
    ]
    sizes = network.config
    with PrefixCache(24, SIZE, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim) as cache, other:
        cache.load(path, again._settings.named(None))
        assert len(cache) == 16
        if Path("/proc/self/fd").exists():
            assert {path, tmp_path / "entries"} <= open_files()
    assert cache.is_empty
    assert other.is_empty
    again.clear_cache()
    if Path("/proc/self/fd").exists():
        assert not {path, tmp_path / "entries"} & open_files()


def open_files():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.add(Path(os.readlink(each)))
        except OSError:  # it was that of the listing
            continue
    return found


def test_a_tier_that_answers_again_is_logged(caplog):
    class Moody:
        failing = True

        def contains_many(self, keys):
            if self.failing:
                raise OSError("away")
            return [True] * len(keys)

        def get_many(self, keys):
            return [None] * len(keys)

    tier = Moody()
    link = Link(tier, b"secret", 1)
    with caplog.at_level(logging.INFO, "kvcache"):
        for _ in range(FAILURES):
            assert link.contains([b"key"]) is None
        tier.failing = False
        for _ in range(2):
            assert link.contains([b"key"]) == [True]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"Moody failed {FAILURES} times in a row: OSError: 'away'"),
        ("INFO", f"Moody answers again after {FAILURES} failures"),
    ]


# ---------------------------------------------------------------- the exporter of the guide


def test_the_exporter_of_the_guide(network):
    client = pytest.importorskip("prometheus_client")
    from bench.support.guides import GUIDES, definitions

    text = (GUIDES / "policies.md").read_text()
    names = definitions("policies.md")
    exec("\n".join(re.findall(r"^(?:GAUGES|COUNTERS|OF_NAMESPACES) = .*$", text, re.MULTILINE)), names)
    assert len(re.search(r"class Exporter:.*?\n\n\n", text, re.DOTALL)[0].splitlines()) < 30
    engine, registry = make(network), client.CollectorRegistry()
    registry.register(names["Exporter"](engine))
    for i, prompt in enumerate(prompts(3, 20, 40)):
        engine.submit(prompt, GREEDY, namespace=f"user {i % 2}").result()
    stats, spaces = engine.stats(), engine.namespace_stats()
    for name in names["GAUGES"]:
        assert registry.get_sample_value(f"kvcache_{name}") == getattr(stats, name)
    for name in names["COUNTERS"]:
        assert registry.get_sample_value(f"kvcache_{name}_total") == getattr(stats, name)
    for name in names["OF_NAMESPACES"]:
        for space, own in spaces.items():
            found = registry.get_sample_value(f"kvcache_namespace_{name}_total", {"namespace": space})
            assert found == getattr(own, name)
    for name in ("queued", "first_token"):
        value = registry.get_sample_value
        assert value(f"kvcache_{name}_seconds_count") == value(f"kvcache_{name}_seconds_bucket", {"le": "+Inf"}) == 20
        assert value(f"kvcache_{name}_seconds_sum") == pytest.approx(getattr(stats, name).total)
