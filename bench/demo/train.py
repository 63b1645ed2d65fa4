"""Train the demo model on the standard library's sources, on a CPU, in a fixed amount of wall-clock time.

    python bench/demo/train.py --stdlib /path/to/lib/python3.13 --minutes 80 --out kvcache/demo

Matrices are trained with Muon, embeddings and norms with Adam.  The learning rate and the sequence length follow
the fraction of the time that has passed, so a run completes its schedule on a slow or busy machine too.  A checkpoint
is written every few minutes and on SIGTERM; ``--resume`` continues from it.

On a busy machine, set OMP_WAIT_POLICY=passive: threads that spin at barriers lose their time slices.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from data import HELD_OUT, MIXTURE, VOCAB_SIZE, Sampler, default_stdlib, read_library, split, train_tokenizer
from model import Config, Demo, export
from tokenizers import Tokenizer

#: (fraction of the time, sequence length): short sequences first, since they are cheaper.
LENGTHS = ((0.0, 512), (0.3, 1024), (0.5, 2048))
WARM_UP, DECAY_FROM, LAST_LR = 0.015, 0.6, 0.02


def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, on a stack of matrices."""
    x = g.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; matrices of one shape are iterated together."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes: dict[tuple, list] = {}
            for p in group["params"]:
                shapes.setdefault(tuple(p.shape), []).append(p)
            for (rows, cols), params in shapes.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(state["m"], group["momentum"]))
                scale = group["lr"] * max(1.0, rows / cols) ** 0.5
                for p, u in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-scale)


def rate(done: float) -> float:
    """Learning-rate factor at a fraction of the run: warm-up, constant, linear decay."""
    if done < WARM_UP:
        return 0.1 + 0.9 * done / WARM_UP
    if done < DECAY_FROM:
        return 1.0
    return max(LAST_LR, 1 - (done - DECAY_FROM) / (1 - DECAY_FROM))


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--stdlib", type=Path, default=default_stdlib(), help="a lib/python3.x directory")
    ap.add_argument("--minutes", type=float, default=80)
    ap.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    ap.add_argument("--work", type=Path, default=Path("demo-train"), help="folder of the checkpoint and the log")
    ap.add_argument("--batch-tokens", type=int, default=8192)
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=0.004)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--save-every", type=float, default=4, help="minutes between checkpoints")
    ap.add_argument("--resume", action="store_true")
    return ap.parse_args()


@torch.no_grad()
def quick_loss(loss, seqs: torch.Tensor) -> float:
    """Mean nats per token over a few held-out sequences; only logged, never used for a choice."""
    return sum(loss(s[None]).item() for s in seqs) / len(seqs)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint, log_path = args.work / "checkpoint.pt", args.work / "log.jsonl"

    train_docs, held = split(read_library(args.stdlib))
    tok_path = args.work / "tokenizer.json"
    if not (args.resume and tok_path.exists()):
        train_tokenizer(train_docs).save(str(tok_path))
    tok = Tokenizer.from_file(str(tok_path))

    model = Demo(Config(vocab_size=VOCAB_SIZE))
    muon = Muon([p for n, p in model.named_parameters() if p.ndim == 2 and n != "embed"], args.muon_lr)
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or n == "embed"]
    adam = torch.optim.AdamW(others, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss_of = torch.compile(model.loss, dynamic=False)

    step, tokens, spent, stages = 0, 0, 0.0, []
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in (("model", model), ("muon", muon), ("adam", adam)):
            part.load_state_dict(saved[name])
        step, tokens, spent, stages = (saved[name] for name in ("step", "tokens", "spent", "stages"))
    if not stages or stages[-1] != {**MIXTURE, "from_step": stages[-1]["from_step"]}:
        stages.append({**MIXTURE, "from_step": step})  # records a change of the mixture
    # A resumed run must only draw other documents than the first part did.
    sampler = Sampler(train_docs, tok, args.seed + step)
    ids = tok.encode("".join(d.text for d in held)).ids
    stride = len(ids) // 12
    held_seqs = torch.tensor([ids[i * stride : i * stride + 2049] for i in range(12)])

    budget = args.minutes * 60
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_files": len(train_docs),
        "training_bytes": sum(len(d.text.encode()) for d in train_docs),
        "library_bytes": sum(len(d.text.encode()) for d in train_docs if not d.is_test),
        "tokens_per_pass": sampler.tokens_per_pass(),
        **{name: getattr(args, name) for name in ("minutes", "batch_tokens", "muon_lr", "adam_lr", "threads")},
        "stages": stages,
    }
    print(json.dumps(facts), flush=True)

    def save() -> None:
        state = {
            "model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict(),
            "step": step, "tokens": tokens, "spent": spent, "stages": stages,
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    log = log_path.open("a" if args.resume else "w")
    last_save, mark, mark_tokens, running = spent, spent, tokens, []
    began = time.monotonic() - spent
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    while spent < budget:
        done = spent / budget
        length = [t for at, t in LENGTHS if done >= at][-1]
        for opt, lr in ((muon, args.muon_lr), (adam, args.adam_lr)):
            opt.param_groups[0]["lr"] = lr * rate(done)
        muon.param_groups[0]["momentum"] = min(0.95, 0.85 + 0.1 * step / 300)
        loss = loss_of(torch.from_numpy(sampler.batch(args.batch_tokens // length, length)))
        loss.backward()
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        running.append(loss.item())
        step, tokens, spent = step + 1, tokens + args.batch_tokens, time.monotonic() - began
        if step % 25 == 0 or spent >= budget:
            line = {
                "step": step,
                "minutes": round(spent / 60, 2),
                "tokens": tokens,
                "length": length,
                "loss": round(sum(running) / len(running), 4),
                "lr": round(rate(done), 4),
                "tokens_per_s": round((tokens - mark_tokens) / (spent - mark)),
            }
            mark, mark_tokens, running = spent, tokens, []
            if step % 250 == 0 or spent >= budget:
                line["heldout_loss"] = round(quick_loss(model.loss, held_seqs), 4)
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
        if spent - last_save > args.save_every * 60 or spent >= budget or stop:
            save()
            last_save = spent
            if stop:
                return

    export(model, tok, args.out)
    (args.out / "heldout.json").write_text(json.dumps({"modules": HELD_OUT}, indent=1) + "\n")
    (args.work / "run.json").write_text(
        json.dumps({**facts, "steps": step, "tokens": tokens, "passes": round(tokens / facts["tokens_per_pass"], 2)})
        + "\n"
    )


if __name__ == "__main__":
    main()
