"""The server, asked by OpenAI's client: answers, load, clients that leave or read slowly, limits, keys, the end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest
from http_servers import MODEL, Served, answer, fetched, post
from places import PROJECT
from serving import settled

from kvcache import SamplingParams

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "Where is the cat? — Und die Katze: 猫 🐈"}]
STREAMS = 200
GUIDE = PROJECT / "kvcache" / "guides" / "operation.md"


@pytest.fixture(scope="module")
def served(path):
    with Served(path, max_queue=1000) as made:
        yield made
    settled(made.engine)


@pytest.fixture
def client(served):
    return served.client()


def sampled(seed, most, **more):
    return {"seed": seed, "max_tokens": most, "temperature": 0.9, "top_p": 0.95, **more}


def params(settings, **changes):
    names = (
        "seed", "max_tokens", "temperature", "top_p", "stop", "logprobs", "presence_penalty", "frequency_penalty"
    )
    return SamplingParams(**{name: settings[name] for name in names if name in settings} | {"top_k": 40} | changes)


def want(served, settings, prompt=None, messages=None, index=0):
    """Sample `index` of the answer of an engine by itself."""
    engine = served.alone
    prompt = engine.apply_chat_template(messages, tokenize=True) if prompt is None else prompt
    changes = {"seed": settings["seed"] + index}
    if isinstance(settings.get("logprobs"), bool):
        changes["logprobs"] = settings["top_logprobs"]
    return engine.complete(prompt, params(settings, **changes))


# -- answers ----------------------------------------------------------------------------------------------------


def test_chat(served, client):
    settings = sampled(5, 12, logprobs=True, top_logprobs=3, n=2)
    got = client.chat.completions.create(model=MODEL, messages=TALK, **settings)
    assert (got.object, got.model, len(got.choices)) == ("chat.completion", MODEL, 2)
    for index, choice in enumerate(got.choices):
        alone = want(served, settings, messages=TALK, index=index)
        assert (choice.index, choice.message.role, choice.message.content) == (index, "assistant", alone.text)
        assert choice.finish_reason == alone.finish_reason
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == [each.logprob for each in alone.logprobs]
        assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
            [*each.top.values()] for each in alone.logprobs
        ]
        texts = [entry.token for entry in entries]
        assert all(entry.bytes == (None if "\ufffd" in entry.token else [*entry.token.encode()]) for entry in entries)
        assert texts == [served.alone.tokenizer.decode([token]) for token in alone.tokens]
    assert got.usage.prompt_tokens == len(served.alone.apply_chat_template(TALK, tokenize=True))
    assert got.usage.completion_tokens == 24
    assert got.usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(model=MODEL, messages=TALK, **settings)
    assert again.choices[1].message == got.choices[1].message
    assert 16 <= again.usage.prompt_tokens_details.cached_tokens < got.usage.prompt_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in re.split("(?<= )", "a b c")]}]
    whole = [{"role": "user", "content": "a b c"}]
    one, other = (client.chat.completions.create(model=MODEL, messages=each, **settings) for each in (parts, whole))
    assert one.choices[0].message == other.choices[0].message


def test_completions_of_several_prompts(served, client):
    settings = sampled(1, 9, logprobs=2, presence_penalty=1.5, frequency_penalty=0.5)
    prompts = ["one", [7, 8, 9], "three 🐈"]
    got = client.completions.create(model=MODEL, prompt=prompts, n=2, **settings)
    assert [choice.index for choice in got.choices] == [*range(6)]
    for choice in got.choices:
        alone = want(served, settings, prompt=prompts[choice.index // 2], index=choice.index % 2)
        assert choice.text == alone.text
        assert choice.logprobs.token_logprobs == [each.logprob for each in alone.logprobs]
    assert got.usage.completion_tokens == 54


def test_streams_are_whole_characters_and_end_before_a_stop_string(served, client):
    """A token is a byte here; the texts of the pieces are those of whole answers."""
    settings = sampled(3, 60)
    whole = want(served, settings, messages=TALK).text
    settings["stop"] = ["never there", whole[20:23]]
    with_options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(model=MODEL, messages=TALK, **settings, **with_options)]
    *pieces, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [piece.choices[0].delta.content for piece in pieces]
    assert "".join(texts) == whole[: whole.index(whole[20:23])]
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert (usage.choices, usage.usage.completion_tokens > 20) == ([], True)


def test_streams_are_of_whole_characters(served, client):
    """A cat is four tokens here."""
    cat = served.alone.tokenizer.encode("🐈").ids
    served.network.follow = dict(zip(cat, cat[1:] + cat[:1], strict=True))
    try:
        settings = {"max_tokens": 42, "temperature": 0, "stream": True}
        texts = [each.choices[0].text for each in client.completions.create(model=MODEL, prompt="🐈", **settings)]
    finally:
        served.network.follow = None
    assert "".join(texts) == "🐈" * 10 + "\ufffd"  # two bytes of the last one
    assert all(text.strip("🐈\ufffd") == "" for text in texts)


def test_many_streams_some_of_which_are_cancelled(served):
    """Two hundred at once: chats and completions, whole and streamed, samples, stop strings; every fifth one leaves."""

    async def one(client, number):
        prompt = f"{'the common beginning ' * (number % 3)}{number % 40}"
        settings = sampled(number % 40, 12 + number % 7, n=1 + (number % 10 == 3))
        if number % 5 == 0:
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, max_tokens=300, seed=1)
            async for _ in stream:
                await stream.close()
                return None
        if number % 4 == 1:
            talk = [{"role": "user", "content": prompt}]
            stream = await client.chat.completions.create(model=MODEL, messages=talk, stream=True, **settings)
            texts = [""] * settings["n"]
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content
            return settings, {"messages": talk}, texts
        if number % 4 == 2:
            settings["stop"] = ["a", "\n"]
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **settings)
            texts = [""] * settings["n"]
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return settings, {"prompt": prompt}, texts
        got = await client.completions.create(model=MODEL, prompt=prompt, **settings)
        return settings, {"prompt": prompt}, [choice.text for choice in got.choices]

    async def every():
        async with served.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    answers = [each for each in asyncio.run(every()) if each is not None]
    assert len(answers) == STREAMS * 4 // 5
    remembered = {}
    for settings, asked, texts in answers:
        for index, text in enumerate(texts):
            key = repr((settings, asked, index))
            if key not in remembered:
                remembered[key] = want(served, settings, **asked, index=index).text
            assert text == remembered[key]
    until_idle(served)
    settled(served.engine)


def until(condition):
    while not condition():
        time.sleep(0.002)


def until_idle(served):
    until(lambda: not served.engine.stats().running + served.engine.stats().waiting)


# -- clients that leave, and slow ones ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request_within_a_step(served, monkeypatch, stream):
    cancelled = threading.Event()
    cancel = served.engine._steps.cancel
    monkeypatch.setattr(served.engine._steps, "cancel", lambda pending: (cancel(pending), cancelled.set()))
    served.network.waiting.clear()
    served.network.closed = True
    body = {"model": MODEL, "prompt": "leave", "max_tokens": 300, "stream": stream}
    connection = served.connect(post(json.dumps(body).encode()))
    assert served.network.waiting.wait(60), "its first step"
    before = served.engine._steps._finished, served.engine._steps._new_tokens
    connection.close()
    assert cancelled.wait(60)
    served.network.open()  # the step that runs ends
    until_idle(served)
    finished, new = served.engine.stats().finished, served.engine.stats().new_tokens
    assert (finished - before[0], new - before[1]) in ((1, 0), (1, 1))
    settled(served.engine)


def test_slow_readers_hold_no_step_up(served, client):
    """Clients that read nothing: their answers run to the end beside others; read later, they are whole."""
    settings = {"max_tokens": 400, "seed": 2, "logprobs": True, "top_logprobs": 20, "stream": True, "model": MODEL}
    before = served.engine.stats().finished
    request = post(json.dumps({**settings, "messages": TALK}).encode(), "/v1/chat/completions")
    connections = [served.connect(request, receive_buffer=4096) for _ in range(4)]
    got = client.completions.create(model=MODEL, prompt="quick", **sampled(1, 5))
    assert got.choices[0].text == want(served, sampled(1, 5), prompt="quick").text
    until(lambda: served.engine.stats().finished == before + 5)
    texts = []
    for connection in connections:
        status, body = answer(connection)
        assert (status, body.count(b"[DONE]"), len(body) > 500_000) == (200, 1, True)
        chunks = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        texts.append("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks))
    tokens = served.alone.apply_chat_template(TALK, tokenize=True)
    assert texts == [served.alone.complete(tokens, SamplingParams(max_tokens=400, seed=2)).text] * 4


def test_a_client_that_never_reads_is_left(path, monkeypatch):
    """Its requests end at the time limit, and its answer some time later."""
    monkeypatch.setattr("kvcache.server.served_model._READING", 0.0)
    with Served(path, limits={"timeout": 0.5}, clock=lambda: 0.0) as served:
        settings = {"max_tokens": 400, "logprobs": True, "top_logprobs": 20, "stream": True, "model": MODEL}
        request = post(json.dumps({**settings, "messages": TALK}).encode(), "/v1/chat/completions")
        connection = served.connect(request, receive_buffer=4096)
        until(lambda: served.server.server_state.tasks)
        until(lambda: not served.server.server_state.tasks)  # the application has left it
        _, body = answer(connection)
        assert b"[DONE]" not in body
        settled(served.engine)


# -- queue, time, failures, the end -------------------------------------------------------------------------------


def test_a_full_queue(path):
    with Served(path, max_queue=2, max_running=1) as served:
        served.network.closed = True
        body = post(json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode())
        connections = [served.connect(body)]
        assert served.network.waiting.wait(60)
        connections.append(served.connect(body))
        until(lambda: served.engine._steps.num_waiting == 1)
        with pytest.raises(openai.RateLimitError) as caught:  # two samples, and room for one
            served.client().completions.create(model=MODEL, prompt="y", n=2)
        assert caught.value.response.headers["retry-after"] == "1"
        served.network.open()
        assert [answer(each)[0] for each in connections] == [200, 200]


def test_many_texts_in_a_body_do_not_stop_a_single_one(path):
    """The texts of one body take all places; from the second one on they come behind another body's only text."""
    with Served(path, max_running=2) as served:
        served.network.closed = True
        bodies = [{"model": MODEL, "prompt": text, "max_tokens": most} for text, most in (([*"abcd"], 50), ("x", 4))]
        connections = [served.connect(post(json.dumps(bodies[0]).encode()))]
        assert served.network.waiting.wait(60)
        until(lambda: len(served.engine._steps._pending) == 4)
        connections.append(served.connect(post(json.dumps(bodies[1]).encode())))
        until(lambda: len(served.engine._steps._pending) == 5)
        *many, one = [request.works[0] for request in served.engine._steps._pending.values()]
        served.network.open()
        assert [answer(each)[0] for each in connections] == [200, 200]
        assert one.times[0] < many[1].times[-1]


