"""`RedisTier` with real servers and a real cluster: killed, full, slow, with wrong passwords, and moving slots."""

import threading

import numpy as np
import pytest
import redis
from places import GOLDEN
from prefix_engines import SHORT, prompt
from redis_programs import expect_redis
from tier_stores import SECRET

from bench.support.redis_servers import Cluster, Server
from kvcache.engine import InferenceEngine, PrefixCachedEngine, Transformer
from kvcache.tiers import RedisTier, Tiers

expect_redis()
pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as made:
        yield made


def tiers_over(client, **options):
    return Tiers([RedisTier(client, secret=SECRET)], **{"after_uses": 1, "head_start": 60, **options})


def engine_over(network, tiers):
    return PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)


def keys(count):
    return [i.to_bytes(20, "little") for i in range(count)]


def test_values_in_a_server(server):
    with server.client() as client:
        tier = RedisTier(client, secret=SECRET, prefix="p:", ttl=100)
        names = keys(20)
        assert tier.contains_many([]) == tier.get_many([]) == []
        tier.put_many([])
        assert not any(tier.contains_many(names))
        tier.put_many([(key, memoryview(key * 10_000)) for key in names[:15]])
        assert tier.contains_many(names) == [True] * 15 + [False] * 5
        assert tier.get_many(names) == [key * 10_000 for key in names[:15]] + [None] * 5
        assert sorted(client.keys()) == sorted(b"p:" + key.hex().encode() for key in names[:15])
        assert 0 < client.ttl(b"p:" + names[0].hex().encode()) <= 100
        assert RedisTier(client, secret=SECRET).contains_many(names[:1]) == [False]


def test_values_in_a_cluster(cluster):
    """Also while slots move from one master to another, with their keys."""
    with cluster.client() as client:
        tier, names = RedisTier(client, secret=SECRET), keys(60)
        tier.put_many([(key, key * 100) for key in names])
        assert tier.get_many(names) == [key * 100 for key in names]
        counts = [node.dbsize() for node in map(client.get_redis_connection, client.get_primaries())]
        assert min(counts) > 5
        assert sum(counts) == 60
        for key in names[:5]:
            cluster.move(client.keyslot(tier._name(key)))
        assert tier.contains_many(names) == [True] * 60
        assert tier.get_many(names) == [key * 100 for key in names]
        tier.put_many([(key, key) for key in names])
        assert tier.get_many(names) == names


def test_two_engines_share_a_cluster(cluster, network):
    text = prompt(3, 400)
    want = InferenceEngine(network).generate(text, SHORT)
    with cluster.client() as client, tiers_over(client) as tiers:
        assert engine_over(network, tiers).generate(text, SHORT) == want
        assert tiers.flush(60)
    with cluster.client() as client, tiers_over(client) as tiers:
        answer = engine_over(network, tiers).complete(text, SHORT)
        assert (answer.tokens, answer.cached_tokens) == (want, 384)


def test_a_server_that_is_killed_and_started_again(server, network, monkeypatch):
    """It is killed in the middle of fetches and stores: no answer changes, and the tier is used again afterwards."""
    monkeypatch.setattr("kvcache.tiers.links.PAUSE", 0.05)
    texts = [prompt(seed, 400) for seed in range(4)]
    want = [InferenceEngine(network).generate(text, SHORT) for text in texts]
    with server.client() as client, tiers_over(client, head_start=0.2) as tiers:
        for turn in range(3):
            killer = threading.Timer(0.02 * turn, server.kill)
            killer.start()
            cached = engine_over(network, tiers)
            for _ in range(3):
                assert [cached.generate(text, SHORT) for text in texts] == want
                cached.clear_cache()
            killer.join()
            server.start()
        assert tiers.stats()[0].errors > 0
    with server.client() as client, tiers_over(client) as tiers:
        engine_over(network, tiers).generate(texts[0], SHORT)
        assert tiers.flush(60)
        assert engine_over(network, tiers).complete(texts[0], SHORT).cached_tokens == 384


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_full_server(tmp_path, network, policy):
    with (
        Server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", policy) as server,
        server.client() as client,
        tiers_over(client) as tiers,
    ):
        for seed in range(12):
            text = prompt(seed, 400)
            want = InferenceEngine(network).generate(text, SHORT)
            assert engine_over(network, tiers).generate(text, SHORT) == want
            tiers.flush(60 if policy == "allkeys-lru" else 0.2)
        (stats,) = tiers.stats()
        assert stats.stored
        assert (stats.errors > 0) == (policy == "noeviction")
        assert (client.info()["evicted_keys"] > 0) == (policy == "allkeys-lru")


def test_a_server_that_does_not_answer(server, network):
    """A call that hangs makes no prompt wait; the client's timeout ends it, and the tier is passed over."""
    text = prompt(1, 400)
    want = InferenceEngine(network).generate(text, SHORT)
    with server.client(socket_timeout=0.5) as client, tiers_over(client, head_start=0) as tiers:
        cached = engine_over(network, tiers)
        cached.generate(text, SHORT)
        assert tiers.flush(60)
        server.stop()
        for _ in range(30):
            cached.clear_cache()
            assert cached.generate(text, SHORT) == want
        server.go_on()


