"""Block events of a `BatchEngine`: a router's mirror is what the engine has cached, over every kind of network."""

import numpy as np
import pytest
from event_reader import Mirror, Reader, cached_texts
from prometheus_client.parser import text_string_to_metric_families
from seeded_weights import golden_folder
from serving import GREEDY, prompts

from kvcache import BatchEngine, EvictionPolicy
from kvcache.engine import Transformer
from kvcache.prefix.events.kv_events import KvEvents
from kvcache.serving import exposition

pytestmark = pytest.mark.one_build
SIZE = 4
BOTH = KvEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")


def make(network, **options):
    return BatchEngine(network, block_size=SIZE, **{"num_blocks": 24, "max_running": 4, "kv_events": BOTH} | options)


def run(engine):
    while engine.step():
        pass


def index_of(engine):
    return engine._pool.prefixes[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3_longrope", "lfm3", "qwen3_next"])
def test_a_mirror_of_each_kind_of_network(name, tmp_path):
    """Evictions, samples, namespaces, states, windows, regimes; a file that is loaded, and a clear."""
    engine = make(Transformer.from_pretrained(golden_folder(name)))
    index = index_of(engine)
    with Reader(engine.kv_events) as reader:
        for i, prompt in enumerate(prompts(3, 16, 40, engine.config.vocab_size)):
            engine.submit(prompt, GREEDY, namespace=(None, "a", (None, "b"))[i % 3], n=1 + i % 2)
            if i % 4 == 3:
                run(engine)
                engine.check()
        run(engine)
        read_until(reader, engine)
        assert "BlockRemoved" in reader.mirror.events
        assert {salt for salt, _ in reader.mirror.texts()} <= {None, "a", "b"}
        engine.save(tmp_path / "blocks")
        engine.clear_cache()
        read_until(reader, engine)
        assert not reader.mirror.blocks
        engine.load(tmp_path / "blocks")
        read_until(reader, engine)
        assert len(reader.mirror.blocks) > 4
        stats = engine.stats()
        assert stats.events_told > len(index)
        assert (stats.events_dropped, stats.event_snapshots) == (0, 0)
        engine.close()
        reader.read()
        assert not reader.mirror.blocks


def read_until(reader, engine):
    """Read until the mirror has what the engine has."""

    def salt(name):
        name = name[1] if isinstance(name, tuple) and isinstance(name[0], int) else name  # that of a regime
        return name[1] if isinstance(name, tuple) else name

    reader.read_until(index_of(engine), salt)


def test_without_them_nothing_is_recorded(network):
    engine = make(network, kv_events=None)
    assert engine.kv_events is None
    engine.generate_batch([[1, 2, 3, 4, 5]], GREEDY)
    assert index_of(engine)._index.events is None
    assert engine.stats().events_told == 0


def test_settings(network):
    with pytest.raises(ValueError, match="kv_events: expected none with an eviction_policy"):
        make(network, num_blocks=None, eviction_policy=EvictionPolicy.SlidingWindow(8, 0))
    with pytest.raises(ValueError, match="address: expected"):
        make(network, kv_events="127.0.0.1:5557")
    with pytest.raises(TypeError, match="kv_events: expected"):
        make(network, kv_events=5557)
    with make(network, kv_events="tcp://127.0.0.1:*") as engine:
        port = int(engine.kv_events.address.rpartition(":")[2])
        assert engine.kv_events == KvEvents(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ValueError, match=r"Address (already )?in use"):
            make(network, kv_events=engine.kv_events.address)
        with pytest.raises(TypeError, match="namespace: expected"):
            engine.submit([1, 2], GREEDY, namespace=1.5)
        assert engine.stats().waiting == 0


def test_topic_medium_and_rank(network):
    settings = KvEvents(BOTH.address, BOTH.replay, topic="kv@10.0.0.1:8000@m", medium="cpu", rank=3)
    with make(network, kv_events=settings) as engine, Reader(engine.kv_events) as reader:
        engine.submit([1, 2, 3, 4, 5], GREEDY).result()
        batches = [batch for _, batch in reader.replay(0)]
        assert any(b"cpu" in batch for batch in batches)
        assert all(batch.endswith(b"\x03") for batch in batches)  # the rank is the last number of a batch


def test_metrics(network):
    with make(network) as engine, Reader(engine.kv_events) as reader:
        engine.submit([1, 2, 3, 4, 5], GREEDY).result()
        reader.replay(0)
        page = exposition(engine.stats(), engine.namespace_stats())
    found = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    assert found["kvcache_events_told_total"] >= 1
    assert found["kvcache_event_replays_total"] == 1
    assert (found["kvcache_events_dropped_total"], found["kvcache_event_snapshots_total"]) == (0, 0)


def test_a_mirror_says_where_a_prompt_goes(network):
    """Two engines with the same tokens have the same hashes; the router finds the longer prefix."""
    mirrors = []
    for length in (9, 21):
        with make(network) as engine, Reader(engine.kv_events) as reader:
            engine.submit(np.arange(length), GREEDY).result()
            mirror = Mirror()
            for number, batch in reader.replay(0):
                mirror.take(number, batch)
            mirrors.append(mirror.blocks)
            assert cached_texts(index_of(engine)) == mirror.texts()
    short, long = ({page for page, (_, tokens, _) in blocks.items() if tokens[-1] < 20} for blocks in mirrors)
    assert len(short & long) >= 2