def test_more_answers_than_may_wait(path):
    """There is never room for them, so no client is told to try again."""
    with Served(path, max_queue=2, max_running=1) as served:
        served.network.closed = True
        with pytest.raises(openai.BadRequestError, match="n: expected at most 2, the requests that may wait, got 3"):
            served.client().completions.create(model=MODEL, prompt="y", n=3)
        with pytest.raises(openai.BadRequestError, match="prompt: expected at most 2 answers, n for each, got 4"):
            served.client().completions.create(model=MODEL, prompt=["a", "b", "c", "d"])


def test_an_answer_that_outgrows_the_cache(path):
    """It ends with the tokens for which there is room."""
    with Served(path, num_blocks=3) as served:
        settings = sampled(1, 200)
        whole = want(served, settings, prompt="grow").text
        for n in (1, 2):
            got = served.client().completions.create(model=MODEL, prompt="grow", n=n, **settings)
            assert [choice.finish_reason for choice in got.choices] == ["length"] * n
            assert whole.startswith(got.choices[0].text.rstrip("\ufffd"))
            assert 3 * 16 - 4 <= got.usage.completion_tokens / n < 3 * 16
            *pieces, last = served.client().completions.create(model=MODEL, prompt="grow", n=n, stream=True, **settings)
            texts = ["".join(p.choices[0].text for p in (*pieces, last) if p.choices[0].index == i) for i in range(n)]
            assert texts == [choice.text for choice in got.choices]
            assert last.choices[0].finish_reason == "length"
        settled(served.engine)


