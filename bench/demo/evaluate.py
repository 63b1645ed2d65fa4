"""Measure the demo model and write its model card.

    python bench/demo/evaluate.py --stdlib <lib/python3.13> --model kvcache/demo --run demo-train/run.json

Measures the exported model, whose weights are rounded to bf16, with products in f32: bits per byte of the held-out
modules compared with ``xz -9``, and the share of names, seen once earlier in the context, that it copies.  Writes
``README.md``, ``evaluation.json`` and ``heldout.json`` into the folder of the weights; all numbers there are measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from card import write_card
from data import END_OF_TEXT, HELD_OUT, Document, default_stdlib, read_library, split
from model import Demo, load
from names import TEMPLATES, name_pieces, unseen_name
from tokenizers import Tokenizer

CONTEXTS = (256, 2048)
DISTANCES = (64, 256, 1000, 1800)


@torch.no_grad()
def file_nats(model: Demo, ids: list[int], context: int) -> float:
    """Nats of one file, which follows an end-of-text token.

    Windows of ``context`` tokens overlap by half: every token but those at the start of the file is predicted from
    at least half a context.  Each token counts once.
    """
    total, start, counted = 0.0, 0, 0  # counted: targets ids[1 .. counted] are included
    while counted < len(ids) - 1:
        window = torch.tensor([ids[start : start + context + 1]])
        logits = model(window[:, :-1])[0]
        fresh = counted - start
        total += F.cross_entropy(logits[fresh:].float(), window[0, 1 + fresh :], reduction="sum").item()
        counted = start + window.shape[1] - 1
        start += context // 2
    return total


def bits_per_byte(model: Demo, tok: Tokenizer, held: list[Document], context: int) -> tuple[float, dict[str, float]]:
    """Bits per byte as (over all held-out bytes, per module)."""
    eot = tok.token_to_id(END_OF_TEXT)
    nats: dict[str, float] = {}
    size: dict[str, int] = {}
    for doc in held:
        name = doc.path.split("/")[0].removesuffix(".py")
        nats[name] = nats.get(name, 0.0) + file_nats(model, [eot, *tok.encode(doc.text).ids], context)
        size[name] = size.get(name, 0) + len(doc.text.encode())
    each = {n: nats[n] / size[n] / math.log(2) for n in nats}
    return sum(nats.values()) / sum(size.values()) / math.log(2), each


def xz(data: bytes) -> int:
    """The size of ``data`` compressed by ``xz -9``, in bytes."""
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9))


def compressors(train: list[Document], held: list[Document]) -> dict[str, float]:
    """Bits per byte of xz -9: in one archive, file by file, and after the whole training text."""
    texts = [d.text.encode() for d in held]
    joined = b"".join(texts)
    before = "".join(d.text for d in train).encode()
    return {
        "concatenated": 8 * xz(joined) / len(joined),
        "per_file": 8 * sum(map(xz, texts)) / len(joined),
        "after_training_text": 8 * (xz(before + joined) - xz(before)) / len(joined),
    }


def filler(docs: list[list[str]], lengths: list[list[int]], want: int, rng: random.Random) -> str:
    """Consecutive whole lines of one held-out file, about ``want`` tokens."""
    if want <= 0:
        return ""
    while True:
        i = rng.randrange(len(docs))
        if sum(lengths[i]) < want + 50:
            continue
        at, total, out = rng.randrange(len(docs[i])), 0, []
        while at < len(docs[i]) and total < want:
            out.append(docs[i][at])
            total += lengths[i][at]
            at += 1
        if total >= want and total < want + 60:
            return "".join(out)


@torch.no_grad()
def copy_accuracy(
    model: Demo, tok: Tokenizer, train: list[Document], held: list[Document], prompts: int, seed: int = 11
) -> list[dict]:
    """Shares of whole names and of tokens that are copied, by distance, with and without the defining line."""
    docs = [d.text.splitlines(keepends=True) for d in held]
    lengths = [[len(e.ids) for e in tok.encode_batch(lines)] for lines in docs]
    pieces = name_pieces(tok)
    seen = "\n".join(d.text for d in train + held)
    eot = tok.token_to_id(END_OF_TEXT)
    rows = []
    for distance in DISTANCES:
        rng = random.Random(seed * 10000 + distance)
        count, tokens, gaps = Counter[str](), 0, 0
        for n in range(prompts):
            name = unseen_name(tok, pieces, seen, rng)
            line = TEMPLATES[n % len(TEMPLATES)]
            before, after = line.split("{}")
            head = filler(docs, lengths, 60, rng)
            between = filler(docs, lengths, distance - 20, rng)
            lead, glue = (before[:-1], " ") if before.endswith(" ") else (before, "")
            target = tok.encode(glue + name).ids
            for kind, definition in (("", line.format(name)), ("control_", "")):
                prompt = [eot, *tok.encode(head + definition + between + lead).ids]
                if not kind:
                    # The distance from the name's last token to the place of its repetition.
                    gaps += len(tok.encode(after + between + lead).ids)
                    tokens += len(target)
                ids = torch.tensor([prompt + target])
                assert ids.shape[1] <= 2048
                best = model(ids[:, :-1], last=len(target))[0].argmax(-1)
                hit = (best == ids[0, len(prompt) :]).tolist()
                # All tokens correct given the correct ones before: greedy decoding would produce the name.
                count[kind + "whole"] += all(hit)
                count[kind + "token"] += sum(hit)
                if not kind:
                    count["first"] += hit[0]
        means = {"mean_gap": gaps / prompts, "prompts": prompts, "mean_name_tokens": tokens / prompts}
        means |= {name: count[name] / prompts for name in ("whole", "first", "control_whole")}
        means |= {name: count[name] / tokens for name in ("token", "control_token")}
        rows.append({"distance": distance, **means})
        print(rows[-1], flush=True)
    return rows


def check_against_transformers(path: Path, ids: list[int]) -> float | None:
    """The largest difference between logits of our model and LlamaForCausalLM; None without transformers."""
    try:
        from transformers import LlamaForCausalLM
    except ImportError:
        return None
    theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        x = torch.tensor([ids])
        return (theirs(x).logits - load(path)(x)).abs().max().item()


def schedule(log: Path) -> dict:
    """Read a training log: the step at which the rate began its final decay, and the first step of each length."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lengths: dict[str, int] = {}
    for before, line in zip([{"step": 0}, *lines], lines, strict=False):
        lengths.setdefault(str(line["length"]), before["step"])
    constant = [line["step"] for line in lines if line["lr"] >= 1]
    return {"decay_from_step": max(constant, default=0), "length_from_step": lengths}


