"""Saved caches with false headers and tables and valid checksums: each is refused or gives a valid cache.

    python -m hostile.false_snapshots FOLDER

loads all of them in one process with a memory limit and prints their outcomes as JSON. `cases` writes them by hand, so
that every number can differ from what it counts, and as sparse files, so that a terabyte costs nothing.
"""

import json
import logging
import signal
import struct
import sys
import zlib
from pathlib import Path

from hostile.limited_process import limit_memory
from saved_caches import DIM, HEADS, SIZE, blocks, entries, get, put

from kvcache import SnapshotError
from kvcache.kernels.kernels import BITS_VERSION
from kvcache.saved.namespaces import encode_namespace
from kvcache.saved.snapshot import ARENA, HEADER, KINDS, MAGIC, VERSION

ROOM = 1 << 30  # bytes that the process may allocate in addition: a sanitizer needs room too
SECONDS = 300  # for one case; most take milliseconds, the slowest seconds
NONE = 2**32 - 1
WIDTH = HEADS * DIM
ROWS = (2, 1, WIDTH, b"f32", b"f32", 0, 0, 1, 64, 64 * 2 * WIDTH * 8, 0)  # the arena of `entries`, of two layers
BLOCKS = (2, HEADS, DIM, b"f32", b"f32", 0, 0, 2, SIZE, SIZE * 2 * WIDTH * 8, 0)
ARENAS = {"entries": ROWS, "blocks": BLOCKS}
MAKERS = {"entries": entries, "blocks": blocks}


def name(arena=0, value="a", length=None):
    data = encode_namespace(value) if not isinstance(value, bytes) else value
    return struct.pack("<II", arena, len(data) if length is None else length) + data