def test_the_time_limit(path):
    """Without a token it is an error, later it is an end."""
    clock = [0.0]
    with Served(path, limits={"timeout": 10.0}, clock=lambda: clock[0]) as served:
        served.network.closed = True
        asked = [
            served.connect(post(json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 400, **more}).encode()))
            for more in ({}, {"stream": True})
        ]
        until(lambda: served.engine._steps.num_waiting + served.engine._steps.num_running == 2)
        clock[0] = 11.0
        served.network.open()
        (status, whole), (streaming, events) = map(answer, asked)
        if status == 503:  # its first token was drawn in the step that ran, or there is none
            assert b"no token within the time limit" in whole
        else:
            (choice,) = json.loads(whole)["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
        assert streaming == 200
        assert b'"finish_reason": "length"' in events or b"no token within the time limit" in events
        settled(served.engine)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_the_time_limit_ends(path, chat):
    """It says so in `stop_reason`, and in a header where it is whole; an answer that ends by itself does not."""
    clock = [0.0]
    with Served(path, limits={"timeout": 10.0}, max_running=1, clock=lambda: clock[0]) as served:
        text = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        client, body = served.client(), {"model": MODEL, "max_tokens": 100, "temperature": 0, **text}
        create = (client.chat.completions if chat else client.completions).with_raw_response.create
        for stream in (False, True):
            served.network.permits, served.network.closed = threading.Semaphore(4), True
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(create, stream=stream, **body)
                until(lambda: served.engine.stats().new_tokens % 100 and not served.network.permits._value)
                clock[0] += 11.0
                served.network.open()
                found = asked.result()
            last = list(found.parse())[-1] if stream else found.parse()
            assert (last.choices[0].finish_reason, last.choices[0].stop_reason) == ("length", "timeout")
            assert found.headers.get("x-stop-reason") == (None if stream else "timeout")
            until(lambda: not served.engine.stats().running)
        whole = create(**body | {"max_tokens": 2})
        assert not hasattr(whole.parse().choices[0], "stop_reason")
        assert "x-stop-reason" not in whole.headers
        served.network.permits, served.network.closed = threading.Semaphore(0), True
        served.network.waiting.clear()
        other = served.engine.submit([1], max_tokens=2)
        assert served.network.waiting.wait(60)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(create, **body)
            until(lambda: served.engine._steps.num_waiting + served.engine._steps.num_running == 2)
            clock[0] += 11.0
            served.network.open()
            with pytest.raises(openai.InternalServerError) as caught:
                asked.result()
        other.result()
        assert caught.value.response.headers["x-stop-reason"] == "timeout"
        assert caught.value.response.headers["retry-after"] == "1"


def test_metrics_of_the_process(served):
    text = fetched(served, "/metrics")[2]
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("process_")}
    assert values["process_cpu_seconds_total"] > 0
    if sys.platform == "linux":
        assert 10 << 20 < values["process_resident_memory_bytes"] < values["process_virtual_memory_bytes"]
        assert 3 < values["process_open_fds"] < values["process_max_fds"]
        assert 0 < time.time() - values["process_start_time_seconds"] < 24 * 3600


