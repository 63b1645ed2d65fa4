"""The file of a saved cache: which tokens it has, in which namespaces, and the packed K and V of each, unread.

    offset 0    header      128 bytes, see HEADER; the last four are the CRC-32 of the others
    128         arenas      64 bytes each, see ARENA: how the bytes of K and V lie
                segments    16 bytes each: namespace, parent (2**32 - 1: none), tokens, marked
                tokens      4 bytes each, those of all segments, one after the other
                checksums   4 bytes each, the CRC-32 of every page
                namespaces  arena and length, 4 bytes each, then as in namespaces.py
                model       UTF-8
    then        pages       of one arena after the other; an arena begins at a multiple of 4096, a page at one of 64

Numbers are unsigned and little-endian. Segments are the edges of a token tree: each continues where its parent ends, or
begins a text of its namespace. They are in the order of their last use, newest first, a parent before its children,
those of one arena after the other where these are of different caches.
Every token has a slot in the arena of its namespace, counted in the order of the segments; a page is `page_tokens`
slots. The file has nothing that can be computed from its other parts, so no part can contradict another one.

K and V of one version of bits (ckernels/BITS.md) are the same on every CPU, so the header has that version. It is 0 in
files of before there was one, whose names have a SIMD level, and in those that a cache with K and V of such a file has
saved. A file of another version is read where the caller says `exact=False`.

A CRC-32 finds accidental damage: every error within 32 consecutive bits, and all but one in 2**32 of the others. It is
no protection against a file that was made on purpose with right checksums: such a file can have any K and V. It cannot
do more, since reading any file ends in a result or in SnapshotError. Memory is bounded by the size of the tables, and
that by a fraction of the machine's memory. Tables larger than `_SMALL` are checked piece by piece, cheap rules first,
before memory is taken for them, so a sparse file of any size is refused after its first pieces.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import SnapshotError
from kvcache.kernels.kernels import BITS_VERSION
from kvcache.saved.file_tables import ARENA, NO_PARENT, SEGMENT, Arena, aligned, check_segments, unpack_arenas
from kvcache.saved.namespaces import decode_namespace, encode_namespace
from kvcache.saved.pages import read_pages
from kvcache.saved.segments import Segments
from kvcache.support.arguments import as_path
from kvcache.support.descriptors import Replacement
from kvcache.support.mapped import physical_memory
from kvcache.support.regular_files import checksum, open_regular, read_at, write_at

__all__ = ["ARENA", "HEADER", "KINDS", "MAGIC", "VERSION", "Arena", "Snapshot", "write_snapshot"]

UInt32 = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]

MAGIC, VERSION = b"kvcache\x1a", 1
# kind: the cache that saved it. entries: a mark is the end of an entry of a PrefixKvCache. blocks: a PrefixCache, whose
# segments are whole pages. prefix: a CompressedPrefix, whose lists are namespaces.
KINDS = {"entries": 1, "blocks": 2, "prefix": 3}
# magic, version, kind, bytes of the file, segments, tokens, pages, bytes of namespaces; arenas, namespaces, bytes of
# the model's name, CRC-32 of all tables, version of bits; CRC-32 of this header
HEADER = struct.Struct("<8sIIQQQQQIIIII48xI")
_LEVEL = re.compile(r", (?:scalar|avx2|avx512|neon)(?:, bits 1)?")  # in names of before headers had a version of bits
_NAME = struct.Struct("<II")
_ARENA_ALIGNMENT = 4096
_SMALL = 64 << 20  # bytes of tables that are read at once
_PIECE = 1 << 20  # bytes of larger ones that are checked at a time, whole segments
# Reading takes about ten times the size of the tables. K and V of a token take a hundred times the bytes of its tables,
# so no cache that fits a machine has tables of a 16th of its memory.
_PART_OF_MEMORY = 16
_MAX_MODEL_BYTES = 1 << 16  # of a wrong name, which is shown in a message
_MAX_ARENAS = 4096  # each needs an object in memory


def _places(arenas: Sequence[Arena], slots: Sequence[int], tables_end: int) -> tuple[list[int], list[int], int]:
    """Offset of each arena's first page, pages of each, and bytes of the file."""
    offsets, counts, end = [], [], tables_end
    for arena, number in zip(arenas, slots, strict=True):
        offsets.append(aligned(end, _ARENA_ALIGNMENT))
        counts.append(-(-int(number) // arena.page_tokens))
        end = offsets[-1] + counts[-1] * arena.stride
    return offsets, counts, end


def write_snapshot(
    path: str | os.PathLike[str],
    kind: str,
    model: str,
    arenas: Sequence[Arena],
    namespaces: Sequence[tuple[int, Hashable]],
    segments: Segments,
    pages: Callable[[int], Iterable[Sequence[Any]]],
    *,
    exact: bool = True,
) -> None:
    """Write a file; on failure the old file stays.

    Args:
        kind: of `KINDS`.
        model: the model's name.
        namespaces: the arena of each, and its name.
        pages: of each arena, each as buffers of `page_bytes` in all.
        exact: whether all K and V have the bits of this version; else the file says that it has none.

    Raises:
        TypeError: a namespace that has no encoding; before anything is written.
        OSError: of the file system.
    """
    names = b"".join(_NAME.pack(arena, len(data)) + data for arena, data in _encoded(namespaces))
    table = np.empty(len(segments.lengths), SEGMENT)
    table["namespace"], table["tokens"] = segments.namespaces, segments.lengths
    table["parent"], table["marked"] = segments.parents & NO_PARENT, segments.marked
    arena_of = np.array([arena for arena, _ in namespaces], np.int64)
    _, slots = segments.slots(arena_of, len(arenas))
    head = b"".join(arena.pack() for arena in arenas) + table.tobytes()
    tail = names + (name := model.encode())
    num_pages = sum(-(-int(n) // arena.page_tokens) for arena, n in zip(arenas, slots, strict=True))
    tables_end = HEADER.size + len(head) + 4 * len(segments.tokens) + 4 * num_pages + len(tail)
    offsets, counts, size = _places(arenas, slots.tolist(), tables_end)
    with Replacement(as_path(path)) as fd:
        os.truncate(fd, size)
        checksums = np.zeros(num_pages, "<u4")
        done = 0
        for i, arena in enumerate(arenas):
            offset = offsets[i]
            for buffers in pages(i):
                checksums[done] = checksum(buffers)
                write_at(fd, buffers, offset)
                offset, done = offset + arena.stride, done + 1
        assert done == sum(counts), "as many pages as slots need"
        tables = [head, segments.tokens.astype("<u4", copy=False), checksums, tail]
        write_at(fd, tables, HEADER.size)
        header = HEADER.pack(
            MAGIC, VERSION, KINDS[kind], size, len(table), len(segments.tokens), num_pages, len(names),
            len(arenas), len(namespaces), len(name), checksum(tables), BITS_VERSION if exact else 0, 0,
        )
        write_at(fd, [header[:-4] + struct.pack("<I", checksum([header[:-4]]))], 0)


def _encoded(namespaces: Sequence[tuple[int, Hashable]]) -> list[tuple[int, bytes]]:
    return [(arena, encode_namespace(name)) for arena, name in namespaces]


def _is_of_before(name: str, model: str) -> bool:
    """Whether a name in a file is that of a model and of the level that computed its K and V."""
    return any(name[: level.start()] + name[level.end() :] == model for level in _LEVEL.finditer(name))


class Snapshot:
    """A file whose header and tables have been read and checked, and whose pages are read one by one.

    Pages are copied out and checked where they lie then, so that nothing that happens to the file meanwhile comes
    through. The file stays open as long as this lives, also when another has taken its name.

    Args:
        path: of the file.
        kind: what it must be.
        model: the model's name, which the file must have; None: `expect_model` is called before pages are read.
        exact: whether its K and V must have the bits of this version.

    Raises:
        OSError: there is none, or it cannot be read.
        SnapshotError: not a saved cache, damaged, of another kind, version, version of bits or model.

    Attributes:
        path: see there.
        model: the name that the file has.
        exact: whether its K and V have the bits of this version.
        arenas: how K and V lie.
        names: the namespaces.
        arena_of: index of the arena of each namespace, int64.
        segments: the token tree.
        firsts: first slot of each segment in its arena, int64.
        num_slots: of each arena, int64.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, model: str | None, *, exact: bool = True) -> None:
        self.path = as_path(path)
        self._file, size = open_regular(path, SnapshotError)
        try:
            self._open(kind, model, exact, size)
        except BaseException as error:
            self._file.close()
            if isinstance(error, SnapshotError):
                raise SnapshotError(f"{self.path}: {error}") from error
            raise

    def expect_model(self, model: str) -> None:
        """Raise SnapshotError unless the file has the name of this model."""
        if self.model != model and (self.exact or not _is_of_before(self.model, model)):
            raise SnapshotError(f"expected model {model!r}, got {self.model[:100]!r}")

    def _open(self, kind: str, model: str | None, exact: bool, file_size: int) -> None:
        header = bytearray(HEADER.size)
        if file_size < HEADER.size or not read_at(self._file.fd, [header], 0):
            raise SnapshotError(f"expected at least {HEADER.size} bytes, got {file_size}")
        (
            magic, version, number, size, num_segments, num_tokens, num_pages, names_bytes,
            num_arenas, num_names, model_bytes, sum_of_tables, bits, own,
        ) = HEADER.unpack(header)
        if magic != MAGIC:
            raise SnapshotError("expected a saved cache, got another file")
        if version != VERSION:
            raise SnapshotError(f"expected version {VERSION}, got {version}")
        if checksum([header[:-4]]) != own:
            raise SnapshotError("expected a header with its checksum, got a damaged one")
        if size != file_size:
            raise SnapshotError(f"expected {size} bytes, got {file_size}")
        if number != KINDS[kind]:
            kinds = {number: name for name, number in KINDS.items()}
            raise SnapshotError(f"expected saved {kind}, got {kinds.get(number, number)}")
        self.exact = bits == BITS_VERSION
        if exact and not self.exact:
            found = f"version {bits}" if bits else "no version"
            raise SnapshotError(f"expected bits of version {BITS_VERSION}, got {found}; `exact=False` takes the file")
        sizes = [num_arenas * ARENA.size, num_segments * 16, num_tokens * 4, num_pages * 4, names_bytes, model_bytes]
        if HEADER.size + sum(sizes) > size:
            raise SnapshotError(f"expected tables of at most {size - HEADER.size} bytes, got {sum(sizes)}")
        if num_arenas > _MAX_ARENAS:
            raise SnapshotError(f"expected at most {_MAX_ARENAS} arenas, got {num_arenas}")
        if num_segments > num_tokens or num_pages > num_tokens or num_names * (_NAME.size + 1) > names_bytes:
            raise SnapshotError(
                f"expected a token or more in each segment and page and a name in each namespace, got {num_segments} "
                f"segments, {num_pages} pages, {num_tokens} tokens, {num_names} namespaces"
            )
        if model_bytes > max(_MAX_MODEL_BYTES, len((model or "").encode())):
            raise SnapshotError(f"expected model {model!r}, got a name of {model_bytes} bytes")
        most = physical_memory()[0] // _PART_OF_MEMORY
        if sum(sizes) > max(most, _SMALL):
            raise SnapshotError(f"expected tables of at most {most} bytes on this machine, got {sum(sizes)}")
        if sum(sizes) > _SMALL:
            self._check_pieces(sizes, sum_of_tables)
        try:
            self._read_tables(sizes, sum_of_tables, model, num_names, num_pages, size)
        except MemoryError:
            if sum(sizes) <= _SMALL:
                raise  # memory is short, whatever the file says
            raise SnapshotError(f"expected tables that fit memory, got {sum(sizes)} bytes") from None

    def _check_pieces(self, sizes: list[int], sum_of_tables: int) -> None:
        """SnapshotError for tables with a wrong checksum, arena or segment, in a few MiB of memory."""
        found, at, segment = 0, HEADER.size, 0
        for part, length in enumerate(sizes):
            step = _PIECE // ARENA.size * ARENA.size  # whole arenas and segments
            for first in range(0, length, step):
                piece = bytearray(min(step, length - first))
                if not read_at(self._file.fd, [piece], at + first):
                    raise SnapshotError("expected whole tables, got a file that has become shorter")
                found = zlib.crc32(piece, found)
                if part == 0:
                    unpack_arenas(piece)
                elif part == 1:
                    table = np.frombuffer(piece, SEGMENT)
                    check_segments(table, segment)
                    segment += len(table)
            at += length
        if found != sum_of_tables:
            raise SnapshotError("expected tables with their checksum, got damaged ones")

    def _read_tables(
        self, sizes: list[int], sum_of_tables: int, model: str | None, num_names: int, num_pages: int, size: int
    ) -> None:
        tables = bytearray(sum(sizes))
        if not read_at(self._file.fd, [tables], HEADER.size) or checksum([tables]) != sum_of_tables:
            raise SnapshotError("expected tables with their checksum, got damaged ones")
        parts, at = [], 0
        for length in sizes:
            parts.append(memoryview(tables)[at : at + length])
            at += length
        self.model = bytes(parts[5]).decode("utf-8", "backslashreplace")
        if model is not None:
            self.expect_model(model)
        self.arenas = unpack_arenas(parts[0])
        self._read_names(bytes(parts[4]), num_names)
        self._read_segments(np.frombuffer(parts[1], SEGMENT), np.frombuffer(parts[2], "<u4"))
        self._checksums = np.frombuffer(parts[3], "<u4")
        self.firsts, self.num_slots = self.segments.slots(self.arena_of, len(self.arenas))
        self._offsets, counts, end = _places(self.arenas, self.num_slots.tolist(), HEADER.size + sum(sizes))
        if sum(counts) != num_pages or end != size:
            raise SnapshotError(f"expected {sum(counts)} pages in {end} bytes, got {num_pages} in {size}")
        self._first_page = np.cumsum([0, *counts])

    def _read_names(self, data: bytes, count: int) -> None:
        self.names: list[Hashable] = []
        arenas, at = [], 0
        while at < len(data):
            if at + _NAME.size > len(data):
                raise SnapshotError("expected whole namespaces, got a part of one")
            arena, length = _NAME.unpack_from(data, at)
            at += _NAME.size
            if arena >= len(self.arenas) or length > len(data) - at:
                raise SnapshotError(f"expected a namespace of one of {len(self.arenas)} arenas, got {arena}")
            try:
                self.names.append(decode_namespace(data[at : at + length]))
            except (ValueError, TypeError) as error:
                raise SnapshotError(f"namespaces: {error}") from error
            arenas.append(arena)
            at += length
        different = len(set(zip(arenas, self.names, strict=True)))
        if len(self.names) != count or different != count:
            raise SnapshotError(f"expected {count} different namespaces, got {different}")
        self.arena_of = np.array(arenas, np.int64)

    def _read_segments(self, table: npt.NDArray[Any], tokens: UInt32) -> None:
        check_segments(table, 0)
        spaces, lengths = table["namespace"].astype(np.int64), table["tokens"].astype(np.int64)
        parents = table["parent"].astype(np.int64)
        parents[parents == NO_PARENT] = -1
        inner = parents >= 0
        if (spaces >= len(self.names)).any() or (spaces[parents[inner]] != spaces[inner]).any():
            raise SnapshotError("expected segments that follow their parents, got others")
        if int(lengths.sum()) != len(tokens):
            raise SnapshotError(f"expected {lengths.sum()} tokens, got {len(tokens)}")
        self.segments = Segments(spaces, parents, lengths, table["marked"].astype(bool), tokens)

    def read_pages(self, arena: int, pages: Sequence[int], buffers: list[list[Any]]) -> npt.NDArray[np.bool_]:
        """Copy pages, each into its buffers; False where a page is damaged, and its buffers are undefined then."""
        places = np.asarray(pages, np.int64)
        offsets = self._offsets[arena] + places * self.arenas[arena].stride
        return read_pages(self._file.fd, offsets, buffers, self._checksums[self._first_page[arena] + places])
