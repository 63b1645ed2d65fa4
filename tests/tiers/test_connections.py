"""`Connections`: values over the connections of real clients, in pieces of any size, cut off, late, of another kind."""

import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import redis
from redis_programs import expect_redis
from tier_stores import SECRET

from bench.support.redis_servers import Cluster, Server
from kvcache.tiers import RedisTier, connections
from kvcache.tiers.connections import Connections, Unfit

pytestmark = pytest.mark.one_build

MOST = 1 << 30  # bytes of a value


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    expect_redis()
    with Server(tmp_path_factory.mktemp("server")) as made:
        yield made


class Wire:
    """A proxy that passes on what a server sends in pieces of random sizes, and after `left` bytes ends or waits."""

    def __init__(self, port):
        self.listening, self.target = socket.create_server(("127.0.0.1", 0)), port
        self.port, self.most, self.left, self.waits = self.listening.getsockname()[1], 100, None, False
        self.rng, self.opened = np.random.default_rng(0), []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self.opened += [client, server]
            for run, source, target in ((self.requests, client, server), (self.replies, server, client)):
                threading.Thread(target=run, args=(source, target), daemon=True).start()

    def requests(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        target.close()

    def replies(self, source, target):
        try:
            while data := source.recv(int(self.rng.integers(1, self.most))):
                if self.left is not None:
                    data, self.left = data[: self.left], max(0, self.left - len(data))
                target.sendall(data)
                if self.left == 0:
                    if not self.waits:
                        target.shutdown(socket.SHUT_RDWR)
                    return
        except OSError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for each in [self.listening, *self.opened]:
            each.close()


def filled(client, rng, most=3000):
    """A tier with values of random sizes, and the values of all names and of others."""
    tier, names = RedisTier(client, secret=SECRET), [rng.bytes(20) for _ in range(40)]
    values = {name: rng.bytes(int(rng.integers(most))) if i else b"" for i, name in enumerate(names[:30])}
    tier.put_many(list(values.items()))
    return tier, names, [values.get(name) for name in names]


class Liar:
    """A server whose `answer(command, key)` says what it sends."""

    def __init__(self, answer):
        self.answer, self.listening = answer, socket.create_server(("127.0.0.1", 0))
        self.port, self.opened = self.listening.getsockname()[1], 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                self.opened += 1
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with suppress(OSError, ValueError), client, client.makefile("rb") as requests:
            while line := requests.readline():
                parts = [requests.read(int(requests.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                own = parts[0] in (b"EXISTS", b"GET", b"SET")
                sent = self.answer(*parts[:2]) if own else b"-ERR\r\n" if parts[0] == b"HELLO" else b"+OK\r\n"
                for part in [sent] if isinstance(sent, bytes) else sent:
                    client.sendall(part)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.listening.close()


class Pipelines:
    """A client without connections to be seen."""

    def __init__(self, client):
        self.pipeline = client.pipeline


def idle(*clients):
    """No connection is in use."""
    return not any(client.connection_pool._in_use_connections for client in clients)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"health_check_interval": 1e-9}])
def test_values_come_whole(server, rng, options, monkeypatch):
    with server.client(**options) as client, Wire(server.port) as wire:
        for source, most in (client, 30_000), (redis.Redis(port=wire.port, socket_timeout=60, **options), 300):
            tier, names, values = filled(source, rng, most)
            for ahead in (1, 2, 7, 100):  # requests under way
                monkeypatch.setattr(Connections, "_ahead", ahead)
                assert tier._connections.get([tier._name(name) for name in names], MOST) == values
                assert idle(source)
            assert tier.get_many(names) == values
            assert tier.contains_many(names) == [True] * 30 + [False] * 10


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"health_check_interval": 1e-9}])
def test_values_are_stored_whole(server, rng, options):
    """Also one that no buffer of the system takes at once; the client reads what was stored."""
    with (
        server.client(**options) as client, Wire(server.port) as wire,
        redis.Redis(port=wire.port, socket_timeout=60, **options) as source,
    ):
        for to, ttl in ((client, None), (client, 1000), (source, 70)):
            tier = RedisTier(to, secret=SECRET)
            values = {rng.bytes(20): rng.bytes(size) for size in (0, 1, 300, 10_000_000, 70_000)}
            tier._connections.put([(tier._name(key), value) for key, value in values.items()], ttl)
            assert RedisTier(client, secret=SECRET).get_many(list(values)) == list(values.values())
            left = [client.ttl(tier._name(key)) for key in values]
            assert left == [-1] * 5 if ttl is None else all(0 < each <= ttl for each in left)
            assert idle(to)