def test_a_network_that_fails(path, caplog):
    with Served(path) as served:
        served.network.error = RuntimeError("secret")
        with pytest.raises(openai.InternalServerError, match="RuntimeError") as caught:
            served.client().completions.create(model=MODEL, prompt="x")
        assert "secret" not in str(caught.value)
        assert "secret" in caplog.text
        with pytest.raises(openai.APIError, match="RuntimeError"):
            [*served.client().completions.create(model=MODEL, prompt="x", stream=True)]
        body = {"model": MODEL, "prompt": "x", "n": 2, "stream": True}
        _, events = answer(served.connect(post(json.dumps(body).encode())))
        assert (events.count(b"data: "), b"choices" in events) == (2, False), "the error, and the end"
        served.network.error = None
        served.client().completions.create(model=MODEL, prompt="x", max_tokens=3)
        settled(served.engine)


@pytest.mark.parametrize("drain", [None, 0])
def test_the_end(path, drain):
    """Requests that run are finished, or cancelled if that is asked."""
    with Served(path, drain=drain) as served:
        served.network.closed = True
        body = post(json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 9, "seed": 1}).encode())
        connection = served.connect(body)
        assert served.network.waiting.wait(60)
        served.end()
        if drain is None:
            served.network.open()
            status, whole = answer(connection)
            assert (status, json.loads(whole)["usage"]["completion_tokens"]) == (200, 9)
        else:
            assert answer(connection)[0] == 503
            served.network.open()
    settled(served.engine)
    assert not served.engine.is_running


