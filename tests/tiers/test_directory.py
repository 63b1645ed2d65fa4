"""`DirectoryTier`: its limit, several processes, kills at any time, a full disk, and files that are no values."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from places import search_path
from posix_modules import needs_posix, resource
from prefix_engines import SHORT, prompt
from tier_stores import GIVEN, SECRET

from kvcache.engine import InferenceEngine, PrefixCachedEngine
from kvcache.tiers import DirectoryTier, Tiers, directory

pytestmark = pytest.mark.one_build


def keys(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.bytes(20) for _ in range(count)]


def place(path, key):
    return path / key.hex()[:2] / key.hex()[2:]


def on_disk(path):
    return sum(each.stat().st_size for each in path.glob("??/*"))


def test_what_was_put_is_found_by_another_object(tmp_path):
    one, names = DirectoryTier(tmp_path / "a" / "b", "1MB", **GIVEN), keys(5)
    assert one.contains_many(names) == [False] * 5
    assert one.get_many(names) == [None] * 5
    one.put_many([(key, b"%d" % i) for i, key in enumerate(names[:4])])
    one.put_many([(names[0], memoryview(bytearray(b"new")))])
    two = DirectoryTier(tmp_path / "a" / "b", 1000, **GIVEN)
    assert two.contains_many(names) == [True] * 4 + [False]
    assert two.get_many(names) == [b"new", b"1", b"2", b"3", None]
    assert one.num_bytes == two.num_bytes == 6
    assert one.secret == two.secret
    assert len(one.secret) == 32
    assert DirectoryTier(tmp_path, 10, secret=SECRET).secret == SECRET
    if os.name == "posix":
        assert (tmp_path / "a" / "b").stat().st_mode & 0o77 == 0
        assert (tmp_path / "a" / "b" / "secret").stat().st_mode & 0o77 == 0


def test_the_least_recently_used_leave(tmp_path):
    tier, names = DirectoryTier(tmp_path, 1000, **GIVEN), keys(12)
    for i, key in enumerate(names[:10]):
        tier.put_many([(key, bytes(100))])
        os.utime(place(tmp_path, key), (i, i))
    assert tier.contains_many(names[:10]) == [True] * 10
    tier.get_many(names[:2])  # these are used now
    tier.put_many([(names[10], bytes(100))])
    assert tier.contains_many(names) == [True, True, False, False] + [True] * 7 + [False]
    tier.put_many([(names[11], bytes(1001))])  # more than the limit
    assert not tier.contains_many(names[11:])[0]
    assert on_disk(tmp_path) == tier.num_bytes == 900


def test_any_history_keeps_the_limit(tmp_path, rng):
    tiers = [DirectoryTier(tmp_path, 20_000, **GIVEN) for _ in range(2)]  # as two processes
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


@needs_posix
@pytest.mark.exhaustive
def test_a_killed_writer_leaves_whole_values(tmp_path, rng):
    """Two writers at once, killed at random times, and again over what they left."""
    for _ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": search_path()},
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.05)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        tier = DirectoryTier(tmp_path, "1MB", **GIVEN)
        names = [key.to_bytes(20, "big") for key in range(40)]
        for key, value in zip(names, tier.get_many(names), strict=True):
            assert value is None or value == key[-1:] * 20_000
        assert len(list(tmp_path.glob("??/.*.tmp"))) <= 8
    # What they left behind leaves with the rest.
    tier.put_many([(bytes([i]) * 20, bytes(100_000)) for i in range(20)])
    assert not list(tmp_path.glob("??/.*.tmp"))


def test_a_full_disk(tmp_path, monkeypatch):
    tier, names = DirectoryTier(tmp_path, "1MB", **GIVEN), keys(3)
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
    options = ["-t", "tmpfs", "-o", "size=256k,mode=700"]
    subprocess.run(["mount", *options, "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@needs_posix
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


@needs_posix
def test_other_files_are_no_values(tmp_path):
    """Not even where a value belongs: they are misses, and stay as they are."""
    tier, names = DirectoryTier(tmp_path / "tier", "1MB", **GIVEN), keys(5)
    tier.put_many([(names[0], b"value")])
    places = [place(tmp_path / "tier", key) for key in names]
    for each in places[1:4]:
        each.parent.mkdir(exist_ok=True)
    os.mkfifo(places[1])
    places[2].symlink_to(places[0])
    places[3].mkdir()
    places[4].parent.write_bytes(b"no folder")
    for _ in range(2):
        assert tier.get_many(names) == [b"value", None, None, None, None]
        assert tier.contains_many(names) == [True, False, False, False, False]
        tier.put_many([(names[3], b"lost"), (names[4], b"lost")])
    tier.put_many([(names[1], b"one"), (names[2], b"two")])
    assert tier.get_many(names) == [b"value", b"one", b"two", None, None]
    assert tier.num_bytes == 11
    assert not list(tmp_path.glob("tier/??/.*.tmp"))
    assert places[3].is_dir()
    assert places[4].parent.read_bytes() == b"no folder"


@needs_posix
def test_only_what_it_wrote_is_counted_and_deleted(tmp_path):
    """Files of other names in its folders, and whatever stands behind links in place of these, are not touched."""
    folder, home = tmp_path / "tier", tmp_path / "home"
    home.mkdir()
    (folder / "aa").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / "bb").symlink_to(home)
    others = [folder / "aa" / "thesis.txt", home / "id_rsa", home / ("0" * 38), folder / "aa" / ("0" * 37)]
    others += [folder / "aa" / "A" / "0", folder / "aa" / ".1-1-00000000.tmp.txt", folder / "AB" / ("0" * 38)]
    for each in others:
        each.parent.mkdir(exist_ok=True)
        each.write_bytes(bytes(60_000))
    tier, within = DirectoryTier(folder, 100_000, **GIVEN), [bytes([first]) * 20 for first in (0xAA, 0xBB, 0xCC, 0xCD)]
    assert tier.num_bytes == 0
    for _ in range(2):
        tier.put_many([(key, bytes(45_000)) for key in within])
        assert all(each.stat().st_size == 60_000 for each in others)
        assert sorted(each.name for each in home.iterdir()) == ["0" * 38, "id_rsa"]
    assert tier.get_many([b"\xbb" + bytes(19)]) == [None]  # the file behind the link
    assert tier.contains_many([b"\xbb" + bytes(19), *within]) == [False, False, False, True, True]
    assert tier.num_bytes == 90_000


def test_values_that_are_larger_than_expected_are_not_read(tmp_path, monkeypatch):
    tier, names = DirectoryTier(tmp_path, "1MB", **GIVEN), keys(3)
    tier.put_many([(names[0], bytes(100)), (names[1], bytes(101))])
    monkeypatch.setattr(directory, "read_at", lambda fd, buffers, at: all(len(each) <= 100 for each in buffers))
    found = tier.get_many(names, 100)
    assert [None if each is None else len(each) for each in found] == [100, 0, None]


def test_a_directory_that_is_deleted_meanwhile(tmp_path):
    tier, names = DirectoryTier(tmp_path / "tier", "1MB", **GIVEN), keys(2)
    tier.put_many([(names[0], b"old")])
    shutil.rmtree(tmp_path / "tier")
    assert tier.get_many(names) == [None, None]
    assert tier.contains_many(names) == [False, False]
    tier.put_many([(names[1], b"new")])
    assert tier.get_many(names) == [None, b"new"]


@needs_posix
def test_directories_that_others_can_write_to(tmp_path, monkeypatch):
    """Refused, then and later; a group may share one whose values a given secret proves."""
    tier = DirectoryTier(tmp_path, "1MB")
    for mode in (0o777, 0o1777, 0o775, 0o770, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(PermissionError, match=f"{tmp_path}: expected a secret, or a .* {mode:04o}$"):
            DirectoryTier(tmp_path, "1MB")
        with pytest.raises(PermissionError, match="expected a secret"):
            tier.get_many(keys(1))
        if mode & 0o002:
            with pytest.raises(PermissionError, match=f"expected a directory that not everybody.* {mode:04o}$"):
                DirectoryTier(tmp_path, "1MB", secret=SECRET)
        else:
            DirectoryTier(tmp_path, "1MB", secret=SECRET).put_many([(keys(1)[0], b"value")])
            assert place(tmp_path, keys(1)[0]).stat().st_mode & 0o777 == mode & 0o660
            shutil.rmtree(place(tmp_path, keys(1)[0]).parent)
    tmp_path.chmod(0o755)
    assert DirectoryTier(tmp_path, "1MB").secret == tier.secret
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="expected a secret, or a directory of this user"):
        DirectoryTier(tmp_path, "1MB")
    assert DirectoryTier(tmp_path, "1MB", secret=SECRET).get_many(keys(1)) == [None]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="two users take privileges")
def test_two_users_share_a_directory():
    """Each reads, replaces and deletes what the other one wrote, whatever their umask is."""
    folder = tempfile.mkdtemp()
    names = [bytes([first]) * 20 for first in (1, 1, 2, 3)]
    try:
        os.chown(folder, 12345, 7777)
        os.chmod(folder, 0o2770)
        for user in (12345, 12346, 12345):
            child = os.fork()
            if not child:
                try:
                    os.setgroups([])
                    os.setresgid(7777, 7777, 7777)
                    os.setresuid(user, user, user)
                    os.umask(0o077)
                    tier = DirectoryTier(folder, 1000, secret=SECRET)
                    for name in names:
                        tier.put_many([(name, b"%d" % user * 80)])
                        assert tier.get_many([name]) == [b"%d" % user * 80]
                    assert tier.num_bytes <= 1000
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        shutil.rmtree(folder)


@needs_posix
def test_the_secret_needs_no_hard_links(tmp_path, monkeypatch):
    """Tiers that begin at once all have the secret that the first of them drew."""
    monkeypatch.delattr(os, "link")
    written, wrote = [], directory.write_at

    def slowly(fd, buffers, offset):
        written.append(1)
        time.sleep(0.05)
        return wrote(fd, buffers, offset)

    monkeypatch.setattr(directory, "write_at", slowly)
    with ThreadPoolExecutor(8) as threads:
        tiers = list(threads.map(lambda _: DirectoryTier(tmp_path, 10), range(8)))
    assert len({tier.secret for tier in tiers}) == len(written) == 1


@needs_posix
@pytest.mark.parametrize("damaged", [b"", b"short", bytes(33)])
def test_a_damaged_secret_is_drawn_again(tmp_path, monkeypatch, caplog, damaged):
    """Values that were stored under the old one are not found any more, and the next start is an ordinary one."""
    monkeypatch.setattr(directory, "_WRITING", 0.05)
    before = DirectoryTier(tmp_path, 1000).secret
    (tmp_path / "secret").write_bytes(damaged)
    tier = DirectoryTier(tmp_path, 1000)
    assert tier.secret != before
    assert len(tier.secret) == 32
    assert [record.getMessage().count(f"{tmp_path}/secret: expected 32 bytes") for record in caplog.records] == [1]
    assert DirectoryTier(tmp_path, 1000).secret == tier.secret
    assert os.listdir(tmp_path) == ["secret"]
    assert len(caplog.records) == 1


@needs_posix
def test_secrets_that_others_may_have_chosen(tmp_path):
    place = tmp_path / "secret"
    for make in (lambda: place.symlink_to(tmp_path / "other"), place.mkdir, lambda: os.mkfifo(place)):
        make()
        with pytest.raises(PermissionError, match=f"{place}: expected a regular file .*, got a "):
            DirectoryTier(tmp_path, 10)
        place.rmdir() if place.is_dir() else place.unlink()
    place.write_bytes(bytes(32))
    place.chmod(0o620)
    with pytest.raises(PermissionError, match=r"got a regular file of user \d+ with mode 0620"):
        DirectoryTier(tmp_path, 10)
    if os.geteuid() == 0:
        place.chmod(0o600)
        os.chown(place, 12345, -1)
        with pytest.raises(PermissionError, match="got a regular file of user 12345 with mode 0600"):
            DirectoryTier(tmp_path, 10)


@needs_posix
def test_a_full_disk_leaves_no_part_of_a_secret(tmp_path, monkeypatch):
    def full(fd, buffers, offset):
        os.write(fd, b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "write_at", full)
        with pytest.raises(OSError, match="No space left"):
            DirectoryTier(tmp_path, 10)
    assert os.listdir(tmp_path) == []
    assert len(DirectoryTier(tmp_path, 10).secret) == 32


def test_refused_by_name(tmp_path):
    for options, message in [
        ({"max_bytes": 0}, "max_bytes: expected at least 1"),
        ({"max_bytes": "many"}, "max_bytes: expected"),
        ({"max_bytes": 10, "secret": b"short"}, "secret: expected 16 to 64 bytes, got 5"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            DirectoryTier(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(FileExistsError):
        DirectoryTier(__file__, 10)
