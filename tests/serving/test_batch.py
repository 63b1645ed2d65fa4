"""`BatchEngine` and its requests: streams, results, cancels, deadlines, the queue, the thread, the calls over many."""

import asyncio
import gc
import itertools
import sys
import threading
import tracemalloc
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from places import GOLDEN
from serving import GREEDY, Alone, Clock, prompts, run, sampled, settled
from windowed_networks import Windowed

from kvcache import (
    BatchEngine,
    EvictionPolicy,
    InferenceEngine,
    InvalidOperationError,
    OutOfMemoryError,
    PrefixCachedEngine,
    QueueFullError,
    SamplingParams,
)
from kvcache.demo import DIRECTORY
from kvcache.sampling.text_stream import TextStream
from kvcache.serving import Histogram

pytestmark = pytest.mark.one_build

PROMPTS = prompts(0, 8, 40)
LONG = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=400)


@pytest.fixture
def engine(network):
    engine = BatchEngine(network, num_blocks=60)
    yield engine
    engine.close(cancel=True)
    settled(engine)


@pytest.fixture(scope="module")
def alone(network):
    return Alone(network)


def test_a_request_is_made_once():
    """One conversion of its numbers, and no text before there is a new token."""
    engine, found = BatchEngine.from_pretrained(DIRECTORY, num_blocks=60), []
    engine.submit([1, 2, 3], temperature=0.0, max_tokens=8)  # reads the tokenizer
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        engine.submit([1, 2, 3], temperature=0.0, max_tokens=8)
    finally:
        sys.setprofile(None)
    engine.close(cancel=True)
    counts = [found.count(name) for name in ("submit", "as_tokens", "__post_init__", "decoded")]
    assert counts == [1, 1, 1, 0]
    assert len(found) <= 93


def test_prompts_get_their_log_probabilities(network, alone, monkeypatch):
    """In pieces, beside others, with several samples; what was cached before is of no use."""
    monkeypatch.setattr("kvcache.serving.batch.SCORE_FLOATS", 7 * network.config.vocab_size)
    engine, scorer = BatchEngine(network, num_blocks=120), InferenceEngine(network)
    engine.generate_batch(PROMPTS[:2], GREEDY)
    requests = [
        engine.submit(prompt, GREEDY, n=1 + number % 2, prompt_logprobs=2 * (number % 2))
        for number, prompt in enumerate(PROMPTS)
    ]
    others = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    warm = engine.submit(PROMPTS[0], GREEDY, max_tokens=0, prompt_logprobs=1)
    run(engine)
    assert (warm.result(), warm.finish_reason) == ([], "length")
    for number, (request, other, prompt) in enumerate(zip(requests, others, PROMPTS, strict=True)):
        first, *rest = request.prompt_logprobs
        assert first is None
        np.testing.assert_allclose([each.logprob for each in rest], scorer.score(prompt), atol=1e-5)
        assert {len(each.top) for each in rest} <= {2 * (number % 2)}
        assert request.metrics.cached_tokens == 0
        assert request.tokens == other.tokens == alone(prompt, GREEDY).tokens
        assert other.prompt_logprobs is None
    assert [each.logprob for each in warm.prompt_logprobs[1:]] == [
        each.logprob for each in requests[0].prompt_logprobs[1:]
    ]
    with pytest.raises(ValueError, match="keep: expected none with prompt_logprobs"):
        engine.submit(PROMPTS[0], keep=1.0, prompt_logprobs=0)
    with pytest.raises(ValueError, match="prompt_logprobs: expected an int >= 0"):
        engine.submit(PROMPTS[0], prompt_logprobs=-1)
    settled(engine)


def test_a_step_calls_an_event_loop_once(engine):
    """However many streams wait in it, unless it runs while they are woken."""
    requests, calls = [engine.submit(prompt, GREEDY) for prompt in PROMPTS], []

    async def collect(request):
        return [token async for token in request]

    async def every():
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), call(*args))
        waiting = [loop.create_task(collect(request)) for request in requests]
        await asyncio.sleep(0)  # until each of them waits for its first token
        engine.start()
        return await asyncio.gather(*waiting)

    tokens = sum(map(len, asyncio.run(every())))
    assert 0 < len(calls) < tokens / 2


