"""`python -m bench tiers`: prefixes from a directory, a Redis server and a cluster of three, real ones on this machine.

Every try has a new engine, so that nothing is cached in it. `first token` is `generate` of one token. A network is a
proxy on loopback, a process of its own. Rates are those of a `PrefixCache` that gets or spills all blocks of a prompt:
probe, fetch, check and copy; beside them SET and GET of the same values in plain pipelines of 8 MB, for the directory
to and from the single server.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.support.checkpoints import SIZES, Size, write_checkpoint
from bench.support.common import timed
from bench.support.redis_servers import Cluster, Server
from bench.support.report import show, time_text, write_json
from bench.tiers.proxy import Proxy
from kvcache import InferenceEngine, PrefixCache, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer
from kvcache.tiers import DirectoryTier, RedisTier, Tier, Tiers

__all__ = ["add_arguments", "main"]

SECRET = bytes(range(32))
FIRST = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=1)
NETWORKS = [(rate, delay) for rate in (1, 10, 100) for delay in (0.001, 0.05)]  # MB/s, seconds of a round trip
LATER = 1.03  # times as late as without a tier, at most
SHARE = 0.8  # of a plain pipeline, at least
SECOND = 0.1  # of a cold first token, at most
MISS = 2e-3  # seconds of CPU, at most
LIMIT = "64GiB"  # of a directory and of queues


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--size", choices=sorted(SIZES), default="1b", help="network size (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="a GGUF file or a checkpoint, not a random network")
    parser.add_argument("--weights", help="format of the weights (default: that of --file, or q8)")
    parser.add_argument("--dtype", default="q4", help="format of K and V (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4080, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="tries per figure (default: %(default)s)")
    parser.add_argument("--only", default="", help="tables with this word in their titles")


class Setting:
    """The network, the prompt and the formats of a run."""

    def __init__(self, folder: str, dtype: str, weights: str, tokens: int, rounds: int) -> None:
        self.folder, self.dtype, self.weights, self.tokens, self.rounds = folder, dtype, weights, tokens, rounds
        self.model = Transformer.from_pretrained(folder, weights=weights)
        self.prompt = np.random.default_rng(0).integers(0, self.model.config.vocab_size, tokens).astype(np.uint32)

    def engine(self, tiers: Tiers | None = None) -> PrefixCachedEngine:
        """A new engine with nothing cached."""
        blocks = -(-(self.tokens + 64) // PrefixCachedEngine.BLOCK_SIZE)
        inner = InferenceEngine(self.model, dtype=self.dtype, num_blocks=blocks)
        return PrefixCachedEngine(inner, blocks, tiers=tiers, strict=True)

    def first_token(self, tiers: Tiers | None = None) -> float:
        """Seconds of a new engine."""
        engine = self.engine(tiers)
        return timed(lambda: engine.generate(self.prompt, FIRST))

    def store(self, tier: Tier) -> None:
        """Store the prompt in a tier."""
        with over(tier, after_uses=1) as tiers:
            self.engine(tiers).generate(self.prompt, FIRST)
            assert tiers.flush(120), "the prompt was not stored within two minutes"


@contextmanager
def over(tier: Tier, **options: Any) -> Iterator[Tiers]:
    """Tiers of one."""
    with Tiers([tier], **{"secret": SECRET, "queue_bytes": LIMIT, **options}) as tiers:
        yield tiers


def first_tokens(setting: Setting, tiers: dict[str, Tier]) -> list[list[str]]:
    """The first token computed, from RAM, and from each tier."""
    for tier in tiers.values():
        setting.store(tier)
    times: dict[str, list[float]] = {name: [] for name in ("computed", "RAM", *tiers)}
    hits = dict.fromkeys(times, 0)
    for _ in range(setting.rounds):
        engine = setting.engine()
        times["computed"].append(timed(lambda engine=engine: engine.generate(setting.prompt, FIRST)))
        times["RAM"].append(timed(lambda engine=engine: engine.generate(setting.prompt, FIRST)))
        for name, tier in tiers.items():
            with over(tier, after_uses=100) as both:
                times[name].append(setting.first_token(both))
                hits[name] = both.stats()[0].hits
    cold = median(times["computed"])
    return [
        [name, time_text(median(each)), f"{median(each) / cold:.1%}", str(hits[name] or "")]
        for name, each in times.items()
    ]


def filled_cache(setting: Setting, tiers: Tiers, name: str) -> PrefixCache:
    """A prefix cache of the network's shape, with room for the prompt."""
    config = setting.model.config
    cache = PrefixCache(
        setting.tokens // 16, 16, config.num_layers, config.num_kv_heads, config.head_dim, dtype=setting.dtype,
        source=tiers.source(name),
    )
    rng, size = np.random.default_rng(0), config.num_kv_heads * 16 * config.head_dim
    pairs = [rng.standard_normal((2, config.num_layers, size), np.float32)] * (setting.tokens // 16)
    for first in range(0, setting.tokens // 16, 16):
        cache.store(setting.prompt[: (first + 16) * 16], first * 16, pairs[first : first + 16])
    return cache


def rates(setting: Setting, tier: Tier, plain: Callable[[dict[bytes, bytes]], tuple[float, float]]) -> list[list[str]]:
    """Bytes per second of one tier beside the plain ones, with MACs and encrypted."""
    rows = []
    for encrypt in (False, True):
        to, back, plain_to, plain_back = [], [], [], []
        for turn in range(setting.rounds):
            with over(tier, encrypt=encrypt, deadline=60) as tiers:
                cache = filled_cache(setting, tiers, f"bench {turn}")
                blocks = len(cache)
                to.append(timed(lambda cache=cache, tiers=tiers, n=blocks: (cache.evict(n), tiers.flush(60))))
                back.append(timed(lambda cache=cache: cache.open_session(setting.prompt)))
                size = tiers.stats()[0].bytes_written
                assert tiers.stats()[0].bytes_read == size, "not all values came back"
            values = {os.urandom(20): os.urandom(size // (setting.tokens // 64)) for _ in range(setting.tokens // 64)}
            put, get = plain(values)
            plain_to.append(put)
            plain_back.append(get)
        for way, own, other in (("to", to, plain_to), ("from", back, plain_back)):
            mine, ratio = size / median(own), median([b / a for a, b in zip(own, other, strict=True)])
            name = f"{type(tier).__name__}{', encrypted' if encrypt else ''}"
            verdict = "met" if ratio >= SHARE else "MISSED"
            rows.append([name, way, rate_text(mine), rate_text(size / median(other)), f"{ratio:.0%}", verdict])
    return rows


def plain_pipeline(client: Any) -> Callable[[dict[bytes, bytes]], tuple[float, float]]:
    """Seconds to put and to get values in pipelines of 8 MB."""

    def run(values: dict[bytes, bytes]) -> tuple[float, float]:
        keys = list(values)
        step = max(1, (8 << 20) // len(values[keys[0]]))

        def put() -> None:
            for first in range(0, len(keys), step):
                with client.pipeline(transaction=False) as pipeline:
                    for key in keys[first : first + step]:
                        pipeline.set(key, values[key])
                    pipeline.execute()

        def get() -> None:
            for first in range(0, len(keys), step):
                with client.pipeline(transaction=False) as pipeline:
                    for key in keys[first : first + step]:
                        pipeline.get(key)
                    pipeline.execute()

        return timed(put), timed(get)

    return run


def rate_text(rate: float) -> str:
    """Bytes per second, as text."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _produce(folder: str, dtype: str, weights: str, tokens: int, port: int) -> None:
    """The first of two processes: computes the prompt and stores it in the cluster."""
    import redis

    setting = Setting(folder, dtype, weights, tokens, 1)
    with redis.RedisCluster(host="127.0.0.1", port=port, socket_timeout=30) as client:
        setting.store(RedisTier(client, secret=SECRET))


def two_processes(setting: Setting, cluster: Cluster) -> list[list[str]]:
    """The first token of a process beside that of another one that shares its cluster."""
    arguments = (setting.folder, setting.dtype, setting.weights, setting.tokens, cluster.servers[0].port)
    other = multiprocessing.get_context("spawn").Process(target=_produce, args=arguments)
    other.start()
    other.join()
    assert other.exitcode == 0, "the first process failed"
    cold, warm = [], []
    with cluster.client() as client:
        for _ in range(setting.rounds):
            cold.append(setting.first_token())
            with over(RedisTier(client, secret=SECRET), after_uses=100) as tiers:
                warm.append(setting.first_token(tiers))
    ratio = median([b / a for a, b in zip(cold, warm, strict=True)])
    verdict = "met" if ratio <= SECOND else "MISSED"
    return [[time_text(median(cold)), time_text(median(warm)), f"{ratio:.1%}", verdict]]


def slow_networks(setting: Setting, server: Server) -> list[list[str]]:
    """The first token over networks, beside that without a tier; each engine asks twice, so it knows the network."""
    import redis

    with server.client() as client:
        setting.store(RedisTier(client, secret=SECRET))
    rows = []
    for rate, delay in NETWORKS:
        without, first, second = [], [], []
        with Proxy(server.port, rate * 1e6, delay) as proxy:
            for _ in range(setting.rounds):
                without.append(setting.first_token())
                with (
                    redis.Redis(port=proxy.port, socket_timeout=60) as client,
                    over(RedisTier(client, secret=SECRET), after_uses=100) as tiers,
                ):
                    engine = setting.engine(tiers)
                    first.append(timed(lambda engine=engine: engine.generate(setting.prompt, FIRST)))
                    engine.clear_cache()
                    second.append(timed(lambda engine=engine: engine.generate(setting.prompt, FIRST)))
        ratios = [median([b / a for a, b in zip(without, times, strict=True)]) for times in (first, second)]
        verdict = "met" if max(ratios) <= LATER else "MISSED"
        times = [time_text(median(each)) for each in (without, first, second)]
        rows.append([f"{rate} MB/s, {delay * 1e3:g} ms", *times, *[f"{ratio:.1%}" for ratio in ratios], verdict])
    return rows


def misses(setting: Setting, tier: Tier) -> list[list[str]]:
    """CPU seconds, of all threads, of a lookup that finds nothing."""
    used = []
    with over(tier) as tiers:
        engine = setting.engine(tiers)
        assert engine._arrivals is not None
        source = engine._arrivals.source
        for turn in range(20 * setting.rounds + 1):
            began = time.process_time()
            with source.looking(f"nobody {turn}", setting.prompt, 0) as lookup:
                assert lookup is not None
                lookup.wait(60)
            used.append(time.process_time() - began)
    cost = median(used[1:])
    return [[type(tier).__name__, time_text(cost), "met" if cost < MISS else "MISSED"]]


def main(options: argparse.Namespace) -> int:
    """Print the tables; returns 1 if a bound was missed."""
    size: Size = SIZES["tiny" if options.quick else options.size]
    tokens, rounds = (512, 1) if options.quick else (options.tokens, options.rounds)
    tables: list[tuple[str, list[str], list[list[str]]]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = options.file or write_checkpoint(size, folder / "checkpoint")
        weights = options.weights or ("auto" if options.file else "q8")
        setting = Setting(str(path), options.dtype, weights, tokens, rounds)
        network = options.file.name if options.file else f"{size}, weights {weights}"
        with (
            Server(folder / "server") as server,
            Cluster(folder / "cluster") as cluster,
            server.client(socket_timeout=30) as single,
            cluster.client() as many,
        ):
            directory = DirectoryTier(folder / "tier", LIMIT, secret=SECRET)
            one, three = RedisTier(single, secret=SECRET), RedisTier(many, secret=SECRET)
            benches: list[tuple[str, list[str], Callable[[], list[list[str]]]]] = [
                (
                    "first token", ["from", "first token", "of computing", "values"],
                    lambda: first_tokens(setting, {"directory": directory, "Redis": one, "cluster of 3": three}),
                ),
                (
                    "rates", ["tier", "way", "rate", "plain", "share", f"at least {SHARE:.0%}"],
                    lambda: rates(setting, directory, plain_pipeline(single))
                    + rates(setting, one, plain_pipeline(single))
                    + rates(setting, three, plain_pipeline(many)),
                ),
                (
                    "two processes", ["cold", "from the cluster", "share", f"at most {SECOND:.0%}"],
                    lambda: two_processes(setting, cluster),
                ),
                (
                    "networks",
                    ["network", "no tier", "first prompt", "second", "first", "second", f"at most {LATER:.0%}"],
                    lambda: slow_networks(setting, server),
                ),
                (
                    "misses", ["tier", "CPU of a full miss", f"below {MISS * 1e3:g} ms"],
                    lambda: misses(setting, directory) + misses(setting, one) + misses(setting, three),
                ),
            ]
            for title, header, run in benches:
                if options.only in title:
                    for each in (one, three):
                        each.client.flushall()
                    tables.append((title, header, run()))
                    about = f"a prompt of {tokens} tokens, {network}, K and V {options.dtype}, median of {rounds}"
                    show(options.markdown, f"{title}: {about}", header, tables[-1][2])
    if not tables:
        raise SystemExit(f"--only: expected a word of a title, got {options.only!r}")
    write_json(options.json, tables=tables)
    return int(not options.quick and any("MISSED" in row for _, _, rows in tables for row in rows))