class File:
    """The parts of a file, and the numbers in its header where these shall differ."""

    def __init__(self, kind, arenas=None, names=None, segments=((0, NONE, 4, 1),), tokens=None, false=()):
        arenas = (ARENAS[kind],) if arenas is None else arenas
        self.kind = kind
        self.arenas = b"".join(ARENA.pack(*arena) if isinstance(arena, tuple) else arena for arena in arenas)
        self.names = b"".join([name()] if names is None else names)
        self.segments = b"".join(struct.pack("<4I", *segment) for segment in segments)
        count = sum(segment[2] for segment in segments) if tokens is None else tokens
        self.tokens = struct.pack(f"<{min(count, 1000)}I", *range(min(count, 1000)))
        self.numbers = {
            "kind": KINDS[kind], "segments": len(segments), "tokens": count, "names_bytes": len(self.names),
            "arenas": len(arenas), "names": 1 if names is None else len(names), "model_bytes": 0, **dict(false),
        }
        first = arenas[0] if arenas and isinstance(arenas[0], tuple) else ARENAS[kind]
        self.numbers.setdefault("pages", -(-count // max(first[8], 1)))
        self.stride = -(-first[9] // 64) * 64

    def write(self, path, *, sums=True):
        n = self.numbers
        tables = 64 * n["arenas"] + 16 * n["segments"] + 4 * n["tokens"] + 4 * n["pages"] + n["names_bytes"]
        end = HEADER.size + tables + n["model_bytes"]
        size = n.get("size", -(-end // 4096) * 4096 + n["pages"] * self.stride)
        parts = [self.arenas, self.segments, self.tokens]
        at, placed = HEADER.size, []
        for part, count in zip(parts, (64 * n["arenas"], 16 * n["segments"], 4 * n["tokens"]), strict=True):
            placed.append((at, part))
            at += count
        placed.append((at + 4 * n["pages"], self.names))
        with open(path, "wb") as file:
            file.truncate(min(n.get("real_size", size), 2**42))
            for at, part in placed:
                if at + len(part) <= 2**42:
                    file.seek(at)
                    file.write(part)
        crc = 0
        if sums and end <= 1 << 28:
            with open(path, "rb") as file:
                file.seek(HEADER.size)
                crc = zlib.crc32(file.read(end - HEADER.size))
        header = HEADER.pack(
            MAGIC, n.get("version", VERSION), n.get("number", n["kind"]), size % 2**64, n["segments"], n["tokens"],
            n["pages"], n["names_bytes"], n["arenas"], n["names"], n["model_bytes"], crc,
            n.get("bits", BITS_VERSION), 0,
        )
        with open(path, "r+b") as file:
            file.write(header[:-4] + struct.pack("<I", zlib.crc32(header[:-4])))


def arena_of(kind, **changes):
    """The valid arena with some fields changed."""
    fields = (
        "layers", "heads", "dim", "key", "value", "rotate_k", "rotate_v", "layout", "page_tokens", "page_bytes",
        "value_dim",
    )
    return tuple(changes.get(field, value) for field, value in zip(fields, ARENAS[kind], strict=True))


def cases(kind):
    """`(name, file, whether it may be loaded)`."""
    size = ARENAS[kind][9]
    yield "what is right", File(kind), True
    yield "no segments", File(kind, segments=()), True
    yield "nothing at all", File(kind, arenas=(), names=[], segments=()), None
    for count in (5, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1):
        for number in ("segments", "tokens", "pages", "names_bytes"):
            yield f"{count} {number}", File(kind, false={number: count}), False
    for count in (2, 100, 2**16, 2**31, 2**32 - 1):
        for number in ("arenas", "names", "model_bytes"):
            yield f"{count} {number}", File(kind, false={number: count}), False
    for number in (0, 127, 128, 4096, 2**40, 2**63, 2**64 - 1):
        yield f"a size of {number}", File(kind, false={"size": number, "real_size": 8192}), False
    yield "a real size of 2**40", File(kind, false={"real_size": 2**40}), False
    # Large and sparse, with sizes in the header that agree with each other and with the file.
    yield "30 GB of tokens", File(kind, segments=((0, NONE, 4, 1),), tokens=7 * 2**30), False
    yield "30 GB of segments", File(kind, false={"segments": 2**31 - 1}, tokens=2**31 - 1), False
    yield "30 GB of names", File(kind, false={"names_bytes": 30 * 2**30}), False
    yield "4 GB of a model's name", File(kind, false={"model_bytes": 2**32 - 1}), False
    yield "256 MB of tokens", File(kind, segments=((0, NONE, 4, 1),), tokens=2**26), False
    yield "256 MB of tokens in one segment", File(kind, segments=((0, NONE, 2**26, 1),)), False
    yield "1 GB of segments of nothing", File(kind, false={"segments": 2**26}, tokens=2**26), False
    yield "40 MB of segments of nothing", File(kind, false={"segments": 2_500_000}, tokens=2_500_000), False
    yield "20 MB of tokens, no checksum", File(kind, segments=((0, NONE, 5_000_000, 1),)), None
    many = tuple((0, NONE if i == 0 else i - 1, 4, 1) for i in range(250))
    yield "a long chain", File(kind, segments=many), True
    yield "a wide tree", File(kind, segments=tuple((0, NONE, 4, 1) for _ in range(250))), True
    for parent in (0, 1, 2, 3, 7, 2**31, 2**32 - 2):
        yield (
            f"a first segment after segment {parent}",
            File(kind, segments=((0, parent, 4, 1), (0, NONE, 4, 1))),
            False,
        )
    yield "a cycle of two", File(kind, segments=((0, 1, 4, 1), (0, 0, 4, 1))), False
    yield (
        "a parent in another namespace",
        File(kind, names=[name(0, "a"), name(0, "b")], segments=((0, NONE, 4, 1), (1, 0, 4, 1))),
        False,
    )
    for space in (1, 2**31, 2**32 - 1):
        yield f"namespace {space} of one", File(kind, segments=((space, NONE, 4, 1),)), False
    for tokens in (0, 2**31, 2**32 - 1):
        yield f"a segment of {tokens} tokens", File(kind, segments=((0, NONE, tokens, 1),), tokens=4), False
    for mark in (2, 2**32 - 1):
        yield f"a mark of {mark}", File(kind, segments=((0, NONE, 4, mark),)), False
    yield "a text twice", File(kind, segments=((0, NONE, 4, 1), (0, NONE, 4, 1))), None
    yield "nothing marked", File(kind, segments=((0, NONE, 4, 0),)), None
    for field, values in {
        "layers": (0, 1, 2**31, 2**32 - 1), "heads": (0, 2, 2**31, 2**32 - 1), "dim": (0, 1, 2**31, 2**32 - 1),
        "key": (b"f99", b"\xff\xff\xff\xff", b"", b"q4"), "value": (b"q2", b"f16"), "rotate_k": (1, 2, 255),
        "rotate_v": (1, 255), "layout": (0, 2, 3, 65535), "value_dim": (1, DIM, WIDTH, 2**32 - 1),
        "page_tokens": (0, 1, 63, 65, 2**32 - 1),
        "page_bytes": (0, 1, 64, size - 1, size + 1, 2**32, 2**63, 2**64 - 1),
    }.items():
        for value in values:
            arena = arena_of(kind, **{field: value})
            yield f"an arena's {field} of {value}", File(kind, arenas=(arena,)), arena == ARENAS[kind]
    yield (
        "all sizes of an arena at once",
        File(kind, arenas=(arena_of(kind, layers=2**32 - 1, heads=2**32 - 1, dim=2**32 - 1),)),
        False,
    )
    yield "an arena of zeros", File(kind, arenas=(bytes(64),)), False
    yield "one arena twice", File(kind, arenas=(ARENAS[kind], ARENAS[kind])), False
    for count in (3, 4000, 5000):
        arenas = tuple(arena_of(kind, layers=i + 1, page_bytes=size // 2 * (i + 1)) for i in range(count))
        yield f"{count} arenas of other shapes", File(kind, arenas=arenas), None
    yield "an arena that is not there", File(kind, names=[name(1)]), False
    yield "arena 2**32 - 1", File(kind, names=[name(2**32 - 1)]), False
    for length in (0, 1, 100, 2**31, 2**32 - 1):
        yield f"a name of {length} bytes", File(kind, names=[name(length=length)]), False
    for which, value in {
        "deep": b"(\1\0\0\0" * 1000 + b"N", "of 2**32 - 1 parts": b"(\xff\xff\xff\xff", "of no kind": b"x",
        "of a long text": b"s\xff\xff\xff\x7fa", "not UTF-8": b"s\1\0\0\0\xff", "with a tail": b"NN",
        "an int with zeros": b"i\4\0\0\0\1\0\0\0", "a tuple that ends": b"(\2\0\0\0N",
    }.items():
        yield f"a name {which}", File(kind, names=[name(value=value)]), False
    yield "a name twice", File(kind, names=[name(), name()]), False
    yield "the other kind", File("entries" if kind == "blocks" else "blocks"), False
    for number in (0, 3, 2**32 - 1):
        yield f"kind {number}", File(kind, false={"number": number}), False
    for version in (0, 2, 2**32 - 1):
        yield f"version {version}", File(kind, false={"version": version}), False


CASES = {f"{kind}: {name}": (file, taken) for kind in ARENAS for name, file, taken in cases(kind)}


def outcome(file, path, make):
    """`(error, message)`; "loaded" if the file was, in which case the cache is then used."""
    file.write(path)
    cache = make()
    signal.alarm(SECONDS)
    try:
        cache.load(path)
        found = "loaded", ""
    except SnapshotError as error:
        found = "SnapshotError", str(error)
        assert len(cache) == 0
    except Exception as error:
        found = type(error).__name__, str(error)
    signal.alarm(0)
    cache.check()
    get(cache, "a", list(range(4)))
    put(cache, None, [1] * 8)
    assert get(cache, None, [1] * 8)[0] == 8
    cache.check()
    path.unlink()
    return found


def main(folder):
    outcome(File("entries"), folder / "first", entries)
    limit_memory(ROOM)
    logging.disable()  # pages that are damaged are logged
    found = {case: outcome(file, folder / "cache", MAKERS[case.split(":")[0]]) for case, (file, _) in CASES.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