@pytest.mark.parametrize("threaded", [False, True])
def test_streams_and_results(engine, alone, threaded):
    if threaded:
        engine.start()
    want = [alone(prompt, GREEDY).tokens for prompt in PROMPTS]
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert list(requests[0]) == want[0]
    assert list(requests[0]) == want[0], "each iterator begins at the first token"
    assert [request.result() for request in requests] == want
    assert {request.finish_reason for request in requests} <= {"stop", "length"}
    assert requests[1].metrics.ttft is not None


@pytest.mark.parametrize("threaded", [False, True])
def test_asynchronous_streams(engine, alone, threaded):
    if threaded:
        engine.start()

    async def collect(prompt):
        return [token async for token in engine.submit(prompt, GREEDY)]

    async def all_at_once():
        return await asyncio.gather(*map(collect, PROMPTS))

    assert asyncio.run(all_at_once()) == [alone(prompt, GREEDY).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("threaded", [False, True])
def test_arrivals_of_samples(engine, alone, threaded):
    """All tokens of each sample once, with their log-probabilities, and why it ended; one of them is cancelled."""
    if threaded:
        engine.start()
    seeds = range(0, 30, 3)

    async def collect(seed):
        request = engine.submit(PROMPTS[seed % 8], sampled(seed, 9, logprobs=2), n=3)
        found = [([], [], []) for _ in range(3)]
        assert request.prompt == list(PROMPTS[seed % 8])
        async for new in request.arrivals():
            assert new.text is None, "this engine has no tokenizer"
            for kept, more in zip(found[new.index], (new.tokens, new.logprobs, [new.finish_reason]), strict=True):
                kept += more
        return found

    async def all_at_once():
        gone = engine.submit(PROMPTS[0], LONG, n=2)
        gone.cancel()
        assert {new.finish_reason async for new in gone.arrivals()} == {"cancelled"}
        return await asyncio.gather(*map(collect, seeds))

    for seed, samples in zip(seeds, asyncio.run(all_at_once()), strict=True):
        for index, (tokens, logprobs, reasons) in enumerate(samples):
            want = alone(PROMPTS[seed % 8], sampled(seed + index, 9, logprobs=2))
            assert (tokens, logprobs, reasons[-1]) == (want.tokens, want.logprobs, want.finish_reason)
            assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("threaded", [False, True])
def test_what_the_loop_takes_at_each_step(engine, alone, threaded):
    """All tokens, also those that come while others are taken; what it takes with is forgotten then."""
    if threaded:
        engine.start()

    async def taken(seed):
        request = engine.submit(PROMPTS[seed], sampled(seed, 9))
        incoming, tokens, fails = request.incoming(), [], []

        def take():
            if fails:
                raise KeyError("asked")
            tokens.extend(found := [token for new in incoming.take() for token in new.tokens])
            return not incoming.ended and not (found and seed % 2 and len(tokens) % 3 == 0)

        while not incoming.ended:  # every third token ends the wait
            await request.at_each_step(take)
        fails.append(1)
        with pytest.raises(KeyError):
            await request.at_each_step(take)
        assert not any(hasattr(call, "_take") for _, call in request._calls)
        return tokens

    async def all_at_once():
        return await asyncio.gather(*map(taken, range(4)))

    for seed, tokens in enumerate(asyncio.run(all_at_once())):
        assert tokens == alone(PROMPTS[seed], sampled(seed, 9)).tokens


def test_the_first_sample_comes_first(engine):
    """No other sample has a token before the first one has, also where they run and end in the same step."""
    seen = []

    def look(text, logits):
        seen.append([work.num_tokens - work.num_prompt for work in request.works])

    request = engine.submit(PROMPTS[0], sampled(1, 2, logits_processor=look), n=3)
    run(engine)
    assert seen == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]


