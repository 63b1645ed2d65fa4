"""Traces and measurements of requests by OpenTelemetry, in its names for generative networks, without any text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyio import current_time
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.server.vector_bodies import VectorAnswer, VectorBody
from kvcache.serving import Request as EngineRequest

__all__ = ["Telemetry", "exporting"]

_OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat",
    "/v1/completions": "text_completion", "/v1/embeddings": "embeddings", "/v1/rerank": "rerank",
}
_FLUSH = 5000  # milliseconds
# The boundaries of the histograms, in seconds, as the specification of the names advises.
_MEASURED = {
    "gen_ai.server.request.duration": (
        "the time that a request took", [0.01 * 2**power for power in range(14)],
    ),
    "gen_ai.server.time_to_first_token": (
        "the time from a request to its first token",
        [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
    ),
    "gen_ai.server.time_per_output_token": (
        "the mean time between the tokens of a request",
        [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
    ),
}


class Telemetry:
    """Tells OpenTelemetry of each request to the network, when it has ended: a span and three measurements.

    A span is named `chat MODEL`, `text_completion MODEL`, `embeddings MODEL` or `rerank MODEL`, and is part of the
    trace that the client's header `traceparent` names.

    Args:
        tracer_provider, meter_provider: of OpenTelemetry; None: those of the process.

    Raises:
        ImportError: without OpenTelemetry.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import metrics, propagate, trace
        except ImportError as error:
            raise _missing(error) from None
        self._trace, self._propagate = trace, propagate
        self._providers = tracer_provider or trace.get_tracer_provider(), meter_provider or metrics.get_meter_provider()
        self._tracer = trace.get_tracer("kvcache", tracer_provider=tracer_provider)
        meter = metrics.get_meter("kvcache", meter_provider=meter_provider)
        self._measured = {
            name: meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=bounds
            )
            for name, (description, bounds) in _MEASURED.items()
        }

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application that tells of its requests. It leaves `asked` and `requests` in the state of a scope."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
            if operation is None:
                return await app(scope, receive, send)
            parent = self._propagate.extract(dict(Headers(scope=scope)))
            span = self._tracer.start_span(operation, parent, self._trace.SpanKind.SERVER)
            began, status = current_time(), 0

            async def note(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, note)
            finally:
                self._tell(span, operation, status, scope["state"], current_time() - began)

        return traced

    def flush(self) -> None:
        """Send what has ended, for some seconds at most."""
        for provider in self._providers:
            if hasattr(provider, "force_flush"):  # of the SDK
                provider.force_flush(_FLUSH)

    def _tell(self, span: Any, operation: str, status: int, state: Mapping[str, Any], seconds: float) -> None:
        """End a span. Status 0: the client left before there was one."""
        common: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvcache"}
        if (asked := state.get("asked")) is not None:
            common["gen_ai.request.model"] = asked.model
            span.update_name(f"{operation} {asked.model}")
            span.set_attributes(_attributes(asked))
        if status >= 400 or not status:
            common["error.type"] = str(status or "cancelled")
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.set_attributes({**common, "http.response.status_code": status})
        times = {"gen_ai.server.request.duration": seconds}
        if requests := state.get("requests"):
            found, more = _answered(requests)
            span.set_attributes(found)
            times |= more
        for name, value in times.items():
            self._measured[name].record(value, common)
        span.end()


def _attributes(asked: Any) -> dict[str, Any]:
    """The attributes of what is asked for, but no texts."""
    if isinstance(asked, VectorBody):
        return {} if asked.dimensions is None else {"gen_ai.embeddings.dimension.count": asked.dimensions}
    params, n = asked.params, asked.n
    found = {
        name: getattr(params, name)
        for name in ("frequency_penalty", "max_tokens", "presence_penalty", "seed", "temperature", "top_k", "top_p")
    } | {"choice.count": n if n > 1 else None}
    given = {f"gen_ai.request.{name}": value for name, value in found.items() if value is not None}
    return given | {"gen_ai.output.type": "text" if params.grammar is None else "json"}


def _answered(requests: Sequence[EngineRequest | VectorAnswer]) -> tuple[dict[str, Any], dict[str, float]]:
    """The attributes of answers, and their times."""
    metrics = [request.metrics for request in requests]
    firsts = [each.ttft for each in metrics if each.ttft is not None]
    gaps = [gap for each in metrics for gap in each.itl]
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(each.prompt_tokens for each in metrics),
        "gen_ai.usage.output_tokens": sum(each.new_tokens for each in metrics),
        "gen_ai.usage.cache_read.input_tokens": sum(each.cached_tokens for each in metrics),
        "gen_ai.response.finish_reasons": [why or "cancelled" for each in requests for why in each.reasons],
    }
    times: dict[str, float] = {}
    if firsts:
        found["gen_ai.response.time_to_first_chunk"] = min(firsts)
        times["gen_ai.server.time_to_first_token"] = min(firsts)
    if gaps:
        times["gen_ai.server.time_per_output_token"] = sum(gaps) / len(gaps)
    return found, times


def exporting() -> Telemetry:
    """A `Telemetry` that sends by OTLP over HTTP, as the variables `OTEL_..` of the environment say.

    Providers that the process has already, of `opentelemetry-instrument`, say, stay.

    Raises:
        ImportError: without the packages of the extra `otel`.
    """
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from None
    resource = Resource.create()
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(tracers)
    if not isinstance(metrics.get_meter_provider(), MeterProvider):
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        metrics.set_meter_provider(MeterProvider([reader], resource))
    return Telemetry()


def _missing(error: ImportError) -> ImportError:
    return ImportError(f"otel needs OpenTelemetry: pip install 'kvcache-cpu[otel]' ({error})")
