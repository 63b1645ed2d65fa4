"""`PagedKvCache(spill=)`: the bits of a cache in memory, within a limit of bytes; what the file does wrong is told."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from format_pairs import NEIGHBOURS
from pace import FAST
from posix_modules import needs_posix, resource

from kvcache import PagedKvCache
from kvcache.errors import KvCacheError, SpillError


def pair_of_caches(tmp_path, share, blocks=200, heads=2, dim=64, **options):
    """A cache in memory, and one with this share of its bytes in memory."""
    plain = PagedKvCache(blocks, 16, heads, dim, num_layers=3, **options)
    limit = int(plain.block_memory_bytes * blocks * share)
    return plain, PagedKvCache(blocks, 16, heads, dim, num_layers=3, spill=tmp_path, max_memory_bytes=limit, **options)


def attended(cache, rng, layer, seqs, lens, dim=64):
    """The results of the kinds of calls over some sequences, whose last tokens are the queries."""
    queries = rng.standard_normal((sum(lens), 6, dim)).astype(np.float32)
    found = [
        cache.attention(layer, queries, seqs, query_lens=lens),
        cache.attention(layer, queries, seqs, query_lens=lens, top_tokens=48),
        cache.attention(layer, queries, seqs, query_lens=lens, window=100),
        *cache.attention(layer, queries, seqs, query_lens=lens, return_scores="head", return_lse=True),
    ]
    parents = np.concatenate([np.arange(n) // 2 - 1 for n in lens])
    return [*found, cache.attention(layer, queries, seqs, query_lens=lens, mask=parents)]


@pytest.mark.parametrize("formats", NEIGHBOURS)
def test_random_calls_have_the_bits_of_memory(rng, two_threads, tmp_path, monkeypatch, formats):
    """Sequences that grow, share, are cut and end, with a tenth of the bytes in memory; one as on other systems."""
    if formats == NEIGHBOURS[0]:
        monkeypatch.setattr("kvcache.support.spill_file.DIRECT", 0)
        monkeypatch.setattr("kvcache.support.spill_file.UNNAMED", 0)
    caches = pair_of_caches(tmp_path, 0.1, key_dtype=formats[0], value_dtype=formats[1])
    lens, seed = {}, 0
    for step in range(12 if FAST else 30):
        seed += 1
        do = rng.integers(6)
        if do == 0 and lens:
            gone = int(rng.choice(list(lens)))
            calls = [("free", gone)]
            del lens[gone]
        elif do == 1 and lens and len(lens) < 5:
            source = int(rng.choice(list(lens)))
            calls, lens[100 + step] = [("fork", source, 100 + step)], lens[source]
        elif do == 2 and lens:
            cut = int(rng.choice(list(lens)))
            lens[cut] = int(rng.integers(1, lens[cut] + 1))
            calls = [("truncate", cut, lens[cut])]
        elif len(lens) < 5 and sum(lens.values()) < 1500:
            calls, lens[step] = [("allocate", step, 0), ("append", step, 1)], 1
        else:
            calls = []
        for call, *arguments in calls:
            for cache in caches:
                getattr(cache, call)(*arguments)
        if not lens:
            continue
        more = {seq: int(rng.integers(1, 120)) for seq in lens if lens[seq] < 900}
        results = []
        for cache in caches:
            own = np.random.default_rng(seed)
            cache.append_batch([*more], [*more.values()])
            found = []
            for layer in range(3):
                for seq, count in more.items():
                    cache.write(layer, seq, *own.standard_normal((2, count, 2, 64)).astype(np.float32))
                queries = [min(7, lens[seq]) for seq in lens]
                found += attended(cache, own, layer, [*lens], queries)
            results.append(found)
            cache.check()
        for seq, count in more.items():
            lens[seq] += count
        for own, other in zip(*results, strict=True):
            np.testing.assert_array_equal(own.view(np.uint32), other.view(np.uint32))
    for seq in lens:
        for own, other in zip(caches[0].read_layers(seq), caches[1].read_layers(seq), strict=True):
            np.testing.assert_array_equal(own, other)
    assert os.name != "posix" or not list(tmp_path.iterdir())
    spill = caches[1].spill
    assert spill.memory_bytes <= spill.max_memory_bytes
    assert spill.waits > 0
    assert spill.reads > 100
    assert spill.writes > 100
    assert spill.faults == 0


def test_residuals_and_separate_layers_have_the_bits_of_memory(tmp_path):
    for options in ({"residual_length": 32, "first_tokens": 16}, {"separate_layers": True}):
        caches, results = pair_of_caches(tmp_path, 0.1, dtype="q4", **options), []
        for cache in caches:
            own, found = np.random.default_rng(1), []
            for seq in range(3 if cache.separate_layers else 1):
                cache.allocate(seq, 0)
            for _ in range(6):
                queries = own.standard_normal((50, 4, 64)).astype(np.float32)
                for layer in range(3):
                    seq = layer if cache.separate_layers else 0
                    if cache.separate_layers or layer == 0:
                        cache.append(seq, 50)
                    cache.write(layer, seq, *own.standard_normal((2, 50, 2, 64)).astype(np.float32))
                    found.append(cache.attention(layer, queries, [seq], query_lens=[50]))
                    found.append(cache.attention(layer, queries, [seq], query_lens=[50], top_tokens=16))
            if cache.separate_layers:
                cache.keep_tokens(1, np.arange(0, 300, 3))
                cache.compact(1)
                found.append(cache.attention(1, queries[:1], [1]))
            cache.check()
            results.append(found)
        for own, other in zip(*results, strict=True):
            np.testing.assert_array_equal(own, other)


def test_tokens_that_move_out_of_blocks_have_the_bits_of_memory(tmp_path):
    """The blocks that a compaction leaves stay until all of them have moved, wherever these lie; also shared ones."""
    for formats in NEIGHBOURS:
        rng = np.random.default_rng(2)
        rows, kept = rng.standard_normal((2, 800, 2, 64)).astype(np.float32), np.sort(rng.permutation(800)[:600])
        caches = pair_of_caches(tmp_path, 0.1, key_dtype=formats[0], value_dtype=formats[1])
        for cache in caches:
            cache.allocate(1, 800)
            for layer in range(3):
                cache.write(layer, 1, *rows)
            cache.fork(1, 2)
            for seq in (2, 1):  # one of shared blocks, then of its own
                cache.keep_tokens(seq, kept)
                cache.compact(seq)
                cache.check()
        for seq in (1, 2):
            for own, other in zip(caches[0].read_layers(seq), caches[1].read_layers(seq), strict=True):
                np.testing.assert_array_equal(own, other)


def filled(tmp_path, tokens=1600, share=0.1, **options):
    """A cache with a text of these tokens, another of 40, and queries."""
    _, cache = pair_of_caches(tmp_path, share, dtype="q4", **options)
    rng = np.random.default_rng(0)
    for seq, count in ((1, tokens), (2, 40)):
        cache.allocate(seq, count)
        for layer in range(3):
            cache.write(layer, seq, *rng.standard_normal((2, count, 2, 64)).astype(np.float32))
    return cache, rng.standard_normal((1, 4, 64)).astype(np.float32)


def blocks_elsewhere(cache, layer, seq):
    """Blocks of a sequence that a layer has in the file alone."""
    state = cache.blocks.store.spill.state
    return [block for block in map(int, cache.get_sequence(seq).block_ids) if state(layer, block) == (False, True)]


def attend_both(cache, queries):
    """Attention over text 2, whose blocks are good; then the error of text 1."""
    cache.attention(0, queries, [2])
    with pytest.raises(SpillError) as caught:
        cache.attention(0, queries, [1])
    cache.attention(0, queries, [2])
    cache.check()
    return caught.value


@needs_posix
def test_what_is_read_back_as_something_else_is_told_by_layer_and_block(tmp_path):
    """Other texts go on; a block that was replaced is good again."""
    cache, queries = filled(tmp_path)
    right = cache.attention(0, queries, [1])
    wanted, fd = blocks_elsewhere(cache, 0, 1), cache.blocks.store.spill.fd
    cache.attention(0, queries, [2])
    size = os.fstat(fd).st_size
    whole = bytearray(size)
    descriptor = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    os.preadv(descriptor, [whole], 0)
    slot = 4096  # of a block, 2,304 bytes
    bad = blocks_elsewhere(cache, 0, 1)[5]
    assert bad in wanted
    os.pwrite(descriptor, bytes([whole[bad * slot] ^ 1]), bad * slot)
    error = attend_both(cache, queries)
    assert (error.layer, error.block) == (0, bad)
    assert "others" in str(error)
    assert isinstance(error, KvCacheError)
    for call in (lambda: cache.read(0, 1), lambda: cache.attention(0, queries, [1], return_scores=True)):
        with pytest.raises(SpillError, match=f"layer 0, block {bad}"):
            call()
    os.pwrite(descriptor, bytes(whole[bad * slot : bad * slot + 1]), bad * slot)
    np.testing.assert_array_equal(cache.attention(0, queries, [1]), right)
    os.ftruncate(descriptor, 4096)
    os.close(descriptor)
    with pytest.raises(SpillError, match="shorter"):
        cache.attention(0, queries, [1])
    cache.free(1)
    cache.allocate(1, 1600)
    rows = np.ones((1600, 2, 64), np.float32)
    cache.write(0, 1, rows, rows)
    assert np.isfinite(cache.attention(0, queries, [1])).all()
    cache.check()


@needs_posix
def test_copies_of_what_cannot_be_read_are_no_better(tmp_path):
    """A copy of a shared block is told as the block is, and nothing ever reads as something else."""
    cache, queries = filled(tmp_path, tokens=1590)
    cache.fork(1, 3)
    rows = np.zeros((1, 2, 64), np.float32)
    for _ in range(3):
        cache.attention(0, queries, [2])
        cache.read(1, 2)
    last = int(cache.get_sequence(1).block_ids[-1])
    cache.read(2, 1)  # the last layer pushes the others out
    cache.read(1, 1, 0, 1500)
    assert last in blocks_elsewhere(cache, 0, 1)
    descriptor = os.open(f"/proc/self/fd/{cache.blocks.store.spill.fd}", os.O_RDWR)
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    cache.append(3, 1)  # copies the last block
    for seq in (1, 3):
        with pytest.raises(SpillError):
            cache.read(0, seq, 1584)
    with pytest.raises(SpillError):
        cache.write(0, 3, rows, rows)
    with pytest.raises(SpillError):
        cache.read(0, 3, 1584)
    cache.check()


def test_a_full_disk_is_told_where_memory_has_no_room_either(tmp_path):
    """Tokens are not added, what is there can be attended to, and once there is room all goes on."""
    cache, queries = filled(tmp_path, tokens=320, share=0.5)
    right = cache.attention(0, queries, [1])
    fd, full = cache.blocks.store.spill.fd, os.open("/dev/full", os.O_RDWR)
    own = os.dup(fd)
    os.dup2(full, fd)
    rng = np.random.default_rng(1)

    def write_on():
        for _ in range(200):
            cache.append(2, 16)
            for layer in range(3):
                cache.write(layer, 2, *rng.standard_normal((2, 16, 2, 64)).astype(np.float32))

    with pytest.raises(SpillError, match="No space left"):
        write_on()
    tokens = cache.get_sequence(2).num_tokens
    for _ in range(2):
        with pytest.raises(SpillError):
            cache.append(2, 1)
    assert cache.get_sequence(2).num_tokens == tokens
    cache.check()
    cache.fork(2, 3)
    cache.truncate(2, 40)
    cache.free(3)  # memory has room again
    cache.append(2, 16)
    rows = np.ones((16, 2, 64), np.float32)
    cache.write(0, 2, rows, rows)
    assert np.isfinite(cache.attention(0, queries, [2])).all()
    cache.check()
    os.dup2(own, fd)
    os.close(own)
    os.close(full)
    cache.append(2, 1)
    np.testing.assert_array_equal(cache.attention(0, queries, [1]), right)
    cache.check()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the file's room until it closes")
def test_slots_of_freed_blocks_go_back_to_the_disk(tmp_path):
    """A pool hands out the blocks that were freed first, so texts that come and go use all of its slots in turn."""
    cache = PagedKvCache(2000, 16, 2, 64, dtype="f32", num_layers=2, spill=tmp_path, max_memory_bytes=1 << 20)
    rows, most = np.random.default_rng(0).standard_normal((800, 2, 64)).astype(np.float32), 0
    slot = 16 * 2 * 2 * 64 * 4
    for seq in range(50):
        cache.allocate(seq, 800)
        for layer in range(2):
            cache.write(layer, seq, rows, rows)
        if seq:
            cache.free(seq - 1)
        most = max(most, cache.spill.file_bytes)
    assert most <= (2 * 2 * 100 + 1024 + 2 * 100) * slot  # of two texts, the slots that may be spare, a text more
    np.testing.assert_array_equal(cache.read(1, 49)[0], rows)
    cache.check()
    cache.free(49)
    for seq in range(100, 104):  # what is little stays
        cache.allocate(seq, 16)
    assert cache.spill.file_bytes <= 1024 * slot
    cache.check()


@needs_posix
def test_a_child_of_fork_is_refused(tmp_path):
    cache, queries = filled(tmp_path)
    child = os.fork()
    if not child:
        try:
            cache.attention(0, queries, [1])
        except SpillError as error:
            os._exit(0 if "child" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.attention(0, queries, [1])


KILLED = """
import os, signal, sys
import numpy as np
from kvcache import PagedKvCache
cache = PagedKvCache(400, 16, 2, 64, spill=sys.argv[1], max_memory_bytes=1 << 16)
cache.allocate(1, 6400)
rows = np.ones((6400, 2, 64), np.float32)
cache.write(0, 1, rows, rows)
assert cache.spill.writes > 300, cache.spill
assert cache.memory()["disk"] > 1 << 20
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_posix
def test_nothing_stays_of_a_process_that_is_killed(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "new")], check=False, timeout=120)
    assert done.returncode == -9
    assert oct((tmp_path / "new").stat().st_mode)[-3:] == "700"
    assert not list((tmp_path / "new").iterdir())