def test_a_sample_is_read_before_the_first_one(engine):
    """A step that ends while arrivals are looked for."""

    class Stepping:
        def __init__(self, work):
            self.work = work

        def __getattr__(self, name):
            found = getattr(self.work, name)
            if name == "tokens" and not self.work.num_new:
                engine.step()
            return found

    async def indices():
        request = engine.submit(PROMPTS[0], sampled(1, 2), n=2)
        request._samples = (Stepping(request.works[0]), request.works[1])
        return [new.index async for new in request.arrivals()]

    assert asyncio.run(indices())[0] == 0


@pytest.mark.parametrize("stop", [(), "e"])
def test_the_text_of_what_arrives(stop):
    """The pieces together are the text of each sample, also of one that is late or ends before a stop string."""
    pytest.importorskip("tokenizers")
    with BatchEngine.from_pretrained(DIRECTORY, num_blocks=64) as engine:

        async def collect(seed, pause):
            request = engine.submit("class Reader", sampled(seed, 12, stop=stop), n=2)
            texts = ["", ""]
            async for new in request.arrivals():
                texts[new.index] += new.text
                await asyncio.sleep(pause)
            return request, texts

        async def every():
            return await asyncio.gather(*(collect(seed, 0.01 * (seed % 2)) for seed in range(6)))

        for request, texts in asyncio.run(every()):
            assert texts == request.text()
            assert request.metrics.new_tokens == sum(len(each.tokens) for each in request.completions())
            assert request.metrics.prompt_tokens == len(request.prompt) > 0


def test_a_histogram_shows_its_middle():
    assert repr(Histogram((1.0, 2.0), (3, 4, 1), 12.0)) == "Histogram(8, mean 1.5 s, half below 2 s)"
    assert repr(Histogram((1.0, 2.0), (0, 1, 2), 9.0)) == "Histogram(3, mean 3 s, half below inf s)"
    assert repr(Histogram((1.0, 2.0), (0, 0, 0), 0.0)) == "Histogram(0)"


def test_submits_and_cancels_of_many_threads(engine, alone):
    problems = []

    def use(i):
        try:
            for k in range(6):
                prompt = PROMPTS[(i + k) % 8]
                request = engine.submit(prompt, GREEDY, priority=k % 2)
                if k % 3 == 2:
                    request.cancel()
                    assert request.result() == alone.answers[prompt.tobytes(), GREEDY].tokens[: len(request.tokens)]
                else:
                    assert list(request) == alone.answers[prompt.tobytes(), GREEDY].tokens
        except BaseException as error:
            problems.append(error)

    for prompt in PROMPTS:
        alone(prompt, GREEDY)
    with engine:
        threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert not problems


def test_cancel(engine):
    """A request keeps its tokens, and its memory is free at once."""
    runs, waits = engine.submit(PROMPTS[0], LONG), engine.submit(PROMPTS[1], LONG)
    for _ in range(4):
        engine.step()
    late = engine.submit(PROMPTS[2], LONG)
    for request in (late, runs, waits):
        request.cancel()
        request.cancel()
        assert request.is_finished
        assert request.finish_reason == "cancelled"
    assert len(runs.result()) == 4
    assert late.result() == []
    assert "cancelled" in repr(runs)
    settled(engine)


def test_deadlines_and_metrics(network):
    clock = Clock()
    engine = BatchEngine(network, num_blocks=20, max_running=1, clock=clock)
    first = engine.submit(PROMPTS[0], LONG, deadline=10.0)
    never = engine.submit(PROMPTS[1], LONG, deadline=2.0)
    assert first.metrics.queued is None
    clock.now = 1.5
    engine.step()
    clock.now = 1.75
    engine.step()
    clock.now = 2.0
    engine.step()
    assert (never.finish_reason, never.result(), never.metrics.ttft) == ("deadline", [], None)
    assert first.metrics.queued == 1.5
    assert first.metrics.ttft == 1.5
    assert first.metrics.itl == (0.25, 0.25)
    clock.now = 10.0
    assert not engine.step()
    assert first.finish_reason == "deadline"
    assert len(first.result()) == 3
    with pytest.raises(TimeoutError, match=r"timeout: expected the end within 0\.0 s"):
        engine.submit(PROMPTS[0], LONG).result(timeout=0.0)


