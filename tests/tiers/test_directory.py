"""`DirectoryTier`: its limit, several processes, kills at any time, a full disk, and files that are no values."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from places import search_path
from prefix_engines import SHORT, prompt
from tier_stores import SECRET

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.errors import KvCacheError
from kvcache.tiers import DirectoryTier, Tiers, directory

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def keys(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.bytes(20) for _ in range(count)]


def on_disk(path):
    return sum(each.stat().st_size for each in path.glob("??/*"))


def test_what_was_put_is_found_by_another_object(tmp_path):
    one, names = DirectoryTier(tmp_path / "a" / "b", "1MB"), keys(5)
    assert one.contains_many(names) == [False] * 5
    assert one.get_many(names) == [None] * 5
    one.put_many([(key, b"%d" % i) for i, key in enumerate(names[:4])])
    one.put_many([(names[0], memoryview(bytearray(b"new")))])
    two = DirectoryTier(tmp_path / "a" / "b", 1000)
    assert two.contains_many(names) == [True] * 4 + [False]
    assert two.get_many(names) == [b"new", b"1", b"2", b"3", None]
    assert one.num_bytes == two.num_bytes == 6
    assert one.secret == two.secret
    assert len(one.secret) == 32
    assert DirectoryTier(tmp_path, 10, secret=SECRET).secret == SECRET
    assert (tmp_path / "a" / "b").stat().st_mode & 0o77 == 0
    assert (tmp_path / "a" / "b" / "secret").stat().st_mode & 0o77 == 0


def test_the_least_recently_used_leave(tmp_path):
    tier, names = DirectoryTier(tmp_path, 1000), keys(12)
    for i, key in enumerate(names[:10]):
        tier.put_many([(key, bytes(100))])
        os.utime(tier._path_of(key), (i, i))
    assert tier.contains_many(names[:10]) == [True] * 10
    tier.get_many(names[:2])  # these are used now
    tier.put_many([(names[10], bytes(100))])
    assert tier.contains_many(names) == [True, True, False, False] + [True] * 7 + [False]
    tier.put_many([(names[11], bytes(1001))])  # more than the limit
    assert not tier.contains_many(names[11:])[0]
    assert on_disk(tmp_path) == tier.num_bytes == 900


def test_any_history_keeps_the_limit(tmp_path, rng):
    tiers = [DirectoryTier(tmp_path, 20_000) for _ in range(2)]  # as two processes
    names, stored = keys(60), {}
    for _ in range(300):
        tier, key = tiers[rng.integers(2)], names[rng.integers(60)]
        if rng.random() < 0.5:
            stored[key] = rng.bytes(int(rng.integers(1, 1500)))
            tier.put_many([(key, stored[key])])
        (found,) = tier.get_many([key])
        assert found is None or found == stored[key]
        assert on_disk(tmp_path) <= 20_000 + 2 * (20_000 // 16 + 1500)


WRITER = """
import sys
from kvcache.tiers import DirectoryTier
tier = DirectoryTier(sys.argv[1], "1MB")
print("ready", flush=True)
key = 0
while True:
    key = (key + 1) % 40
    tier.put_many([(key.to_bytes(20, "big"), bytes([key]) * 20_000)])