def test_the_end_says_so(path, caplog):
    """Beyond the time to drain, a client reads why it has no answer, or a part of one; the log has no traceback."""
    caplog.set_level("ERROR")
    with Served(path, drain=0) as served:
        served.network.closed = True
        served.network.permits.release(2)  # a stream begins
        connections = [
            served.connect(post(json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 90, **more}).encode()))
            for more in ({}, {"stream": True})
        ]
        until(lambda: served.engine._steps.num_waiting + served.engine._steps.num_running == 2)
        served.end()
        (status, whole), (streaming, events) = map(answer, connections)
        served.network.open()
    assert (status, json.loads(whole)["error"]["message"]) == (503, "answer: expected one, got none: the server ends")
    assert streaming in (200, 503)
    assert b"the server ends" in events
    assert not [each for each in caplog.records if each.exc_info]


def test_metrics(served, client):
    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    _, kind, text = fetched(served, "/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    helps = dict(line.split(maxsplit=3)[2:] for line in lines if line.startswith("# HELP"))
    assert set(helps) == set(kinds)
    for before, line in pairwise(lines):
        assert not line.startswith("# TYPE") or before.split()[:3] == ["#", "HELP", line.split()[2]]
    rows = re.findall(r"(?m)^\| `((?:kvcache|process)_\w+)` \| (\w+) \| (.*) \|$", GUIDE.read_text("utf-8"))
    table, told = {name: (kind, text) for name, kind, text in rows}, {n: (kinds[n], helps[n]) for n in kinds}
    assert table | told == table, "every metric is in the table of the guide, word for word"
    assert not [name for name in table.keys() - told.keys() if name.startswith("kvcache_")]
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    histograms = {name for name, kind in kinds.items() if kind == "histogram"}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert {name.partition("{")[0] for name in values} == set(kinds) - histograms | parts
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    assert histograms == {"kvcache_queued_seconds", "kvcache_first_token_seconds", "kvcache_gap_seconds"}
    for name in histograms:
        assert values[f'{name}_count{{model="{MODEL}"}}'] == values[f'{name}_bucket{{model="{MODEL}",le="+Inf"}}'] > 0
    stats = served.engine.stats()
    assert values[f'kvcache_new_tokens_total{{model="{MODEL}"}}'] == stats.new_tokens > 0
    assert values['kvcache_http_responses_total{status="200"}'] > 0


def test_an_error_that_nothing_expects_is_counted(path, monkeypatch, caplog):
    with Served(path) as served:
        monkeypatch.setattr(served.engine, "submit", lambda *arguments, **options: [][0])
        with pytest.raises(openai.InternalServerError):
            served.client().completions.create(model=MODEL, prompt="x")
        assert 'kvcache_http_responses_total{status="500"} 1\n' in fetched(served, "/metrics")[2]


def test_the_command(tmp_path):
    """The demo model, from the command line to the answer; SIGTERM ends it."""
    (tmp_path / "keys").write_text("sesame\n")
    command = [sys.executable, "-m", "kvcache", "serve", "--port", "0", "--api-keys", str(tmp_path / "keys")]
    command += ["--autosave", str(tmp_path / "kept")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        url = re.fullmatch(r"demo at (http://127.0.0.1:\d+/v1)\n", process.stdout.readline())[1]
        client = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0)
        got = client.completions.create(model="demo", prompt="import os\n" * 20, max_tokens=4)
        assert got.usage.completion_tokens == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert any(each.is_file() for each in (tmp_path / "kept").rglob("*")), "the prefix is kept"
