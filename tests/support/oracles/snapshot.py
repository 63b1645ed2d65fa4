"""A reader of saved caches without code of the library: struct, slices and dicts."""

import struct
import zlib


def parse(data):
    """The contents of a file: kind, model, arenas, and `segments`, each a dict; pages as bytes, None if damaged."""
    (
        magic, version, kind, size, num_segments, num_tokens, num_pages, names_bytes,
        num_arenas, num_names, model_bytes, checksum, bits,
    ) = struct.unpack("<8sIIQQQQQIIIII", data[:76])
    assert magic == b"kvcache\x1a"
    assert version == 1
    assert data[76:124] == bytes(48)
    assert struct.unpack("<I", data[124:128])[0] == zlib.crc32(data[:124])
    assert size == len(data)

    at = 128
    arenas = []
    for _ in range(num_arenas):
        (
            layers, heads, dim, key, value, key_turn, value_turn, layout, page_tokens, page_bytes, value_dim,
        ) = struct.unpack("<III4s4sBBHIQI", data[at : at + 40])
        assert data[at + 40 : at + 64] == bytes(24)
        assert (layout == 3) == (value_dim > 0)
        arenas.append(
            {
                "shape": (layers, heads, dim), "formats": (key.rstrip(b"\0").decode(), value.rstrip(b"\0").decode()),
                "rotated": (key_turn, value_turn), "layout": layout, "page_tokens": page_tokens,
                "page_bytes": page_bytes, "value_dim": value_dim, "slots": 0,
            }
        )
        at += 64
    segments = []
    for _ in range(num_segments):
        space, parent, tokens, marked = struct.unpack("<IIII", data[at : at + 16])
        segments.append({"space": space, "parent": parent, "length": tokens, "marked": bool(marked)})
        at += 16
    for segment in segments:
        segment["tokens"] = list(struct.unpack(f"<{segment['length']}I", data[at : at + 4 * segment["length"]]))
        at += 4 * segment["length"]
    checksums = struct.unpack(f"<{num_pages}I", data[at : at + 4 * num_pages])
    at += 4 * num_pages
    spaces, end = [], at + names_bytes
    while at < end:
        arena, length = struct.unpack("<II", data[at : at + 8])
        spaces.append((arena, name_of(data[at + 8 : at + 8 + length])[0]))
        at += 8 + length
    assert len(spaces) == num_names
    model = data[at : at + model_bytes].decode()
    at += model_bytes
    assert zlib.crc32(data[128:at]) == checksum

    for segment in segments:
        arena, segment["name"] = spaces[segment["space"]]
        segment["arena"] = arena
        segment["slots"] = list(range(arenas[arena]["slots"], arenas[arena]["slots"] + segment["length"]))
        arenas[arena]["slots"] += segment["length"]
    page = 0
    for arena in arenas:
        at += -at % 4096
        arena["pages"] = []
        for _ in range(-(-arena["slots"] // arena["page_tokens"])):
            piece = data[at : at + arena["page_bytes"]]
            arena["pages"].append(piece if zlib.crc32(piece) == checksums[page] else None)
            at += arena["page_bytes"] + -arena["page_bytes"] % 64
            page += 1
    assert (page, at) == (num_pages, len(data))
    kinds = {1: "entries", 2: "blocks"}
    return {"kind": kinds[kind], "model": model, "bits": bits, "arenas": arenas, "segments": segments}


def name_of(data):
    """`(namespace, bytes used)`."""
    tag = data[:1]
    if tag in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[tag], 1
    (length,) = struct.unpack("<I", data[1:5])
    if tag == b"(":
        parts, at = [], 5
        for _ in range(length):
            part, used = name_of(data[at:])
            parts.append(part)
            at += used
        return tuple(parts), at
    piece = data[5 : 5 + length]
    value = {b"i": lambda: int.from_bytes(piece, "little", signed=True), b"s": piece.decode, b"b": lambda: piece}[tag]()
    return value, 5 + length


def texts(parsed):
    """`(namespace, tokens, slots, arena, marked)` of every segment, with its whole prefix, newest first."""
    found = []
    for segment in parsed["segments"]:
        tokens, slots, at = [], [], segment
        while True:
            tokens, slots = at["tokens"] + tokens, at["slots"] + slots
            if at["parent"] == 2**32 - 1:
                break
            at = parsed["segments"][at["parent"]]
            assert at["space"] == segment["space"]
        found.append((segment["name"], tokens, slots, segment["arena"], segment["marked"]))
    return found