def test_stores_that_fail(server, rng):
    """A reply that is an error, the end of a connection, a server that does not read: an error; the next call works."""
    with server.client(socket_timeout=2) as client, Wire(server.port) as wire:  # what works has to be done in it
        tier, values = RedisTier(client, secret=SECRET), [(rng.bytes(20), rng.bytes(20_000_000))] * 2
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            tier.put_many(values)
        client.config_set("maxmemory", 0)
        server.stop()
        with pytest.raises((OSError, redis.RedisError)):
            tier.put_many(values)
        server.go_on()
        assert idle(client)
        tier.put_many(values)
        assert tier.get_many([values[0][0]]) == [values[0][1]]
        with redis.Redis(port=wire.port, socket_timeout=60, retry=None) as source:
            tier, wire.left = RedisTier(source, secret=SECRET), 3
            with pytest.raises((OSError, redis.RedisError)):
                tier.put_many(values)
            wire.left = None
            tier.put_many(values)
            assert idle(source)


@pytest.mark.exhaustive
def test_values_of_a_cluster_come_whole(tmp_path, rng):
    expect_redis()
    with Cluster(tmp_path) as cluster, cluster.client() as client:
        tier, names, values = filled(client, rng, 300_000)
        for wait in (0.0, 1.0):
            tier._connections._wait.add(wait)
            assert tier._connections.get([tier._name(name) for name in names], MOST) == values
            assert idle(*map(client.get_redis_connection, client.get_primaries()))
        cluster.move(client.keyslot(tier._name(names[3])))
        assert tier.get_many(names) == values
        cluster.move(client.keyslot(tier._name(names[3])))
        values[3] = rng.bytes(1000)
        tier.put_many([(names[3], values[3])])
        assert tier.get_many(names) == values
        cluster.move(client.keyslot(tier._name(names[3])))
        assert tier.contains_many(names) == [value is not None for value in values]
        assert idle(*map(client.get_redis_connection, client.get_primaries()))
        strategy = redis.cluster.LoadBalancingStrategy.ROUND_ROBIN_REPLICAS
        with cluster.client(load_balancing_strategy=strategy) as other:  # among replicas, of which there are none
            assert RedisTier(other, secret=SECRET).get_many(names) == values


def test_the_round_trip_decides_how_many_are_under_way(server):
    with server.client() as client:
        connections = RedisTier(client, secret=SECRET)._connections
        assert connections._ahead == 1
        connections._transfer.add(0.004)
        for wait, size, ahead in ((0.0004, 1 << 20, 1), (0.0004, 1 << 10, 2), (0.041, 1 << 20, 12)):
            connections._wait.__init__()
            connections._wait.add(wait)
            connections._size = size
            assert connections._ahead == ahead


@pytest.mark.exhaustive
@pytest.mark.parametrize("waits", [False, True])
def test_connections_that_end_or_hang(server, rng, waits):
    """At every place of a reply: an error, and the next call has a connection that begins anew."""
    patience = 1 if waits else 60  # what works has to be done in it, on a busy machine too
    with Wire(server.port) as wire, redis.Redis(port=wire.port, socket_timeout=patience, retry=None) as client:
        tier, names, values = filled(client, rng)
        wire.most = 1 << 16
        assert tier.get_many(names) == values
        total = sum(len(value or b"") + 8 for value in values)
        places = [1, 2, 3, 4, 7, *rng.integers(1, total, 8).tolist()]
        for left in places[::3] if waits else places:
            wire.left, wire.waits = left, waits
            with pytest.raises((OSError, redis.RedisError)):
                tier._connections.get([tier._name(name) for name in names], MOST)
            wire.left = None
            assert tier.get_many(names) == values
            assert idle(client)


def test_what_is_left_to_the_client(server, rng):
    with server.client() as client:
        tier, names, values = filled(client, rng)
        client.rpush(tier._name(names[35]), "no value")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            tier.get_many(names)
        client.delete(tier._name(names[35]))
        assert tier.get_many(names) == values
        assert idle(client)
        with server.client(single_connection_client=True) as other:
            assert RedisTier(other, secret=SECRET).get_many(names) == values
        again = RedisTier(Pipelines(client), secret=SECRET)
        with pytest.raises(Unfit):
            again._connections.get([again._name(name) for name in names], MOST)
        assert again.get_many(names) == values
        assert again.contains_many(names) == [value is not None for value in values]
        gone = redis.Redis(port=1, retry=None)
        with pytest.raises(redis.ConnectionError):
            RedisTier(gone, secret=SECRET).get_many(names)
        assert idle(gone)


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}])
def test_values_that_are_larger_than_expected_are_not_read(server, rng, options):
    """Nor those behind them; the connection ends, and the next call has another one."""
    with server.client(**options) as client:
        tier, names = RedisTier(client, secret=SECRET), [rng.bytes(20) for _ in range(4)]
        client.flushall()
        tier.put_many([(names[0], b"a" * 1000), (names[1], b"b" * 30_000_000), (names[2], b"c" * 1000)])
        for ahead in (1, 3):
            tier._connections._wait.add(1.0 * (ahead > 1))
            tracemalloc.start()
            assert tier.get_many(names, 1000) == [b"a" * 1000, b"", None, None]
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
            tracemalloc.stop()
            assert idle(client)
            assert tier.get_many(names[2:], 1000) == [b"c" * 1000, None]
        assert tier.get_many(names[:2]) == [b"a" * 1000, b"b" * 30_000_000]


