"""False tables of a saved cache with valid checksums: each is refused with its own message."""

import os
import struct
import zlib

import pytest
from contents import state
from saved_caches import SIZE, blocks, entries, get, put, refuse

from kvcache.support import regular_files as files_module
from kvcache.support.descriptors import File

HEADER, MODEL = 128, "this one"
SIZE_OF_FILE, SEGMENTS, TOKENS, PAGES, NAMES_BYTES = 16, 24, 32, 40, 48  # uint64 each, in the header
ARENAS, NAMES, MODEL_BYTES = 56, 60, 64  # uint32 each


class Tables:
    """The bytes of a file, and the offsets of its tables."""

    def __init__(self, path):
        self.path, self.data = path, bytearray(path.read_bytes())
        self.arenas = HEADER
        self.segments = self.arenas + 64 * self.number(ARENAS)
        self.tokens = self.segments + 16 * self.number(SEGMENTS)
        self.names = self.tokens + 4 * self.number(TOKENS) + 4 * self.number(PAGES)
        self.end = self.names + self.number(NAMES_BYTES) + self.number(MODEL_BYTES)

    def number(self, at):
        return struct.unpack_from("<I", self.data, at)[0]

    def add(self, at, difference):
        struct.pack_into("<I", self.data, at, (self.number(at) + difference) % 2**32)

    def write(self):
        struct.pack_into("<I", self.data, 68, zlib.crc32(self.data[HEADER : self.end]))
        struct.pack_into("<I", self.data, 124, zlib.crc32(self.data[:124]))
        self.path.write_bytes(self.data)


@pytest.fixture
def tables(tmp_path):
    """Two namespaces: in "a" two texts that fork, three segments, in "b" one."""
    cache = entries()
    put(cache, "a", [1] * 20 + [2] * 9)
    put(cache, "a", [1] * 20 + [3] * 9)
    put(cache, "b", [4] * 9)
    cache.save(tmp_path / "cache", model=MODEL)
    found = Tables(tmp_path / "cache")
    assert [found.number(at) for at in (SEGMENTS, TOKENS, NAMES)] == [4, 47, 2]
    return found


def test_the_unchanged_file_is_loaded(tables):
    """The unchanged file is loaded, so the changes below are what is refused."""
    tables.write()
    cache = entries()
    assert cache.load(tables.path, model=MODEL) == 3
    assert get(cache, "a", [1] * 20 + [3] * 9)[0] == 29


def test_large_tables_are_checked_a_piece_at_a_time(tables, monkeypatch):
    """The whole file is loaded; one with a wrong byte, or with a false segment and the right checksum, is refused."""
    for name, count in (("_SMALL", 0), ("_PIECE", 64)):
        monkeypatch.setattr(f"kvcache.saved.snapshot.{name}", count)
    tables.write()
    assert entries().load(tables.path, model=MODEL) == 3
    whole = tables.path.read_bytes()
    for at in range(tables.arenas, tables.end, 13):
        tables.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refuse(entries(), tables.path, "expected", MODEL)
    tables.path.write_bytes(whole[: tables.tokens] + b"\xff" + whole[tables.tokens + 1 :])
    refuse(entries(), tables.path, "expected tables with their checksum, got damaged ones", MODEL)
    tables.add(tables.segments + 16, 9)
    tables.write()
    refuse(entries(), tables.path, "expected segments that follow their parents", MODEL)


NAME = struct.calcsize("<II")  # of the arena and of the length, before a name
FALSE_TABLES = {
    "a layout": (lambda t: t.add(t.arenas + 22, 8), "expected an arena with pages of layout 1 to 4"),
    "pages of no bytes": (lambda t: t.add(t.arenas + 28, -t.number(t.arenas + 28)), "expected pages of"),
    "an arena": (lambda t: t.add(t.names, 1), "expected a namespace of one of 1 arenas, got 1"),
    "a name's length": (lambda t: t.add(t.names + 4, 1000), "expected a namespace of one of 1 arenas"),
    "a name's kind": (lambda t: t.add(t.names + NAME, 1), "namespace: expected the bytes of one, got others"),
    "a name's own length": (lambda t: t.add(t.names + NAME + 1, 1), "namespace: expected 2 bytes, got 1"),
    "as many names": (lambda t: t.add(NAMES, 1), "expected 3 different namespaces, got 2"),
    "a segment's namespace": (lambda t: t.add(t.segments, 9), "expected segments that follow their parents"),
    "a segment's mark": (lambda t: t.add(t.segments + 12, 7), "expected segments that follow their parents"),
    "a segment's tokens": (lambda t: t.add(t.segments + 8, 1), "expected 48 tokens, got 47"),
}