def test_a_wrong_password(tmp_path, network):
    with Server(tmp_path, "--requirepass", "right") as server:
        text = prompt(1, 200)
        want = InferenceEngine(network).generate(text, SHORT)
        with server.client(password="wrong") as client, tiers_over(client) as tiers:
            cached = engine_over(network, tiers)
            for _ in range(4):
                assert cached.generate(text, SHORT) == want
                cached.clear_cache()
            tiers.flush(0.2)
            (stats,) = tiers.stats()
            assert stats.errors >= 3
            assert stats.passed > 0
        with server.client(password="right") as client, tiers_over(client) as tiers:
            engine_over(network, tiers).generate(text, SHORT)
            assert tiers.flush(60)
            assert tiers.stats()[0].stored == 3


def test_values_that_belong_elsewhere(server, network):
    """Corrupt, truncated and exchanged values, those of another tenant and of another model, under right keys."""
    text = prompt(1, 200)
    want = InferenceEngine(network).generate(text, SHORT)
    with server.client() as client:
        taken = []
        foreign = Transformer.from_pretrained(GOLDEN / "llama", weights="q8")  # values of the same size
        for model, namespace in ((network, "a"), (network, "b"), (foreign, "a")):
            client.flushall()
            with tiers_over(client) as tiers:
                engine_over(model, tiers).generate(text, SHORT, namespace=namespace)
                assert tiers.flush(60)
            taken.append({key: client.get(key) for key in client.scan_iter()})
        mine, others, models = taken[0], *(list(each.values()) for each in taken[1:])
        assert {len(value) for value in mine.values()} == {len(value) for value in models}
        rng = np.random.default_rng(0)

        def damaged(value):
            at = int(rng.integers(len(value)))
            return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]

        values = list(mine.values())
        for change in (
            damaged, lambda value: value[: len(value) // 2], lambda value: values[values.index(value) - 1],
            lambda value: others[values.index(value)], lambda value: models[values.index(value)], lambda value: b"",
            lambda value: b"x" * len(value),
        ):
            for key, value in mine.items():
                client.set(key, change(value))
            with tiers_over(client) as tiers:
                cached = engine_over(network, tiers)
                answer = cached.complete(text, SHORT, namespace="a")
                assert (answer.tokens, answer.cached_tokens) == (want, 0)
                assert tiers.stats()[0].wrong == 1
                assert tiers.flush(60)  # what was found wrong is written again
                cached.clear_cache()
                assert cached.complete(text, SHORT, namespace="a").cached_tokens == 64


def test_refused_by_name(server):
    with server.client() as client:
        for arguments, options, message in [
            ((object(),), {}, "client: expected a synchronous client of redis or valkey, got object"),
            ((redis.asyncio.Redis(),), {}, "client: expected a synchronous client of redis or valkey, got Redis"),
            ((client,), {"secret": b"short"}, "secret: expected 16 to 64 bytes"),
            ((client,), {"prefix": b"p"}, "prefix: expected a str, got bytes"),
            ((client,), {"ttl": 0}, "ttl: expected an int >= 1"),
            ((client,), {"ttl": 2**53 + 1}, "ttl: expected an int <= 9007199254740992"),
        ]:
            with pytest.raises((TypeError, ValueError), match=message):
                RedisTier(*arguments, **{"secret": SECRET, **options})
    with server.client() as client:  # the longest one is one for the server too
        tier = RedisTier(client, secret=SECRET, ttl=2**53)
        tier.put_many([(keys(1)[0], b"value")])
        assert tier.get_many(keys(1)) == [b"value"]
    with (
        server.client(decode_responses=True) as client,
        pytest.raises(ValueError, match="client: expected decode_responses=False, got True"),
    ):
        RedisTier(client, secret=SECRET)


@pytest.mark.exhaustive
def test_random_faults_of_servers(network, tmp_path, rng, monkeypatch, long):
    """Kills and restarts, closed connections, slow answers, a flush, and moved slots between and during requests."""
    monkeypatch.setattr("kvcache.tiers.links.PAUSE", 0.01)
    plain, want = InferenceEngine(network, dtype="q4"), {}
    with (
        Server(tmp_path / "one") as server,
        Cluster(tmp_path / "three") as cluster,
        server.client(socket_timeout=0.3) as single,
        server.client() as admin,
        cluster.client() as many,
    ):

        def close_connections():
            admin.client_kill_filter(_type="normal", skipme=True)

        def restart():
            server.kill()
            server.start()

        def move():
            slots = [many.keyslot(key) for key in many.scan_iter(count=1000)]
            if slots:
                cluster.move(slots[int(rng.integers(len(slots)))])

        faults = [
            close_connections, restart, move, admin.flushall,
            lambda: admin.execute_command("CLIENT", "PAUSE", 100),
            lambda: admin.execute_command("CONFIG", "SET", "maxmemory", int(rng.integers(1, 4)) * 2**20),
        ]
        links = [RedisTier(single, secret=SECRET), RedisTier(many, secret=SECRET)]
        with Tiers(links, after_uses=1, head_start=0.05, encrypt=True) as tiers:
            cached = PrefixCachedEngine(InferenceEngine(network, dtype="q4"), 30, tiers=tiers, strict=True)
            for turn in range(10_000 if long else 60):
                text = prompt(int(rng.integers(6)), int(rng.integers(100, 480)))
                key = text.tobytes()
                if key not in want:
                    want[key] = plain.generate(text, SHORT)
                running = None
                if turn % 3 == 0:
                    running = threading.Thread(target=faults[rng.integers(len(faults))])
                    running.start()
                assert cached.generate(text, SHORT, namespace=turn % 2) == want[key]
                if running is not None:
                    running.join()
                if turn % 5 == 0:
                    cached.clear_cache()
            cached.check()
            assert sum(stats.hits for stats in tiers.stats()) > 0