@needs_posix
def test_memory_stays_within_the_limit(tmp_path):
    """The process has the pages of the limit, and says so."""
    limit = 4 << 20
    cache = PagedKvCache(4000, 16, 4, 64, num_layers=2, dtype="f32", spill=tmp_path, max_memory_bytes=limit)
    cache.allocate(1, 0)
    rows = np.random.default_rng(0).standard_normal((1000, 4, 64)).astype(np.float32)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    for _ in range(60):
        cache.append(1, 1000)
        for layer in range(2):
            cache.write(layer, 1, rows, rows)
    assert cache.spill.memory_bytes <= limit
    assert cache.memory()["kv"] <= limit
    # K and V are 246 MB. Beside the limit are buffers of threads, and what AddressSanitizer keeps of freed memory.
    assert resident() - before < limit + (80 << 20)
    assert cache.memory()["disk"] > 200 << 20


@needs_posix
def test_what_cannot_be_honoured_is_named(tmp_path):
    sizes = {"block_size": 16, "num_heads": 2, "head_dim": 64}
    for options, error, name in (
        ({"num_blocks": 8}, TypeError, "max_memory_bytes"),
        ({"max_memory_bytes": 1 << 20}, TypeError, "num_blocks"),
        ({"num_blocks": 8, "max_memory_bytes": 0}, ValueError, "max_memory_bytes"),
    ):
        with pytest.raises(error, match=name):
            PagedKvCache(**sizes, spill=tmp_path, **options)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="no other can write"):
        PagedKvCache(8, **sizes, spill=tmp_path, max_memory_bytes=4096)