@pytest.mark.parametrize("name", FALSE_TABLES)
def test_a_false_table_is_refused(tables, name):
    change, message = FALSE_TABLES[name]
    change(tables)
    tables.write()
    refuse(entries(), tables.path, message, MODEL)


def test_a_segment_before_its_parent_or_its_own(tables):
    for parent in (0, 3):
        tables.add(tables.segments + 4, parent - tables.number(tables.segments + 4))
        tables.write()
        refuse(entries(), tables.path, "expected segments that follow their parents", MODEL)


def test_a_segment_of_no_tokens(tables):
    tables.add(tables.segments + 16 + 8, tables.number(tables.segments + 8))
    tables.add(tables.segments + 8, -tables.number(tables.segments + 8))
    tables.write()
    refuse(entries(), tables.path, "expected segments that follow their parents", MODEL)


def test_two_namespaces_of_one_name(tables):
    first, second = (tables.data.index(piece, tables.names) + 5 for piece in (b"s\1\0\0\0a", b"s\1\0\0\0b"))
    tables.data[second] = tables.data[first]
    tables.write()
    refuse(entries(), tables.path, "expected 2 different namespaces, got 1", MODEL)


def test_a_namespace_in_two_arenas(tmp_path):
    """Each namespace is in one arena."""
    cache = entries()
    for name, dim in (("a", 8), ("b", 16)):
        cache.store_snapshot([1, 2, 3], state(name, [1, 2, 3], dim), namespace=name)
    cache.save(tmp_path / "cache", model=MODEL)
    tables = Tables(tmp_path / "cache")
    first, second = (tables.data.index(piece, tables.names) + 5 for piece in (b"s\1\0\0\0a", b"s\1\0\0\0b"))
    tables.data[second] = tables.data[first]
    tables.write()
    refuse(entries(), tables.path, "expected each namespace in one arena, got one in two", MODEL)


def test_a_file_without_arenas(tmp_path):
    blocks().save(tmp_path / "cache", model=MODEL)
    tables = Tables(tmp_path / "cache")
    del tables.data[tables.arenas : tables.arenas + 64]
    tables.add(ARENAS, -1)
    tables.end -= 64
    del tables.data[tables.end :]  # without an arena there is no padding
    tables.add(SIZE_OF_FILE, tables.end - tables.number(SIZE_OF_FILE))
    tables.write()
    refuse(blocks(), tables.path, "expected an arena, got none", MODEL)


def test_a_part_of_a_name(tables):
    """The header counts four bytes of the model's name as bytes of the namespaces."""
    tables.add(NAMES_BYTES, 4)
    tables.add(MODEL_BYTES, -4)
    tables.write()
    refuse(entries(), tables.path, "expected whole namespaces, got a part of one", MODEL[4:])


@pytest.mark.parametrize("name", ["parts of pages", "a text twice"])
def test_false_tables_of_blocks(tmp_path, name):
    cache = blocks()
    for token in (1, 2):
        put(cache, None, [token] * SIZE)
    cache.save(tmp_path / "cache", model=MODEL)
    tables = Tables(tmp_path / "cache")
    assert tables.number(SEGMENTS) == 2
    if name == "parts of pages":
        tables.add(tables.segments + 8, 1)
        tables.add(tables.segments + 16 + 8, -1)
        message = f"expected segments of whole pages of {SIZE} tokens"
    else:
        first = tables.data[tables.tokens : tables.tokens + 4 * SIZE]
        tables.data[tables.tokens + 4 * SIZE : tables.tokens + 8 * SIZE] = first
        message = "expected each text once, got one twice"
    tables.write()
    refuse(blocks(), tables.path, message, MODEL)


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_page_that_the_disk_does_not_give(tmp_path, kind, monkeypatch):
    """A failed read counts as damage: nothing is found, and the cache works on."""
    saved, loaded = kind(), kind()
    put(saved, None, [1] * 4 * SIZE)
    saved.save(tmp_path / "cache")
    files = []
    monkeypatch.setattr(files_module, "File", lambda *arguments: files.append(File(*arguments)) or files[-1])
    assert loaded.load(tmp_path / "cache") > 0

    unreadable = os.open(tmp_path / "cache", os.O_WRONLY)
    os.dup2(unreadable, files[-1].fd)
    os.close(unreadable)
    assert get(loaded, None, [1] * 4 * SIZE)[0] == 0
    loaded.check()
    put(loaded, None, [1] * 4 * SIZE)
    assert get(loaded, None, [1] * 4 * SIZE)[0] == 4 * SIZE
    loaded.check()
