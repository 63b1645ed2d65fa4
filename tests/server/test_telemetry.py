"""Spans and measurements of requests, as the SDK of OpenTelemetry gets them."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import Request, urlopen

import openai
import pytest
from http_servers import MODEL, Served, fetched, tiny_file
from peft_folders import modules_of, write_adapter
from vector_folders import TEXTS, vector_folder

from kvcache.server.telemetry import Telemetry

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

pytestmark = pytest.mark.one_build

TALK = [{"role": "user", "content": "a text that no span has"}]


class Told:
    """A server, and what it told."""

    def __init__(self, path, **limits):
        self.spans, self.reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self._meters = MeterProvider([self.reader])
        telemetry = Telemetry(tracers, self._meters)
        self.served = Served(path, limits={"telemetry": telemetry, "aliases": ["other"], **limits})

    def close(self):
        self._meters.shutdown()

    def points(self):
        """The measurements by name."""
        (resource,) = self.reader.get_metrics_data().resource_metrics
        return {each.name: list(each.data.data_points) for each in resource.scope_metrics[0].metrics}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    with closing(Told(tiny_file(tmp_path_factory.mktemp("tiny")))) as told, told.served:
        yield told


def ended(told, count):
    """The spans of `count` requests; the last one ends when its client has the answer already."""
    for _ in range(1000):
        if len(found := told.spans.get_finished_spans()) >= count:
            break
        threading.Event().wait(0.01)
    told.spans.clear()
    assert len(found) == count
    return found


def test_a_span_for_each_request(told):
    client, parent = told.served.client(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    chat = client.chat.completions.create
    chat(model=MODEL, messages=TALK, max_tokens=5, temperature=0.5, seed=3, n=2, extra_headers={"traceparent": parent})
    (whole,) = ended(told, 1)
    list(chat(model="other", messages=TALK, max_tokens=4, temperature=0, stream=True))
    (streamed,) = ended(told, 1)
    assert (whole.name, streamed.name) == (f"chat {MODEL}", "chat other")
    assert whole.kind == SpanKind.SERVER
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == tuple(parent.split("-")[1:3])
    assert streamed.parent is None
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "kvcache", "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2, "gen_ai.output.type": "text", "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"), "http.response.status_code": 200,
    }
    assert {name: whole.attributes[name] for name in wanted} == wanted
    size = whole.attributes["gen_ai.usage.input_tokens"]
    assert size == streamed.attributes["gen_ai.usage.input_tokens"] > 20
    cached = "gen_ai.usage.cache_read.input_tokens"
    assert whole.attributes[cached] == 0
    assert streamed.attributes[cached] == size // 16 * 16
    for span in (whole, streamed):
        seconds = (span.end_time - span.start_time) / 1e9
        assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] < seconds
        assert not any("no span has" in str(value) for value in span.attributes.values())
        assert "error.type" not in span.attributes


def test_an_adapter_is_the_model_of_its_requests(told, tmp_path):
    """In spans and in measurements."""
    told.served.model.adapters.load(told.served.engine, "a", str(write_adapter(tmp_path / "a", modules_of("llama"))))
    told.served.client().completions.create(model="a", prompt="x", max_tokens=2)
    (span,) = ended(told, 1)
    assert (span.name, span.attributes["gen_ai.request.model"]) == ("text_completion a", "a")
    points = told.points()["gen_ai.server.request.duration"]
    assert "a" in {point.attributes.get("gen_ai.request.model") for point in points}


def test_requests_that_fail(told):
    client = told.served.client()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=TALK, temperature=-1)
    told.served.network.error = RuntimeError("broken")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    told.served.network.error = None
    assert fetched(told.served, "/health")[0] == 200
    refused, failed = ended(told, 2)
    assert (refused.name, refused.attributes["error.type"], refused.status.status_code) == (
        "chat", "400", StatusCode.UNSET,
    )
    assert (failed.name, failed.attributes["error.type"]) == (f"text_completion {MODEL}", "500")
    assert failed.status.status_code == StatusCode.ERROR


def test_measurements(told):
    told.served.client().completions.create(model="other", prompt="x", max_tokens=6, temperature=0)
    ended(told, 1)
    found = told.points()
    assert {name.removeprefix("gen_ai.server.") for name in found} == {
        "request.duration", "time_to_first_token", "time_per_output_token"
    }
    for name, points in found.items():
        (own,) = [each for each in points if each.attributes["gen_ai.operation.name"] == "text_completion"
                  and each.attributes.get("gen_ai.request.model") == "other"]
        assert own.count == 1, name
        assert own.sum > 0
        assert "error.type" not in own.attributes
        assert 10 < len(own.explicit_bounds) < 20


def test_vectors_and_scores_are_told_with_their_tokens(tmp_path):
    lines = []
    for layout, path, body in (
        ("mean", "/v1/embeddings", {"input": TEXTS, "dimensions": 8}),
        ("rerank", "/v1/rerank", {"query": "x", "documents": TEXTS}),
    ):
        with closing(Told(vector_folder(tmp_path, layout), log=lines.append)) as told, told.served:
            for _ in range(2):
                place, kind = told.served.url.removesuffix("/v1") + path, {"content-type": "application/json"}
                with urlopen(Request(place, json.dumps(body).encode(), kind), timeout=60) as page:
                    assert page.status == 200
                    page.read()
            first, again = ended(told, 2)
            (duration,) = told.points()["gen_ai.server.request.duration"]
            assert (duration.count, duration.attributes["gen_ai.operation.name"]) == (2, path.rpartition("/")[2])
        for span, line in zip((first, again), lines[-2:], strict=True):
            assert span.name == f"{path.rpartition('/')[2]} {MODEL}"
            assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
            assert span.attributes["gen_ai.usage.input_tokens"] == json.loads(line)["prompt_tokens"] > 100
            assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == json.loads(line)["cached_tokens"]
        cached = again.attributes["gen_ai.usage.cache_read.input_tokens"]
        assert (cached > 0) == (layout == "rerank")
        assert first.attributes.get("gen_ai.embeddings.dimension.count") == (8 if layout == "mean" else None)


def test_the_command_sends(tmp_path):
    """To the place that a variable says, at the latest when it ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    paths = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            paths.append((self.path, b"gen_ai" in body or self.headers.get("content-encoding") == "gzip"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        command = [sys.executable, "-m", "kvcache", "serve", "--port", "0", "--otel"]
        more = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | more) as process:
            url = process.stdout.readline().strip().partition(" at ")[2]
            openai.OpenAI(base_url=url, api_key="x").completions.create(model="demo", prompt="x", max_tokens=2)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        collector.shutdown()
    assert dict(paths) == {"/v1/traces": True, "/v1/metrics": True}


def test_without_the_packages(monkeypatch, capsys):
    from kvcache.__main__ import main

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert main(["serve", "--otel", "--model", "nowhere"]) == 2
    assert "kvcache-cpu[otel]" in capsys.readouterr().err