"""


def test_a_killed_writer_leaves_whole_values(tmp_path, rng):
    """Two writers at once, killed at random times, and again over what they left."""
    for _ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": search_path()},
            )
            for _ in range(2)
        ]  # fmt: skip
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.05)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        tier = DirectoryTier(tmp_path, "1MB")
        names = [key.to_bytes(20, "big") for key in range(40)]
        for key, value in zip(names, tier.get_many(names), strict=True):
            assert value is None or value == key[-1:] * 20_000
        assert len(list(tmp_path.glob("??/.*.tmp"))) <= 8
    # What they left behind leaves with the rest.
    tier.put_many([(bytes([i]) * 20, bytes(100_000)) for i in range(20)])
    assert not list(tmp_path.glob("??/.*.tmp"))


def test_a_full_disk(tmp_path, monkeypatch):
    tier, names = DirectoryTier(tmp_path, "1MB"), keys(3)
    tier.put_many([(names[0], b"old")])

    def full(fd, buffers, offset):
        os.write(fd, bytes(memoryview(buffers[0])[:2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "write_at", full)
        with pytest.raises(OSError, match="No space left"):
            tier.put_many([(key, b"value") for key in names])
    assert tier.get_many(names) == [b"old", None, None]
    assert on_disk(tmp_path) == tier.num_bytes == 3


@contextmanager
def small_files(folder):
    """A limit of the size of files, which the kernel keeps: EFBIG after a part of a value, for any user."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def small_disk(folder):
    """A file system of 256 KB, which is full sooner or later: ENOSPC. It takes privileges."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_disks_that_are_really_full(tmp_path, network):
    """Answers are those without a tier, values that were stored stay whole, and no part of another one is left."""
    disks = [(small_files, errno.EFBIG)]
    with suppress(OSError, subprocess.CalledProcessError), small_disk(tmp_path / "tried"):
        disks.append((small_disk, errno.ENOSPC))
    texts = [prompt(seed, 300) for seed in range(6)]
    want = [InferenceEngine(network).generate(text, SHORT) for text in texts]
    for disk, code in disks:
        folder = tmp_path / disk.__name__
        with disk(folder):
            tier = DirectoryTier(folder, "1GB", secret=SECRET)
            small = keys(3)
            tier.put_many([(key, key * 1000) for key in small])
            with pytest.raises(OSError, match=os.strerror(code)) as raised:
                tier.put_many([(key, bytes(100_000)) for key in keys(9, seed=1)])
            assert raised.value.errno == code
            with Tiers([tier], after_uses=1, head_start=60) as tiers:
                cached = PrefixCachedEngine(InferenceEngine(network), 64, tiers=tiers, strict=True)
                assert [cached.generate(text, SHORT) for text in texts] == want
                tiers.flush(0.2)
                cached.clear_cache()
                assert [cached.generate(text, SHORT) for text in texts] == want
                (stats,) = tiers.stats()
                assert stats.errors >= 1
                assert stats.dropped + stats.queued_bytes > 0
                assert not tiers.close(0.2)
            assert tier.get_many(small) == [key * 1000 for key in small]
            assert not list(folder.glob("??/.*.tmp"))
            assert on_disk(folder) == tier.num_bytes
            if disk is small_disk:  # room again
                for each in folder.glob("??/*"):
                    each.unlink()
                tier.put_many([(small[0], b"new")])
                assert tier.get_many(small) == [b"new", None, None]
        if disk is small_files:
            tier.put_many([(small[0], bytes(100_000))])
            assert tier.get_many(small[:1]) == [bytes(100_000)]


def test_other_files_are_no_values(tmp_path):
    tier, names = DirectoryTier(tmp_path / "tier", "1MB"), keys(4)
    tier.put_many([(names[0], b"value")])
    places = [tmp_path / "tier" / key.hex()[:2] / key.hex()[2:] for key in names]
    for place in places[1:]:
        place.parent.mkdir(exist_ok=True)
    os.mkfifo(places[1])
    places[2].symlink_to(places[0])
    places[3].mkdir()
    assert tier.get_many(names[:2]) == [b"value", None]
    with pytest.raises(OSError, match="symbolic links"):
        tier.get_many(names[2:3])
    assert tier.get_many(names[3:]) == [None]


def test_refused_by_name(tmp_path):
    for options, message in [
        ({"max_bytes": 0}, "max_bytes: expected at least 1"),
        ({"max_bytes": "many"}, "max_bytes: expected"),
        ({"max_bytes": 10, "secret": b"short"}, "secret: expected 16 to 64 bytes, got 5"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            DirectoryTier(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    (tmp_path / "secret").write_bytes(b"too short")
    with pytest.raises(KvCacheError, match="expected a secret of 32 bytes, got 9"):
        DirectoryTier(tmp_path, 10)