def test_cached_tokens_are_counted(engine):
    prompt = np.arange(3, 60)
    assert engine.submit(prompt, GREEDY).completions()[0].cached_tokens == 0
    request = engine.submit(prompt, GREEDY)
    request.result()
    assert request.metrics.cached_tokens == 56
    other = engine.submit(prompt, GREEDY, namespace="a tenant")
    other.result()
    assert other.metrics.cached_tokens == 0
    engine.clear_cache()
    assert engine.stats().cached_blocks == 0


def test_saved_prefixes(network, alone, tmp_path):
    """A file of `PrefixCachedEngine` serves a batch, and the other way round; also beside requests that run."""
    prompt, other = np.arange(3, 60), np.arange(80, 140)
    single = PrefixCachedEngine(InferenceEngine(network), 20, strict=True)
    single.generate(prompt, GREEDY, namespace="a")
    single.save(tmp_path / "single")
    engine = BatchEngine(network, num_blocks=12)
    running = engine.submit(other, GREEDY)
    assert engine.load(tmp_path / "single") == 4
    requests = [engine.submit(prompt, GREEDY, namespace="a") for _ in range(3)]
    run(engine)
    for request in [running, *requests]:
        request.result()
    want = alone(prompt.astype(np.uint32), GREEDY).tokens
    assert [request.tokens for request in requests] == [want] * 3
    assert [request.metrics.cached_tokens for request in requests] == [56] * 3
    with pytest.raises(InvalidOperationError):
        engine.load(tmp_path / "single")
    engine.save(tmp_path / "batch")
    single.clear_cache()
    assert single.load(tmp_path / "batch") == engine.stats().cached_blocks
    assert single.complete(prompt, GREEDY, namespace="a").cached_tokens >= 56
    settled(engine)


def test_the_queue_is_bounded(network):
    engine = BatchEngine(network, max_queue=3, num_blocks=30)
    requests = [engine.submit(PROMPTS[i], GREEDY) for i in range(2)]
    with pytest.raises(QueueFullError, match="queue full: 3 requests wait"):
        engine.submit(PROMPTS[0], GREEDY, n=2)
    requests.append(engine.submit(PROMPTS[2], GREEDY))
    with pytest.raises(QueueFullError):
        engine.submit(PROMPTS[3], GREEDY)
    with pytest.raises(ValueError, match="n: expected at most 3, the requests that may wait, got 4"):
        engine.submit(PROMPTS[3], GREEDY, n=4)
    engine.step()
    requests.append(engine.submit(PROMPTS[3], GREEDY))
    assert all(len(request.result()) == 8 for request in requests)


def test_more_prompts_than_the_queue_holds(network, alone):
    """Requests of another caller fill the queue."""
    engine, seen = BatchEngine(network, max_queue=2, max_running=2, num_blocks=30), []
    others = [engine.submit(PROMPTS[0], GREEDY) for _ in range(2)]
    got = engine.generate_batch(PROMPTS * 2, GREEDY, progress=lambda done, of: seen.append((done, of)))
    assert got == [alone(prompt, GREEDY).tokens for prompt in PROMPTS * 2]
    assert seen == [(i + 1, 16) for i in range(16)]
    assert all(other.is_finished for other in others)
    assert engine.generate_batch([], GREEDY) == []
    assert engine.score_batch([]) == []
    assert [len(scores) for scores in engine.score_batch([[1], [1, 2]])] == [0, 1]


def test_a_batch_that_fails_cancels_the_rest(engine):
    broken = SamplingParams(logits_processor=lambda text, logits: logits / 0 if len(text) > 30 else None, max_tokens=40)
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="logits"):
        engine.generate_batch([[1, 2, 3], list(range(28)), [4, 5]], broken)
    run(engine)
    settled(engine)


