"""`DynamoWorker`: the interface that Dynamo 1.6.1 calls (`dynamo.common.backend`), over a `BatchEngine`.

Dynamo owns signals, registration, the drain, /live, /health and /metrics. It starts the worker, sends requests, tells
which ones clients have left, and cleans up.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from functools import lru_cache, partial
from typing import Any

import uvloop
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

from kvcache.engine.opening import checkpoint_text
from kvcache.errors import GrammarError, InvalidOperationError, OutOfMemoryError, QueueFullError
from kvcache.grammar import Trials
from kvcache.integrations.dynamo.dynamo_options import engine_of, options_of
from kvcache.integrations.dynamo.token_request import TokenRequest, chunk_of, end_of
from kvcache.serving import BatchEngine, Request, exposition
from kvcache.tiers import Tiers

__all__ = ["DynamoWorker", "run"]

logger = logging.getLogger("kvcache")

_LOAD_EVERY = 0.25  # seconds between two reports of the load
_TEXTS = 65_536  # of tokens, for log-probabilities
_FLUSH = 10.0  # seconds in which the last values reach the store


class DynamoWorker(LLMEngine):
    """A worker that Dynamo runs.

    Args:
        options: see `options_of`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._engine: BatchEngine | None = None
        self._tiers: Tiers | None = None
        self._running: dict[str, Request] = {}  # by the id of the context
        self._stopping, self._reporter = threading.Event(), threading.Thread()
        self._text_of = lru_cache(_TEXTS)(self._text)
        self._trials, self._grammars = Trials(), asyncio.Lock()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoWorker, WorkerConfig]:
        """The worker of a command line, and how it registers."""
        return cls.configured(options_of(argv))

    @classmethod
    def configured(cls, options: argparse.Namespace) -> tuple[DynamoWorker, WorkerConfig]:
        """The worker of some options, and how it registers."""
        types = "completions" if checkpoint_text(options.model).chat_template is None else "chat,completions"
        return cls(options), WorkerConfig(
            namespace=options.namespace, component=options.component, endpoint=options.endpoint,
            model_name=options.model, served_model_name=options.name, endpoint_types=types,
            discovery_backend=options.discovery_backend, request_plane=options.request_plane,
            event_plane=options.event_plane, enable_kv_routing=not options.no_kv_routing,
            tool_call_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model; requests may come when this returns."""
        engine, self._tiers = await asyncio.to_thread(engine_of, self._options)
        self._engine = engine.start()
        return EngineConfig(
            model=self._options.model, served_model_name=self._options.name,
            llm=LlmRegistration(
                context_length=self._context, kv_cache_block_size=engine.shared_block_size,
                total_kv_blocks=self._count()[1], max_num_seqs=self._options.max_running,
            ),
        )

    # -- what the router is told ----------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        """The address at which Dynamo reads the block events of the engine."""
        events = None if self._engine is None else self._engine.kv_events
        return [] if events is None else [ZmqSource(endpoint=events.address, topic=events.topic, dp_rank=events.rank)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """One rank reports its load."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report the load from now on."""
        self._reporter = threading.Thread(target=self._report, args=(publisher,), name="kvcache-load", daemon=True)
        self._reporter.start()

    def _report(self, publisher: Any) -> None:
        assert self._engine is not None
        while not self._stopping.wait(_LOAD_EVERY):
            (used, total), cached = self._count(), self._engine.cache_stats()
            publisher.publish(0, ComponentSnapshot(
                kv_used_blocks=used, kv_total_blocks=total, gpu_cache_usage=used / max(1, total), dp_rank=0,
                kv_cache_hit_rate=cached.hit_rate if cached.lookup_tokens else None,
            ))

    def _count(self) -> tuple[int, int]:
        """Blocks that requests have, and all."""
        assert self._engine is not None
        stats = self._engine.stats()
        return stats.claimed_blocks, stats.free_blocks + stats.claimed_blocks + stats.cached_blocks

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the counters of the engine to the page of metrics; not those of namespaces, whose names are salts."""
        assert self._engine is not None
        engine = self._engine
        metrics.register_prometheus_expfmt_callback(lambda: exposition(engine.stats(), {}))

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token, by which Dynamo finds out whether the engine answers."""
        found: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return found

    # -- requests -------------------------------------------------------------------------------------------

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The new tokens of all samples of a request, as they come, and why the first sample ended."""
        work, reasons = await self._submit(request), {}
        self._running[context.id()] = work
        try:
            async for part in work.arrivals(with_text=False):
                if part.finish_reason is not None:
                    reasons[part.index] = part.finish_reason
                if part.finish_reason == "cancelled" and self._stopping.is_set():
                    raise EngineShutdown("expected a worker that runs, got one that ends")
                if part.tokens:
                    yield chunk_of(part.index, part.tokens, part.logprobs, self._text_of)
            metrics = work.metrics  # the first chunk with a reason ends the stream, so there is one, behind all samples
            yield end_of(reasons[0], metrics.prompt_tokens, metrics.cached_tokens, metrics.new_tokens)
        finally:
            self._running.pop(context.id(), None)
            work.cancel()  # nothing, where it has ended

    async def _submit(self, request: Any) -> Request:
        engine = self._engine
        if engine is None or self._stopping.is_set():
            raise EngineShutdown("expected a worker that runs, got one that ends")
        try:
            tokens, params, n, namespace = TokenRequest.of(request, engine.sampling_params, self._context)
            if (grammar := params.grammar) is not None:
                prepare = partial(engine.prepare_grammar, grammar, params.stop_token_ids, trials=self._trials)
                async with self._grammars:  # one at a time, as they are tried; the event loop goes on
                    await asyncio.to_thread(prepare)
            return engine.submit(tokens, params, n=n, namespace=namespace)
        except QueueFullError as error:  # another worker may have room
            raise WorkerUnavailable(str(error)) from None
        except InvalidOperationError as error:
            raise EngineShutdown(str(error)) from None
        except (GrammarError, ImportError, OutOfMemoryError, TypeError, ValueError) as error:
            raise InvalidArgument(str(error)[:300]) from None

    async def abort(self, context: Any) -> None:
        """End a request whose client has left."""
        if (work := self._running.pop(context.id(), None)) is not None:
            work.cancel()

    @property
    def _context(self) -> int:
        assert self._engine is not None
        return self._engine.max_positions or self._engine.config.max_position_embeddings

    def _text(self, token: int) -> str:
        assert self._engine is not None
        return str(self._engine.tokenizer.decode([token], skip_special_tokens=False))

    async def cleanup(self) -> None:
        """End the engine and what it has open; a second call does nothing, and one after a failed start neither."""
        self._stopping.set()
        await asyncio.to_thread(self._trials.close)
        if self._reporter.ident is not None:
            await asyncio.to_thread(self._reporter.join)
        if self._engine is not None:
            await asyncio.to_thread(partial(self._engine.close, cancel=True))
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close, _FLUSH)
            self._tiers = None


def run(options: argparse.Namespace) -> None:
    """Run a worker until SIGINT or SIGTERM."""

    async def serve() -> None:
        await Worker(*DynamoWorker.configured(options)).run()

    uvloop.run(serve())
