"""Decode steps by order of imports and number of threads, one process each: `python -m bench.transformers.orders`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median

__all__ = ["ORDERS", "measure_orders"]

# What is imported first, threads of torch, threads of kvcache.
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
PASSIVE = "torch, OMP_WAIT_POLICY=PASSIVE"
ORDERS = (
    ("kvcache", 2, 2), ("torch", 2, 2), (PASSIVE, 2, 2), ("kvcache", 2, 1), ("kvcache", 1, 2), ("kvcache", 1, 1),
)
CONTEXT, STEPS = 2048, 24
CACHES = ("DynamicCache, sdpa", "PagedCache q8")


def measure_orders() -> list[tuple[tuple[str, int, int], dict[str, float]]]:
    """Seconds of a step, median, of `DynamicCache` and of q8 blocks, for each order."""
    rows = []
    for order in ORDERS:
        command = [sys.executable, "-m", "bench.transformers.orders", *map(str, order)]
        unset = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment = unset | ({"OMP_WAIT_POLICY": "PASSIVE"} if order[0] == PASSIVE else {})
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        rows.append((order, json.loads(done.stdout.splitlines()[-1])))
    return rows


def main(first: str, torch_threads: int, threads: int) -> None:
    """Measure one order in this process and print it as JSON."""
    if first != "kvcache":
        import torch

        import kvcache
        import kvcache.integrations.transformers
    else:
        import kvcache.integrations.transformers

        import torch  # isort: skip
    from bench.transformers.models import decode, fill, make_model, makers

    torch.set_num_threads(torch_threads)
    kvcache.set_num_threads(threads)
    model, times = make_model("SmolLM2", "float32"), {}
    for name, implementation, make in makers(model.config, CACHES):
        cache, samples = make(), []
        fill(cache, model, CONTEXT)
        for _ in range(STEPS):
            start = time.perf_counter()
            decode(model, implementation, cache, 1)
            samples.append(time.perf_counter() - start)
        times[name] = median(samples)
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
