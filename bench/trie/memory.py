"""Bytes of bookkeeping per cached page, by `nbytes` and by the allocator, each size in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from bench.support.report import show

__all__ = ["BOUND", "TITLE", "print_report", "report"]

TITLE = "Memory: overhead per cached page of 16 tokens"
BOUND = 64  # bytes per page, beyond its tokens
PAGE = 16

# The cost of a page depends on the shape: the pages of a long prompt share a node, the worst case is a node per page.
# glibc reports the bytes it has allocated; resident memory would also count freed memory that it keeps.
SCRIPT = """
import ctypes, json, sys
import numpy as np
from kvcache.trie.trie import TokenTrie

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo

def allocated():
    info = mallinfo2()
    return info.uordblks + info.hblkhd

num_pages, length = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
values = np.arange(length // 16, dtype=np.int32)
prompt = np.empty(length, np.uint32)
trie = TokenTrie(16)
root = trie.add_root()
before = allocated()
while trie.num_pages < num_pages:
    prompt[:] = rng.integers(0, 150_000, length, dtype=np.uint32)
    trie.insert(root, prompt, values)
tokens = 4 * trie.num_tokens
print(json.dumps([trie.num_pages, trie.nbytes - tokens, allocated() - before - tokens]))
"""


def report(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row per prompt length and number of pages; empty if the allocator reports nothing."""
    rows = []
    for length in (2048, 256, 64, 48, 16):
        for size in sizes:
            if size < 10_000:
                continue
            run = [sys.executable, "-c", SCRIPT, str(size), str(length)]
            try:
                out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
            except subprocess.CalledProcessError:
                return []
            pages, counted, grown = json.loads(out)
            rows.append({"tokens": length, "pages": pages, "counted": counted / pages, "allocated": grown / pages})
    return rows


def print_report(rows: list[dict[str, Any]], *, as_markdown: bool = False) -> int:
    """Print the report; returns the number of rows over the bound."""
    if not rows:
        return 0
    cells = []
    for row in rows:
        over = max(row["counted"], row["allocated"]) >= BOUND
        verdict = "MISSED" if over else "met"
        counts = f"{row['counted']:.1f}", f"{row['allocated']:.1f}"
        cells.append([f"prompts of {row['tokens']}", str(row["pages"]), *counts, verdict])
    header = ["bytes per page", "pages", "nbytes says", "allocator says", f"under {BOUND}"]
    show(as_markdown, TITLE, header, cells)
    return sum(row[-1] == "MISSED" for row in cells)
