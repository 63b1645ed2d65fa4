"""`ObjectStoreTier` over stores of obstore: in memory, in a folder, in an S3 server (moto, where it is installed)."""

import asyncio
import threading
from datetime import timedelta
from importlib.util import find_spec

import pytest
from prefix_engines import SHORT, prompt
from tier_stores import SECRET

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.tiers import ObjectStoreTier, Tiers

stores = pytest.importorskip("obstore.store")
pytestmark = pytest.mark.one_build
RETRIES = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}


@pytest.fixture(scope="module")
def s3():
    """An S3 server with a bucket, on a thread of this process."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    login = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **login).create_bucket(Bucket="kept")
    yield stores.S3Store(
        "kept", endpoint=url, region="us-east-1", client_options={"allow_http": True}, retry_config=RETRIES, **login
    )
    server.stop()


needs_moto = pytest.mark.skipif(find_spec("moto") is None, reason="moto is not installed")


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=needs_moto)])
def store(request, tmp_path):
    if request.param == "s3":
        made = request.getfixturevalue("s3")
        for batch in made.list():
            made.delete([each["path"] for each in batch])
        return made
    return stores.MemoryStore() if request.param == "memory" else stores.LocalStore(tmp_path)


def keys(count):
    return [i.to_bytes(20, "little") for i in range(count)]


def paths(store):
    return sorted(each["path"] for batch in store.list() for each in batch)


def test_values(store):
    tier, names = ObjectStoreTier(store, secret=SECRET, prefix="a/b-"), keys(20)
    assert tier.contains_many([]) == tier.get_many([]) == []
    tier.put_many([])
    assert not any(tier.contains_many(names))
    tier.put_many([(key, memoryview(key * 10_000)) for key in names[:15]])
    assert tier.contains_many(names) == [True] * 15 + [False] * 5
    assert tier.get_many(names) == [key * 10_000 for key in names[:15]] + [None] * 5
    assert paths(store) == sorted("a/b-" + key.hex() for key in names[:15])
    assert tier.get_many(names[:2], most_bytes=200_000) == [key * 10_000 for key in names[:2]]
    assert tier.get_many([*names[:2], names[19]], most_bytes=199_999) == [b"", b"", None]
    tier.put_many([(names[0], b"other")])
    assert tier.get_many(names[:1]) == [b"other"]
    assert ObjectStoreTier(store, secret=SECRET).contains_many(names[:1]) == [False]


def test_the_oldest_values_leave(store):
    """Objects of others stay; a second machine counts what the first one wrote."""
    store.put("kvcache/" + "x" * 40, b"y" * 5000)
    store.put("other", b"y" * 5000)
    tier, names = ObjectStoreTier(store, secret=SECRET, max_bytes=10_000), keys(30)
    for key in names:
        tier.put_many([(key, bytes(1000))])
    kept = tier.contains_many(names)
    assert 8 <= sum(kept) <= 10
    assert kept[-8:] == [True] * 8
    tier.put_many([(names[0], bytes(10_001))])
    assert not tier.contains_many(names[:1])[0]
    second = ObjectStoreTier(store, secret=SECRET, max_bytes=3000)
    second.put_many([(names[0], bytes(1000))])
    assert sum(tier.contains_many(names)) == 3
    assert [each for each in paths(store) if "x" in each or each == "other"] == ["kvcache/" + "x" * 40, "other"]


def test_two_engines_share_a_store(store, network):
    text = prompt(3, 400)
    want = InferenceEngine(network).generate(text, SHORT)
    for cached_tokens in (0, 384):
        tier = ObjectStoreTier(store, secret=SECRET)
        with Tiers([tier], after_uses=1, head_start=60) as tiers:
            engine = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)
            answer = engine.complete(text, SHORT)
            assert (answer.tokens, answer.cached_tokens) == (want, cached_tokens)
            assert tiers.flush(60)
    for path in paths(store):  # one bit of each
        value = bytearray(store.get(path).bytes())
        value[-1] ^= 1
        store.put(path, value)
    with Tiers([ObjectStoreTier(store, secret=SECRET)], after_uses=1, head_start=60) as tiers:
        answer = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers).complete(text, SHORT)
        assert (answer.tokens, answer.cached_tokens) == (want, 0)
        assert tiers.stats()[0].wrong == 1


class Wrapped:
    """A store whose methods first call `before`."""

    def __init__(self, store, before):
        self.store, self.before = store, before

    def __getattr__(self, name):
        inner = getattr(self.store, name)

        async def call(*arguments):
            await self.before(name)
            return await inner(*arguments)

        return call if name.endswith("_async") else inner


def test_stores_that_fail(network):
    """An error, an answer that never comes, an object that is longer than its head says: none changes an answer."""
    text = prompt(1, 400)
    want = InferenceEngine(network).generate(text, SHORT)
    active, most = 0, 0

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        async def list(self, prefix):
            await asyncio.sleep(3600)
            yield []

    tier = ObjectStoreTier(Slow(stores.MemoryStore()), secret=SECRET, max_bytes=10, timeout=0.05)
    with pytest.raises(TimeoutError):  # of the listing too
        tier.put_many([(keys(1)[0], b"x")])

    async def fail(name):
        raise ConnectionError(name)

    async def hang(name):
        await asyncio.sleep(3600)

    for before, error in ((fail, ConnectionError), (hang, TimeoutError)):
        tier = ObjectStoreTier(Wrapped(stores.MemoryStore(), before), secret=SECRET, timeout=0.05)
        for call in (tier.get_many, tier.contains_many):
            with pytest.raises(error):
                call(keys(3))
        with pytest.raises(error):
            tier.put_many([(keys(1)[0], b"x")])
        with Tiers([tier], after_uses=1, head_start=1) as tiers:
            engine = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers)
            assert engine.generate(text, SHORT) == want
            tiers.flush(0.2)
            assert tiers.stats()[0].errors > 0

    async def count(name):
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.001)
        active -= 1

    tier = ObjectStoreTier(Wrapped(stores.MemoryStore(), count), secret=SECRET, concurrency=3)
    assert tier.contains_many(keys(20)) == [False] * 20
    assert most == 3

    class Endless:
        def __init__(self):
            self.meta, self.read = {"size": 5}, 0

        async def stream(self):
            while True:
                self.read += 1
                yield bytes(1000)

    class Lying(Wrapped):
        async def get_async(self, path):
            self.found = Endless()
            return self.found

    lying = Lying(stores.MemoryStore(), count)
    assert ObjectStoreTier(lying, secret=SECRET).get_many(keys(1), most_bytes=10_000) == [b""]
    assert lying.found.read == 11


def test_calls_of_several_threads():
    tier, names = ObjectStoreTier(stores.MemoryStore(), secret=SECRET, max_bytes=50_000), keys(64)
    found = []

    def use(mine):
        for _ in range(5):
            tier.put_many([(key, key * 50) for key in mine])
            found.extend(zip(mine, tier.get_many(mine), strict=True))

    threads = [threading.Thread(target=use, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 5 * 16
    assert all(value in (None, key * 50) for key, value in found)
    assert sum(tier.contains_many(names)) <= 50


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"store": object()}, TypeError, "store: expected one of obstore.store, got object without get_async"),
        ({"secret": b"short"}, ValueError, "secret: expected 16 to 64 bytes, got 5"),
        ({"prefix": b"x"}, TypeError, "prefix: expected a str, got bytes"),
        ({"prefix": "/x"}, ValueError, "prefix: expected names with / between them, got '/x'"),
        ({"prefix": "../x"}, ValueError, "prefix: expected names with / between them, got '../x'"),
        ({"max_bytes": 0}, ValueError, "max_bytes: expected at least 1, got 0"),
        ({"concurrency": 0}, ValueError, "concurrency: expected an int >= 1, got 0"),
        ({"timeout": -1}, ValueError, "timeout: expected "),
    ],
)
def test_refused_by_name(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        ObjectStoreTier(**{"store": stores.MemoryStore(), "secret": SECRET, **options})