def library_version(stdlib: Path) -> str:
    """The CPython version of a library directory, read from its headers if they are installed."""
    header = stdlib.parents[1] / "include" / stdlib.name / "patchlevel.h"
    if header.exists():
        return re.search(r'PY_VERSION\s+"([^"]+)"', header.read_text()).group(1)
    return stdlib.name.removeprefix("python")


def processor() -> str:
    """The name of the CPU, as Linux says it."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0].strip() if names else "unknown"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--stdlib", type=Path, default=default_stdlib())
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--run", type=Path, help="run.json of the training; without it no card is written")
    ap.add_argument("--prompts", type=int, default=250, help="prompts per distance")
    ap.add_argument("--quick", action="store_true", help="full context only, no xz over the training text")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    args = ap.parse_args()
    torch.set_num_threads(args.threads)

    train, held = split(read_library(args.stdlib))
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load(args.model)
    began = time.monotonic()
    joined = "".join(d.text for d in held).encode()
    tokens = sum(len(tok.encode(d.text).ids) for d in held)
    sample = tok.encode(held[0].text).ids[:512]
    result = {
        "library": library_version(args.stdlib),
        "heldout_bytes": len(joined),
        "heldout_tokens": tokens,
        "bytes_per_token": len(joined) / tokens,
        "transformers_max_logit_difference": check_against_transformers(args.model, sample),
        "bits_per_byte": {},
        "processor": processor(),
        "torch": torch.__version__.split("+")[0],
    }
    for context in CONTEXTS[-1:] if args.quick else CONTEXTS:
        whole, each = bits_per_byte(model, tok, held, context)
        result["bits_per_byte"][str(context)] = whole
        result["bits_per_byte_per_module"] = each
        print(context, round(whole, 4), f"{time.monotonic() - began:.0f} s", flush=True)
    result["copy"] = copy_accuracy(model, tok, train, held, args.prompts)
    if not args.quick:
        result["xz"] = compressors(train, held)
    print(json.dumps(result, indent=1))
    if args.run and not args.quick:
        result["training"] = json.loads(args.run.read_text()) | schedule(args.run.with_name("log.jsonl"))
        (args.model / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        files = {d.path: len(d.text.encode()) for d in held}
        listed = {
            "library": result["library"], "modules": HELD_OUT, "bytes": len(joined),
            "sha256_of_all_files_in_order": hashlib.sha256(joined).hexdigest(), "files": files,
        }
        (args.model / "heldout.json").write_text(json.dumps(listed, indent=1) + "\n")
        write_card(args.model, result, HELD_OUT)


if __name__ == "__main__":
    main()
