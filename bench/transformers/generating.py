"""`python -m bench transformers`: decode, prefill, glue and bytes of `PagedCache`, against transformers' own caches.

Models have random weights and caches random contexts: neither changes how long a step takes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
from functools import partial
from statistics import median
from typing import Any

from bench.support.blas import set_threads
from bench.support.common import SETTLE, Candidate, Case, Claim, Result, at_most, faster, run_case
from bench.support.plot import plot_lines
from bench.support.rates import Columns
from bench.support.report import save_json, show, time_text
from bench.support.tables import Tables

__all__ = ["add_arguments", "main"]

DYNAMIC, OURS = "DynamicCache, sdpa", tuple(f"PagedCache {dtype}" for dtype in ("f32", "f16", "q8", "q4"))
PLOTTED = (DYNAMIC, "PagedCache f32", "PagedCache q8", "PagedCache q4")
PROMPT, STEPS = 2048, 4
# (shape, dtype of the model, tokens) -> how many times as fast as DynamicCache q4 is to decode
DECODE = {("1B", "bfloat16", 1024): 1.0, ("1B", "bfloat16", 4096): 2.0, ("1B", "bfloat16", 16384): 5.0}
PREFILL = 1.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=5, help="rounds per case (default 5)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of both (default 1 2)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens before a step")
    parser.add_argument(
        "--models", nargs="+", default=["1B:bfloat16", "1B:float32", "SmolLM2:float32"], help="SHAPE:DTYPE of models"
    )
    parser.add_argument("--weights", nargs="+", default=["auto", "q8", "q4"], metavar="FORMAT",
                        help="of pack_weights, each a row with a PagedCache of q4 (default auto q8 q4)")
    parser.add_argument("--caches", nargs="+", default=(), metavar="NAME", help="only caches with one of these in it")
    parser.add_argument("--only", choices=("decode", "prefill", "glue", "orders"), help="one of the tables")


def main(options: argparse.Namespace) -> int:
    """Print a table for each model, number of threads and kind of work."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        print("not measured: torch and transformers are not installed (pip install 'kvcache-cpu[hf]')")
        return 0
    importlib.import_module("kvcache.integrations.transformers")  # before torch: its threads spin less then
    if options.quick:
        options.rounds, options.contexts, options.models, options.threads = 2, [256], ["tiny:float32"], [1]
    tables = Tables(options)
    lines: dict[str, dict[str, float]] = {}
    for name in options.models if options.only in (None, "decode", "prefill") else ():
        shape, dtype = name.split(":")
        _of_model(options, tables, shape, dtype, lines)
    for dtype in ("float32", "bfloat16") if options.only in (None, "glue") else ():
        _glue(options, tables, dtype)
    if options.only in (None, "orders") and not options.quick:
        _orders(options)
    if options.plot and lines:
        title = f"transformers decode over context, {options.threads[-1]} threads"
        x, y, about = "tokens of context", "a step of decoding", ", ".join(options.models)
        print(plot_lines(lines, options.plot, title, x, y, about=about, unit=" ms"))
    if options.json:
        save_json(options.json, tables.done)
    return 0


def _threads(count: int) -> None:
    import torch

    set_threads(count)
    torch.set_num_threads(count)