def test_the_progress_bar(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    engine.generate_batch(PROMPTS[:2], GREEDY)
    assert "] 0 of 2\r[" in (shown := capsys.readouterr().err)
    assert shown.endswith("#] 2 of 2\n")
    engine.generate_batch(PROMPTS[:2], GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress: expected a bool or a function, got int"):
        engine.generate_batch(PROMPTS[:2], GREEDY, progress=3)


def test_close(network, alone):
    engine = BatchEngine(network, num_blocks=60)
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    engine.close()
    assert [request.tokens for request in requests] == [alone(prompt, GREEDY).tokens for prompt in PROMPTS]
    engine.close(cancel=True)
    for call in (lambda: engine.submit(PROMPTS[0]), engine.start):
        with pytest.raises(InvalidOperationError, match="expected an engine that is open"):
            call()
    with BatchEngine(network, num_blocks=60) as threaded:
        requests = [threaded.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert [request.tokens for request in requests] == [alone(prompt, GREEDY).tokens for prompt in PROMPTS]
    assert not threaded.is_running
    with pytest.raises(KeyError), BatchEngine(network, num_blocks=60) as left:  # noqa: PT012
        request = left.submit(PROMPTS[0], LONG)
        raise KeyError
    assert request.finish_reason == "cancelled"


def test_an_engine_that_is_dropped_ends_its_thread(network):
    engine = BatchEngine(network, num_blocks=20).start()
    thread, gone = engine._steps._thread._thread, weakref.ref(engine)
    del engine
    gc.collect()
    thread.join(60)
    assert gone() is None
    assert not thread.is_alive()


def test_stop_strings_and_texts():
    """A text as a prompt, and strings that end the answer."""
    pytest.importorskip("tokenizers")
    folder = GOLDEN.parents[1] / "kvcache" / "demo"
    alone = InferenceEngine.from_pretrained(folder)
    engine = BatchEngine.from_pretrained(folder)
    prompt = "def read(self):\n    return"
    free = SamplingParams(temperature=0.0, max_tokens=30)
    text = alone.complete(prompt, free).text
    stopping = SamplingParams(temperature=0.0, max_tokens=30, stop=(text[4:7],))
    requests = [engine.submit(prompt, params) for params in (free, stopping, sampled(3))]
    for request, params in zip(requests, (free, stopping, sampled(3)), strict=True):
        want = alone.complete(prompt, params)
        assert request.text() == want.text
        assert request.result() == want.tokens
        assert request.finish_reason == want.finish_reason
    assert requests[1].finish_reason == "stop"
    assert engine.submit(prompt, stopping, n=2).text() == [requests[1].text()] * 2
    settled(engine)


class Behind:
    """Finds stop strings behind the first tokens of a text, and fails once."""

    faults = 0

    def __init__(self, tokenizer, skipped, stop):
        self.text, self.left = TextStream(tokenizer, (), [stop]), skipped

    @property
    def stopped(self):
        return self.text.stopped

    def extend(self, tokens, *, ended):
        for token in tokens:
            self.left -= 1
            if self.left < 0:
                self.text.add(token)
                if Behind.faults:
                    Behind.faults -= 1
                    raise KeyboardInterrupt
        if ended:
            self.text.end()


def test_stop_strings_count_where_a_watch_finds_them():
    """Each sample has its own, and one that was interrupted is made anew."""
    pytest.importorskip("tokenizers")
    alone, engine = InferenceEngine.from_pretrained(DIRECTORY), BatchEngine.from_pretrained(DIRECTORY)
    prompt, free = "def read(self):\n    return", SamplingParams(temperature=0.0, max_tokens=30)
    tokens, stop = alone.complete(prompt, free).tokens, "e"
    for skipped in (0, 9, 15, 40):
        ends = [k for k in range(skipped + 1, 31) if stop in alone.tokenizer.decode(tokens[skipped:k])]
        Behind.faults = min(1, len(ends))
        watch = partial(Behind, engine.tokenizer, skipped, stop)
        request = engine.submit(prompt, free, n=2, stop=stop, watch=watch)
        for _ in range(2 if Behind.faults else 1):
            with suppress(KeyboardInterrupt):
                request.result()
        assert request.result() == [tokens[: ends[0] if ends else 30]] * 2
        assert request.finish_reason == ("stop" if ends else "length")
    settled(engine)


def test_arguments(network, engine):
    for options, message in (
        ({"residual_length": 257}, "residual_length: expected an int <= 256, got 257"),
        ({"eviction_policy": EvictionPolicy.H2O()}, "eviction_policy: expected a kv_budget"),
        ({"kv_budget": 8}, "kv_budget: expected an eviction_policy with it, got None"),
        ({"max_queue": 0}, "max_queue: expected an int >= 1, got 0"),
        ({"max_running": 0}, "max_running: expected an int >= 1, got 0"),
        ({"target_gap": -1}, "target_gap: expected a finite number of at least 0"),
        ({"max_memory_bytes": 10}, "max_memory_bytes: expected at least"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchEngine(network, **options)
    windowed = Windowed(network, 10)
    assert BatchEngine(windowed, dtype="q4").residual_length == 0
    with pytest.raises(ValueError, match="residual_length: expected 0 or none with layers that have a window, got 64"):
        BatchEngine(windowed, residual_length=64)
    for call, message in (
        (lambda: engine.submit([]), "tokens: expected at least one, got none"),
        (lambda: engine.submit([1], n=0), "n: expected an int >= 1, got 0"),
        (lambda: engine.submit([1], deadline=-1), "deadline: expected a finite number of at least 0"),
        (lambda: engine.submit([10**6]), "tokens: expected ids"),
        (lambda: engine.submit("text"), "prompt: expected token ids"),
        (lambda: engine.score_batch([[]]), "tokens: expected at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: engine.submit([1], namespace=[]), "namespace: expected a hashable value, got list"),
        (lambda: engine.submit([1], priority=0.5), "priority"),
        (lambda: engine.submit(None), "prompt: expected a text or token ids, got NoneType"),
        (lambda: engine.generate_batch([5]), "prompt: expected a text or token ids, got int"),
        (lambda: engine.generate_batch("text"), "prompts: expected a list of texts, got one text"),
        (lambda: engine.score_batch(None), "texts: expected a list of texts, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(InvalidOperationError, match="expected one sample to iterate, got 2"):
        iter(engine.submit([1], GREEDY, n=2))
    with pytest.raises(OutOfMemoryError, match="requested 7 blocks, available 6"):
        BatchEngine(network, num_blocks=6).submit(np.ones(100, int))
    assert BatchEngine(network, max_memory_bytes="100 KiB").memory()["kv"] <= 100 * 1024
    assert BatchEngine(network, dtype="q4", max_memory_bytes="4MiB").memory()["kv"] <= 4 * 2**20
    assert engine.memory()["weights"] > 0
    run(engine)


def test_what_it_shows(network, engine):
    engine.submit(PROMPTS[0], GREEDY)
    assert repr(engine).startswith("BatchEngine(Transformer, 2 layers, 0 running, 1 waiting, 0 of 60 blocks in use)")
    request = engine.submit([1, 2], GREEDY)
    assert repr(request) == "Request(2 tokens of prompt, 0 new tokens, waits)"
    engine.step()
    assert repr(request) == "Request(2 tokens of prompt, 1 new tokens, runs)"
    run(engine)
    stats = engine.stats()
    assert (stats.finished, stats.new_tokens) == (2, 16)


def test_samples_share_what_ends_them_and_their_biases(network):
    """Stop tokens, stop strings and biases are kept once for a request, not once for each sample."""
    engine = BatchEngine(network, num_blocks=20, max_queue=64)
    ids = tuple(range(1000, 1000 + 65536))
    biases = dict.fromkeys(range(250), 1.0)
    params = SamplingParams(stop_token_ids=ids, logit_bias=biases, seed=3, max_tokens=2)
    tracemalloc.start()
    try:
        request = engine.submit([1, 2, 3], params, n=64)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 12 * 2**20, "one set of 65,536 ids takes 4 MiB"
    plain = SamplingParams(logit_bias=biases, max_tokens=2)
    for number, tokens in enumerate(request.result()):
        assert tokens == engine.submit([1, 2, 3], replace(plain, seed=3 + number)).result()


def test_stop_tokens_are_bounded():
    SamplingParams(stop_token_ids=range(65536))
    with pytest.raises(ValueError, match="stop_token_ids: expected at most 65536 ids, got more"):
        SamplingParams(stop_token_ids=itertools.count())