def flood(head):
    yield head
    for _ in range(3000):
        yield bytes(1 << 20)


LIES = {
    "a value of 3 GB": lambda: flood(b"$3145728000\r\n"),
    "a value of 2**63 bytes": lambda: flood(b"$9223372036854775807\r\n"),
    "a line without an end": lambda: flood(b"$"),
    "an error without an end": lambda: flood(b"-ERR "),
    "a number without an end": lambda: flood(b":1"),
    "an array": lambda: flood(b"*100000000\r\n$1\r\na\r\n"),
    "a message": lambda: flood(b">2\r\n$3145728000\r\n"),
    "another type": lambda: flood(b"=3145728000\r\ntxt:"),
    "a text of digits": lambda: "$\u0661\u0662\r\n".encode(),
    "a slot elsewhere": lambda: b"-MOVED 1 127.0.0.1:1\r\n",
    "an error that is none": lambda: b"-MOVED\r\n",
}


@pytest.mark.parametrize("lie", LIES)
def test_no_reply_takes_memory_or_is_asked_for_twice(rng, lie):
    """Whatever the call is: an error, or an empty value, and nothing of it stays; the client never reads it itself."""
    limit = 1 << 20
    with Liar(lambda command, key: LIES[lie]()) as liar:
        for protocol in (2, 3):
            with redis.Redis(port=liar.port, socket_timeout=60, protocol=protocol, retry=None) as client:
                client.ping() if protocol == 2 else None  # the other one fails to connect
                tier, names = RedisTier(client, secret=SECRET), [rng.bytes(20) for _ in range(3)]
                tracemalloc.start()
                for call in (
                    lambda tier=tier, names=names: tier.get_many(names, limit),
                    lambda tier=tier, names=names: tier.contains_many(names),
                    lambda tier=tier, names=names: tier.put_many([(name, b"value") for name in names]),
                ):
                    with suppress(OSError, redis.RedisError, ValueError):
                        assert call() == [b"", None, None]
                assert tracemalloc.get_traced_memory()[1] < 8 << 20
                tracemalloc.stop()
                assert idle(client)


def test_a_server_that_sends_a_byte_at_a_time(rng, monkeypatch):
    """No byte of it exceeds the client's timeout: the call has a limit of its own, also for a client without one."""

    def drip(command, key):
        for byte in b"$1000\r\n" + bytes(1000):
            yield bytes([byte])
            time.sleep(0.02)

    monkeypatch.setattr(connections, "_MOST_SECONDS", 0.3)
    with Liar(drip) as liar:
        for timeout in (None, 5):
            with redis.Redis(port=liar.port, socket_timeout=timeout, protocol=2, retry=None) as client:
                client.ping()
                tier, began, name = RedisTier(client, secret=SECRET), time.monotonic(), rng.bytes(20)
                for call, arguments in (
                    (tier.get_many, [name]), (tier.contains_many, [name]), (tier.put_many, [(name, b"value")]),
                ):
                    with pytest.raises((TimeoutError, ConnectionError)):
                        call(arguments)
                assert time.monotonic() - began < 30, "without a limit each call takes 20 seconds"
                assert idle(client)
                client.ping()
                assert client.connection_pool.get_connection()._sock.gettimeout() == timeout


def test_values_over_tls(server, rng, tmp_path):
    """A connection with TLS is read and written by the same code."""
    files = [str(tmp_path / name) for name in ("key", "certificate")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("the command openssl is needed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    with Wire(server.port) as wire:
        wire.listening, wire.most = context.wrap_socket(wire.listening, server_side=True), 1 << 16
        wire.port = wire.listening.getsockname()[1]
        threading.Thread(target=wire.accept, daemon=True).start()
        with redis.Redis(port=wire.port, socket_timeout=60, ssl=True, ssl_cert_reqs="none") as client:
            tier, names, values = filled(client, rng, 100_000)
            assert tier._connections.get([tier._name(name) for name in names], MOST) == values
            assert tier.contains_many(names) == [value is not None for value in values]
            assert idle(client)
