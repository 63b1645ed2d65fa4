"""The model card of the demo model, filled in with its measurements."""

from __future__ import annotations

import json
from pathlib import Path

CARD = """\
---
license: mit
language: en
tags: [llama, code, demo]
---

# The demo model of kvcache

A very small language model of the Llama architecture, made to run a KV-cache engine on real text and to measure
its quality. It continues Python source in the style of CPython's standard library, and it copies names and
passages from earlier in its context. It is a measuring device, not an assistant.

| | |
|---|---|
| Parameters | {parameters:,} (tied embeddings), bf16, {megabytes:.1f} MB |
| Shape | {num_hidden_layers} layers, hidden {hidden_size}, SwiGLU {intermediate_size} |
| Attention | {num_attention_heads} query heads and {num_key_value_heads} KV heads of {head_dim} |
| Positions | rotary, theta {rope_theta:g}, context {context} |
| Vocabulary | {vocab_size}, byte-level BPE, lossless on any text; `<|endoftext|>` separates documents |
| Layout | Hugging Face `LlamaForCausalLM`; largest logit difference to it in f32: {logit_difference} |

## Data

The `*.py` files of the standard library of CPython {library}, its tests included, under the PSF License
Version 2 (PSF-2.0): {training_files:,} files, {training_mb:.1f} MB, of which {library_mb:.1f} MB are the
library itself and the rest tests. Installed packages, machine-generated tables (charmap codecs, entity
lists, documentation topics) and the build configuration of the machine are excluded. The tokenizer was
trained on the same files. The text itself is not part of this package; the weights are under the MIT
license, as the project is.

Three augmentations, made from the same text, force copying over a distance. In some documents one to four
recurring identifiers are replaced throughout by a made-up name ("renamed"). In some sequences spans of 32 to
256 tokens are repeated at a random later place ("repeating"). In others, short stretches with a made-up name
occur twice, at random places ("planted"; half of these names are random vocabulary pieces, as in the test
below). The mixture:

| from step | library per test file | documents renamed | sequences repeating | sequences planted |
|---|---|---|---|---|
{mixture}

These modules are **held out** as a whole, with their tests, which are not used at all: {modules}. They are
{heldout_files} files of {heldout_bytes:,} bytes ({heldout_tokens:,} tokens, {bytes_per_token:.2f} bytes per
token); `heldout.json` lists them.

## Training

{steps:,} steps of {batch_tokens:,} tokens: {tokens_m:.1f} M tokens, {passes:.2f} passes over the weighted
corpus, in {minutes:g} minutes on {threads} cores of an {processor} that had other work to do at the same
time, with PyTorch {torch}. Muon (rate {muon_lr:g}) for the matrices, Adam (rate {adam_lr:g}) for embeddings
and norms; the rates fell linearly to nearly nothing from step
{decay_from:,} on. Sequences: {lengths}.
Products in bf16, master weights in f32. The run was stopped and resumed a few times, and both the mixture and
the time allotted were changed on the way; the script as it stands uses the last mixture from the start.

## Quality

Measured on the weights as shipped, rounded to bf16, with products in f32.

**Bits per byte of the held-out modules** (lower is better; windows overlap by half, so that every token but
those at the start of a file is predicted from at least half of the context):

| | bits per byte |
|---|---|
{bpb_rows}
| `xz -9`, all files as one | {xz[concatenated]:.3f} |
| `xz -9`, file by file | {xz[per_file]:.3f} |
| `xz -9`, as one, given the whole training text in front | {xz[after_training_text]:.3f} |

Per module at context {context}: {per_module}.

**Copying a name seen once.** A line that defines a name is inserted into held-out text. Later the beginning of
the line is repeated up to the name, and the model has to complete it. Names consist of three to five random
vocabulary pieces and occur nowhere in the training or held-out text; on average they are {name_tokens:.1f} tokens
long. The distance is counted from the end of the name to the place of the repetition (mean over {prompts}
prompts each). *Whole name*: greedy decoding gives all of its tokens. *Token*: tokens predicted correctly,
given the correct ones before. *Without*: the same prompts without the defining line, that is, guessing.

| distance (tokens) | whole name | first token | token | whole, without | token, without |
|---|---|---|---|---|---|
{copy_rows}

## What it cannot do

Copying gets worse with distance, as the table shows, and hardly works over nearly the whole context. Bits per
byte is the better measure there.

It knows only this corpus: no other languages, no facts, no instructions, no chat. Its code looks like Python and
does not work. It was trained on at most {context} tokens at once. Results on it show whether a change to a cache
preserves what a model reads from its context; their sizes do not carry over to large models.

## Made by

```
python bench/demo/train.py --stdlib <lib/python3.13> --minutes {minutes:g} --out kvcache/demo
python bench/demo/evaluate.py --stdlib <lib/python3.13> --model kvcache/demo --run demo-train/run.json
```

The schedule follows the clock, so another run gives another model, of about this quality on such a machine.
The second command writes the numbers above; `evaluation.json` has all of them."""


def write_card(path: Path, result: dict, modules: tuple[str, ...]) -> None:
    """Write README.md into the folder of the weights."""
    config = json.loads((path / "config.json").read_text())
    run = result["training"]
    held = json.loads((path / "heldout.json").read_text())
    difference = result["transformers_max_logit_difference"]
    per_module = sorted(result["bits_per_byte_per_module"].items(), key=lambda kv: kv[1])
    copy = result["copy"]
    values = {
        **run, **config, **result,
        "context": config["max_position_embeddings"],
        "megabytes": (path / "model.safetensors").stat().st_size / 1e6,
        "logit_difference": "not checked" if difference is None else f"{difference:.1e}",
        "training_mb": run["training_bytes"] / 1e6,
        "library_mb": run["library_bytes"] / 1e6,
        "decay_from": run["decay_from_step"],
        "lengths": ", ".join(f"{int(n):,} tokens from step {s:,}" for n, s in run["length_from_step"].items()),
        "mixture": "\n".join(
            f"| {s['from_step']} | {s['library_weight']} | {s['rename_share']:.0%} | {s['copy_share']:.0%} |"
            f" {s.get('recall_share', 0):.0%} |"
            for s in run["stages"]
        ),
        "modules": ", ".join(f"`{m}`" for m in modules),
        "heldout_files": len(held["files"]),
        "tokens_m": run["tokens"] / 1e6,
        "bpb_rows": "\n".join(
            f"| this model, context {c} | {b:.3f} |"
            for c, b in sorted(result["bits_per_byte"].items(), key=lambda kv: int(kv[0]))
        ),
        "per_module": ", ".join(f"{n} {b:.2f}" for n, b in per_module),
        "name_tokens": sum(r["mean_name_tokens"] for r in copy) / len(copy),
        "prompts": copy[0]["prompts"],
        "copy_rows": "\n".join(
            f"| {r['mean_gap']:.0f} | {r['whole']:.1%} | {r['first']:.1%} | {r['token']:.1%} |"
            f" {r['control_whole']:.1%} | {r['control_token']:.1%} |"
            for r in copy
        ),
    }
    (path / "README.md").write_text(CARD.format(**values))
