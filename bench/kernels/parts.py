"""`python -m bench kernels --parts`: what share of the attention of a chunk each part takes, by samples of Linux perf.

A process of its own attends with 512 queries, on one thread; perf tells in which function of the kernels it is, a
thousand times a second. Only functions of attention count.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import numpy as np

import kvcache
from bench.kernels.chunks import ROWS
from bench.support.report import show
from bench.support.scattered import Scattered, Shape, queries_of

__all__ = ["attend_chunks", "print_parts"]

PARTS = {  # by how the names of functions in ckernels/ begin
    "scores": ("unit_dot", "dot_tiled", "dot_pair", "panels", "stage_rows"),
    "softmax and digits": ("softmax_rows", "quantise_weights", "finish_scores", "mask_row", "cap_row"),
    "values": ("unit_mix", "mix_tiled", "mix_many"),
    "the rest": ("attend_", "kvc_attend_item", "next_chunk", "score_chunk", "mix_values", "write_row", "merge_results"),
}
SECONDS = 4.0


def attend_chunks(dtype: str, context: int, head_dim: int) -> None:
    """Attend over a cache for some seconds: what the process under perf does."""
    kvcache.set_num_threads(1)
    shape = Shape(context, 1, head_dim)
    scattered, queries = Scattered(shape, dtype, cold=False), queries_of(shape, ROWS)
    out, lens, stop = np.empty_like(queries), np.array([ROWS]), monotonic() + SECONDS
    while monotonic() < stop:
        scattered.attend(queries, out, query_lens=lens)


def _samples(dtype: str, context: int, head_dim: int) -> dict[str, float]:
    """Percent of all samples in each function."""
    perf = shutil.which("perf")
    if perf is None:
        raise SystemExit("--parts: expected Linux's perf on PATH, got none")
    work = f"from bench.kernels.parts import attend_chunks; attend_chunks({dtype!r}, {context}, {head_dim})"
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        record = [perf, "record", "-q", "-e", "cpu-clock", "-F", "1000", "-o", data, sys.executable, "-c", work]
        subprocess.run(record, check=True, capture_output=True)
        report = [perf, "report", "-q", "--stdio", "--no-children", "-F", "overhead,sym", "-i", data]
        text = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    return {name: float(share) for share, name in re.findall(r"^\s*([\d.]+)%\s+\[\.\]\s+(\S+)", text, re.MULTILINE)}


def _shares(samples: dict[str, float]) -> list[float]:
    found = [sum(share for name, share in samples.items() if name.startswith(heads)) for heads in PARTS.values()]
    return [share / sum(found) for share in found] if any(found) else found


def print_parts(options: argparse.Namespace) -> None:
    """Print the table."""
    rows = []
    for head_dim in options.head_dim:
        for dtype in ("f32", "f16", "q8", "q4"):
            shares = _shares(_samples(dtype, 4096, head_dim))
            rows.append([dtype, str(head_dim), *(f"{share:.0%}" for share in shares)])
    title = f"{ROWS} causal queries over 4k, 1 thread, {kvcache.simd_level()}: shares of the time"
    show(options.markdown, title, ["", "head_dim", *PARTS], rows)