def _of_model(
    options: argparse.Namespace, tables: Tables, shape: str, dtype: str, lines: dict[str, dict[str, float]]
) -> None:
    import torch

    from bench.transformers.models import decode, fill, is_one, kv_bytes, make_model, makers, packed, prefill

    both = all(is_one(name, options.caches) for name in (DYNAMIC, OURS[-1]))  # what the claims compare
    model, prompt = make_model(shape, dtype), 256 if options.quick else PROMPT
    rows = [(name, model, implementation, make) for name, implementation, make in makers(model.config, options.caches)]
    rows += list(packed(model, options.weights, options.caches))
    ids = torch.randint(3, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(2))

    def decoding(context: int) -> list[Candidate]:
        found = []
        for name, network, implementation, make in rows:
            cache = make()
            fill(cache, network, context)
            run = partial(decode, network, implementation, cache, STEPS)
            run()

            back = None if name.startswith("Quantized") else partial(_back, cache, context)  # those have no crop
            found.append(Candidate(name, run, STEPS, back, {"work": 1.0, "MB": kv_bytes(cache) / 1e6}))
        return found

    def prefilling() -> list[Candidate]:
        return [
            Candidate(
                name, lambda n=network, i=implementation, m=make: prefill(n, i, m(), ids), facts={"work": float(prompt)}
            )
            for name, network, implementation, make in rows
        ]

    for threads in options.threads:
        _threads(threads)
        measured = {"threaded": threads > 1, "settle": SETTLE if threads > 1 else 0.0}
        for context in options.contexts if options.only != "prefill" else ():
            bound = DECODE.get((shape, dtype, context))
            claims: tuple[Claim, ...] = ()
            if bound is not None and both:
                claims = (at_most(1.0, OURS[-1], DYNAMIC) if bound == 1 else faster(bound, OURS[-1], DYNAMIC),)
            title = f"Decode at {context} tokens, {shape} in {dtype}, {threads} thr"
            result = run_case(Case(title, partial(decoding, context), claims), options.rounds, **measured)
            _print(title, result, tables)
            if threads == options.threads[-1] and f"{shape}:{dtype}" == options.models[0]:
                for name in (each for each in PLOTTED if each in result.times):
                    lines.setdefault(name, {})[f"{context:,}"] = median(result.times[name]) * 1e3
            gc.collect()
        if options.only != "decode":
            title = f"Prefill of {prompt} tokens, {shape} in {dtype}, {threads} thr"
            claims = (faster(PREFILL, OURS[-1], DYNAMIC),) if both and not options.quick else ()
            result = run_case(Case(title, prefilling, claims), min(3, options.rounds), **measured)
            _print(title, result, tables)


def _back(cache: Any, context: int) -> None:
    if extra := cache.get_seq_length() - context:
        cache.crop(-extra)


def _print(title: str, result: Result, tables: Tables) -> None:
    rivals = tuple(name for name in result.times if not name.startswith("PagedCache"))
    columns = Columns(tuple(result.times), rivals=rivals, unit="tokens/s", scale=1.0)
    tables.rates(title, columns, [result])
    sizes = {name: facts["MB"] for name, facts in result.facts.items() if "MB" in facts}
    if sizes:
        print("K and V: " + ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()))


def _glue(options: argparse.Namespace, tables: Tables, dtype: str) -> None:
    """Time of a layer of a step in `update` and attention, over next to no tokens; us above DynamicCache."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from bench.transformers.models import make_model, makers
    from kvcache.integrations.transformers.attention import attention

    _threads(1)
    model = make_model("tiny", dtype)
    module, layers = model.model.layers[0].self_attn, model.config.num_hidden_layers
    query, states = torch.randn(1, 2, 1, 64).to(model.dtype), torch.randn(1, 1, 1, 64).to(model.dtype)

    @torch.no_grad()
    def steps(cache: Any, attend: Any) -> None:
        for _ in range(STEPS):
            for layer in range(layers):
                keys, values = cache.update(states, states, layer)
                attend(module, query, keys, values, None, scaling=0.125, dropout=0.0)

    def candidates() -> list[Candidate]:
        found = []
        for name, implementation, make in makers(model.config):
            if name == DYNAMIC or implementation == "kvcache":
                cache, attend = make(), attention if implementation == "kvcache" else sdpa_attention_forward
                found.append(Candidate(name, partial(steps, cache, attend), STEPS * layers, cache.reset))
        return found

    title = f"Update and attention of a layer, {STEPS} tokens, {dtype}, 1 thr"
    result = run_case(Case(title, candidates), 5 * options.rounds)
    middle = {name: median(times) for name, times in result.times.items()}
    rows = [
        [name, time_text(seconds), "" if name == DYNAMIC else time_text(seconds - middle[DYNAMIC])]
        for name, seconds in middle.items()
    ]
    tables.rows(title, ["", "per layer", "above DynamicCache"], rows, [result])


def _orders(options: argparse.Namespace) -> None:
    from bench.transformers.orders import CONTEXT, measure_orders

    rows = [
        [first, str(torch_threads), str(threads), *(time_text(seconds) for seconds in times.values())]
        for (first, torch_threads, threads), times in measure_orders()
    ]
    header = ["imported first", "threads of torch", "of kvcache", "DynamicCache", "PagedCache q8"]
    show(options.markdown, f"A step at {CONTEXT} tokens, SmolLM2 in float32", header, rows)
