"""Train a network with heads of 128 channels on any text, to measure its K and V: `bench quality --model OUT`.

    python bench/quality/train.py --minutes 17 --out OUT TEXT [TEXT ...]

Needs torch and transformers, and a GPU. A TEXT is a file of documents with a zero byte between two. The network has the
architecture of Qwen2: biases on its projections of queries, keys and values, 4 query heads over 2 KV heads. AdamW, its
rate constant for the first half of the time and then falling in a line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

END, VOCABULARY, CONTEXT, BATCH = "<|endoftext|>", 16384, 2048, 64
RATE, WARM_UP, LAST = 2e-3, 200, 0.02  # peak; steps; fraction of the peak
SAMPLE, PIECE = 20, 100_000  # the vocabulary is made of each 20th document; texts are encoded in pieces of characters
HELD_OUT = 64  # windows


def make_tokenizer(documents: list[str], rng: np.random.Generator) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` entries; digits are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sample = rng.choice(len(documents), len(documents) // SAMPLE, replace=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator((documents[i][:20_000] for i in sample), trainer)
    return tokenizer


def encode(documents: list[str], tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """All documents in random order, uint16, an end-of-text token (0) behind each piece."""
    pieces = [text[i : i + PIECE] for text in documents for i in range(0, len(text), PIECE)]
    rows = []
    for i in range(0, len(pieces), 4096):
        rows += [np.array([*found.ids, 0], np.uint16) for found in tokenizer.encode_batch_fast(pieces[i : i + 4096])]
    return np.concatenate([rows[i] for i in rng.permutation(len(rows))])


def rate(done: float, step: int) -> float:
    """The learning rate at a fraction of the time."""
    return RATE * (min(1.0, (step + 1) / WARM_UP) if done < 0.5 else max(LAST, 2 * (1 - done)))


def losses_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of `ids[:, 1:]` given the tokens before."""
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = torch.nn.functional.linear(states, model.lm_head.weight)
    return torch.nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def batches(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Windows of `CONTEXT + 1` tokens from random places."""
    window = torch.arange(CONTEXT + 1, device=data.device)
    while True:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH, 1), device=data.device)
        yield data[starts + window].long()


def train(model: Any, data: torch.Tensor, minutes: float) -> int:
    """Train for `minutes`; the steps taken."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(losses_of)
    start, spent = None, 0.0
    for step, ids in enumerate(batches(data)):
        for group in optimizer.param_groups:
            group["lr"] = rate(spent / (60 * minutes), step)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if start is None and step == 2:  # compiled
            loss.item()
            start = time.monotonic()
        if start is not None and step % 20 == 0:
            value, spent = loss.item(), time.monotonic() - start
            if step % 200 == 0:
                print(json.dumps({"step": step, "seconds": round(spent), "loss": round(value, 4)}), flush=True)
            if spent >= 60 * minutes:
                break
    return step + 1


def main() -> None:
    """Train, and write the checkpoint in bf16 with its tokenizer and `run.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="files of documents with a zero byte between two")
    parser.add_argument("--minutes", type=float, default=17, help="of training, the compiler's time not counted")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    documents = [text for path in options.texts for text in path.read_text(errors="replace").split("\0") if text]
    tokenizer = make_tokenizer(documents, rng)
    tokens = encode(documents, tokenizer, rng)
    split = len(tokens) - HELD_OUT * (CONTEXT + 1)
    data, held = (torch.from_numpy(part.astype(np.int32)).cuda() for part in (tokens[:split], tokens[split:]))
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=2 * CONTEXT, **shape, **heads, **ends)
    model = Qwen2ForCausalLM(config).cuda()
    steps = train(model, data, options.minutes)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found = [losses_of(model, ids.long()).item() for ids in held.view(-1, 4, CONTEXT + 1)]
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": len(data), "steps": steps,
        "passes": round(steps * BATCH * CONTEXT / len(data), 2), "held_out_loss": round(float(np.mean(found)), 4),
    }
    print(json.dumps(facts), flush=True)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save(str(options.out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (options.out / "tokenizer_config.json").write_text(json.dumps(names) + "\n")
    (options.out / "run.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
