"""Atomic replacement of files: the writer is killed, or the file system fails, at every step."""

import errno
import os
import random
import re
import signal
import time

import pytest
from contents import state
from posix_modules import fcntl, needs_posix, resource
from special_files import SPECIAL

from kvcache import PrefixCacheConfig, PrefixKvCache
from kvcache.support.descriptors import Replacement
from kvcache.support.file_calls import read_first, write_first
from kvcache.support.regular_files import read_at, write_at

pytestmark = pytest.mark.one_build

STEPS = ("open", "truncate", "pwritev", "fsync", "replace")


def cache_of(token, count=200):
    cache = PrefixKvCache(PrefixCacheConfig())
    cache.store_snapshot([token] * count, state(None, [token] * count, 16))
    return cache


def content(cache, path):
    cache.save(path)
    return path.read_bytes()


class Steps:
    """Counts the system calls that change files, and interrupts one of them: before, after or in the middle."""

    def __init__(self, stop, action, when="before"):
        self.count, self.stop, self.action, self.when = 0, stop, action, when

    def around(self, call):
        def step(*arguments, **more):
            self.count += 1
            if self.count != self.stop:
                return call(*arguments, **more)
            if self.when == "half" and call.__name__ == "pwritev":
                fd, buffers, offset = arguments
                call(fd, [memoryview(buffers[0]).cast("B")[: max(1, len(buffers[0]) // 2)]], offset)
            elif self.when == "after":
                call(*arguments, **more)
            return self.action()

        return step

    def patch(self, set_attribute):
        for name in STEPS:
            set_attribute(os, name, self.around(getattr(os, name)))


def num_steps(cache, path, monkeypatch):
    with monkeypatch.context() as patch:
        steps = Steps(-1, None)
        steps.patch(patch.setattr)
        cache.save(path)
    return steps.count


# Python 3.12 and later warn of forks with threads, here those of the pool, which the child does not use.
forks = pytest.mark.filterwarnings("ignore:.* use of fork:DeprecationWarning")


def in_child(run):
    """Fork, run the function in the child, wait, and return the signal that ended the child."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@needs_posix
@forks
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, when):
    path, old, new = tmp_path / "cache", cache_of(1), cache_of(2)
    contents = content(old, path), content(new, path)
    count = num_steps(new, path, monkeypatch)
    assert count == 12  # open, truncate, 4 pages, tables, header, fsync, replace, open folder, fsync folder
    seen = set()
    for stop in range(1, count + 1):
        old.save(path)

        def killed(stop=stop):
            Steps(stop, lambda: os.kill(os.getpid(), signal.SIGKILL), when).patch(setattr)
            new.save(path)

        assert in_child(killed) == signal.SIGKILL
        found = path.read_bytes()
        assert found in contents
        seen.add(contents.index(found))
        loaded = PrefixKvCache()
        assert loaded.load(path) == 1
        assert loaded.lookup([1 + contents.index(found)] * 200)[0] == 200
    assert seen == {0, 1}


def start(run):
    """Fork a child that exits with 0 if the function raises nothing; return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return child


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


@needs_posix
@pytest.mark.exhaustive
@forks
def test_writers_that_are_killed_at_any_time(tmp_path, long):
    """The file is always the old or the new one and can be loaded; few temporary files remain."""
    path, caches = tmp_path / "cache", (cache_of(1), cache_of(2, 700))
    contents, tokens = [content(cache, path) for cache in caches], ([1] * 200, [2] * 700)
    rng, left, runs = random.Random(0), 0, 0

    def save_for_ever():
        while True:
            for cache in caches:
                cache.save(path)

    while runs < (2000 if long else 50) or not left:  # on a busy machine a writer may not have begun
        assert runs < 5000, "no writer was killed while it wrote"
        runs += 1
        child = start(save_for_ever)
        time.sleep(rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = contents.index(path.read_bytes())
        loaded = PrefixKvCache()
        assert loaded.load(path) == 1
        assert loaded.lookup(tokens[found])[0] == len(tokens[found])
        # The first save of this child has removed the temporary file of the previous child.
        assert len(temporaries(tmp_path)) <= 2
        left += bool(temporaries(tmp_path))
    caches[0].save(path)
    assert os.listdir(tmp_path) == ["cache"]


@needs_posix
@forks
def test_writers_of_one_name_do_not_disturb_each_other(tmp_path, long):
    """A file that is being written is never removed, also if other writers of the same name are killed."""
    path, caches = tmp_path / "cache", (cache_of(1), cache_of(2, 700))
    contents, rng = [content(cache, path) for cache in caches], random.Random(1)

    def save_often():
        for _ in range(15):
            for cache in caches:
                cache.save(path)

    for _ in range(50 if long else 3):
        writers, doomed = [start(save_often) for _ in range(3)], [start(save_often) for _ in range(3)]
        for child in doomed:
            time.sleep(rng.uniform(0.001, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert path.read_bytes() in contents
        assert [os.waitpid(child, 0)[1] for child in writers] == [0, 0, 0]
        caches[0].save(path)
        assert os.listdir(tmp_path) == ["cache"]


@needs_posix
def test_only_temporaries_of_dead_writers_of_this_name_are_removed(tmp_path):
    path, cache = tmp_path / "cache", cache_of(1)
    others = [".cache.0123456.tmp", ".cache.0123456g.tmp", ".cache2.01234567.tmp", "cache.01234567.tmp", ".cache.tmp"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".cache.aaaaaaaa.tmp").mkdir()
    os.mkfifo(tmp_path / ".cache.bbbbbbbb.tmp")
    (tmp_path / ".cache.cccccccc.tmp").symlink_to(tmp_path / others[0])
    kept = set(os.listdir(tmp_path))
    for name in (".cache.01234567.tmp", ".cache.89abcdef.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with open(tmp_path / ".cache.dddddddd.tmp", "wb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        cache.save(path)
        assert set(os.listdir(tmp_path)) == {*kept, "cache", ".cache.dddddddd.tmp"}
    cache.save(path)
    assert set(os.listdir(tmp_path)) == {*kept, "cache"}


@needs_posix
def test_removal_between_the_creation_of_a_file_and_its_lock(tmp_path, monkeypatch):
    """If the name was removed, or its lock is taken, the writer chooses another name."""
    path, cache, flock, taken = tmp_path / "cache", cache_of(1), fcntl.flock, []

    def late(fd, how):
        if len(taken) < 2:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if taken:
                os.unlink(name)
            else:
                other = os.open(name, os.O_RDWR)
                flock(other, fcntl.LOCK_EX)
                taken.append(other)
                return flock(fd, how)
            taken.append(None)
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    cache.save(path)
    os.close(taken[0])
    assert len(taken) == 2
    assert os.listdir(tmp_path) == ["cache"]
    assert PrefixKvCache().load(path) == 1


def test_a_writer_that_lives_keeps_its_file(tmp_path):
    """Neither of two writers removes what the other one writes; the last one stays, and what a dead one left goes."""
    path = tmp_path / "cache"
    (tmp_path / ".cache.01234567.tmp").write_bytes(b"of a dead writer")
    with Replacement(path) as first:
        with Replacement(path) as second:
            assert len(temporaries(tmp_path)) == 2
            write_at(second, [b"se", b"cond"], 0)
        assert path.read_bytes() == b"second"
        assert write_at(first, [b"first", b"", b" writer"], 0) == 12
    assert os.listdir(tmp_path) == ["cache"]
    assert path.read_bytes() == b"first writer"
    third = Replacement(path)
    write_at(third.__enter__(), [b"third"], 0)
    third.__exit__(KeyError, KeyError(), None)
    assert os.listdir(tmp_path) == ["cache"]
    assert path.read_bytes() == b"first writer"


def test_the_first_view_is_written_and_read(tmp_path):
    """Systems without calls of several parts have these."""
    with Replacement(tmp_path / "file") as fd:
        assert write_first(fd, [memoryview(b"ab"), memoryview(b"cd")], 5) == 2
        found = bytearray(9)
        assert read_first(fd, [memoryview(found)], 0) == 7
        assert bytes(found) == b"\0" * 5 + b"ab\0\0"
        assert read_first(fd, [memoryview(found)], 7) == 0
    for call in (read_first, write_first) if os.name == "posix" else ():  # the C library of Windows ends the process
        with pytest.raises(OSError, match=str(errno.EBADF)):
            call(1 << 20, [memoryview(bytearray(1))], 0)


@needs_posix
def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Files are written as usual, and no temporary file is removed, since its writer may be alive."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".cache.01234567.tmp").touch()
    cache_of(1).save(tmp_path / "cache")
    assert sorted(os.listdir(tmp_path)) == [".cache.01234567.tmp", "cache"]


@needs_posix
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("linked", [False, True])
def test_only_regular_files_are_replaced(tmp_path, kind, linked):
    path = tmp_path / "folder" / "cache"
    path.parent.mkdir()
    SPECIAL[kind](path)
    before = os.lstat(path)
    if linked:
        (tmp_path / "link").symlink_to(path)
    with pytest.raises(FileExistsError, match=rf"expected a regular file or none, got {kind}") as caught:
        cache_of(1).save(tmp_path / "link" if linked else path)
    assert caught.value.errno == errno.EEXIST
    assert os.path.samestat(os.lstat(path), before)
    assert os.listdir(path.parent) == ["cache"]


@needs_posix
def test_a_directory_that_appears_during_the_write_is_not_replaced(tmp_path):
    path = tmp_path / "cache"
    with pytest.raises(FileExistsError, match="got a FIFO"), Replacement(path):
        os.mkfifo(path)
    assert os.listdir(tmp_path) == ["cache"]


def test_names_of_bytes(tmp_path):
    with Replacement(os.fsencode(tmp_path / "cache")) as fd:
        write_at(fd, [b"content"], 0)
    assert (tmp_path / "cache").read_bytes() == b"content"


@needs_posix
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_step_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error, when):
    path, old, new = tmp_path / "cache", cache_of(1), cache_of(2)
    contents = content(old, path), content(new, path)
    count = num_steps(new, path, monkeypatch)

    def fail():
        raise error

    for stop in range(2 if when == "after" else 1, count + 1):  # an exception right after open loses the descriptor
        old.save(path)
        with monkeypatch.context() as patch:
            Steps(stop, fail, when).patch(patch.setattr)
            with pytest.raises(type(error)):
                new.save(path)
        # After the replacement only the sync of the folder can fail.
        assert path.read_bytes() == contents[stop > count - 2 - (when == "after")]
        assert os.listdir(tmp_path) == ["cache"]
        new.check()


@needs_posix
def test_a_full_disk(tmp_path):
    """The system refuses to write beyond a limit."""
    path, old, new = tmp_path / "cache", cache_of(1), cache_of(2)
    want, size = content(old, path), len(content(new, path))
    old.save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 1, 127, 128, 4096, size // 2, size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with pytest.raises(OSError, match="too large"):
                    new.save(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert path.read_bytes() == want
            assert os.listdir(tmp_path) == ["cache"]
    finally:
        signal.signal(signal.SIGXFSZ, ignored)


@needs_posix
def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "cache", tmp_path / "link"
    cache_of(1).save(target)
    link.symlink_to(target)
    cache_of(2).save(link)
    assert link.is_symlink()
    loaded = PrefixKvCache()
    loaded.load(target)
    assert loaded.lookup([2] * 200)[0] == 200
    assert os.listdir(tmp_path / "folder") == ["cache"]


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        cache_of(1).save(tmp_path / "nothing" / "cache")


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    path = tmp_path / "nowhere" / "cache"
    folder = re.escape(str(path.parent))
    with pytest.raises(FileNotFoundError, match=f"^path: expected a folder that exists, got {folder}$"):
        Replacement(path).__enter__()


@pytest.mark.parametrize("some", [1, 3, 1 << 30])
def test_partial_reads_and_writes_are_continued(tmp_path, monkeypatch, some):
    """Any number and size of buffers, with system calls that read and write a few bytes at a time."""
    buffers = [bytes([i % 251]) * (i % 5) for i in range(2500)]
    whole = b"".join(buffers)
    monkeypatch.setattr("kvcache.support.regular_files._BYTES", some)
    with Replacement(tmp_path / "file") as fd:
        assert write_at(fd, buffers, 10) == 10 + len(whole)
    assert (tmp_path / "file").read_bytes() == bytes(10) + whole
    with open(tmp_path / "file", "rb") as file:
        into = [bytearray(len(buffer)) for buffer in buffers]
        assert read_at(file.fileno(), into, 10)
        assert into == buffers
        assert not read_at(file.fileno(), into, 11)
