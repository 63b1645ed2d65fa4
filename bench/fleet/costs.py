"""`Costs`: how long a worker of a fleet takes for prompts, steps of answers, and bytes of a shared store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from kvcache import BatchEngine, PagedKvCache, SamplingParams

__all__ = ["Costs"]

_GAP, _AIM = 0.05, 0.9  # seconds that a step beside decodes should last, and the share of them that it is meant to


@dataclass(frozen=True)
class Costs:
    """Seconds of one worker, and bytes of a token.

    The defaults are measurements of the pages beside this bench, of two cores of an AMD EPYC (family 26, model 2):
    Llama-3.2-1B's shape in Q8_0 with K and V in q4. `per_token` and `per_pair` solve the 1.04 s of 512 tokens
    (weights.md) and the 9.29 s of 4,080 (tiers.md). A step takes 25.3 ms (weights.md), and each further row of it as
    long as a token of a prompt. Attention over 32k tokens in q4 takes 1.69 ms a layer with 128 channels (kernels.md),
    here half of that in 16 layers. A value of a tier has 576 KiB for 64 tokens (tiers.md). A link of 10 Gbit/s is
    slower than what `RedisTier` reads (2.25 GB/s).

    Attributes:
        per_token, per_pair: of a prompt, for each token, and for each pair of a query and a key.
        step, per_row, per_context: of a step of decodes, for each answer in it, and for each token of their contexts.
        token_bytes: of K and V.
        link: bytes per second between a worker and the store.
        latency: seconds of a request to the store.
        event_delay: seconds until the router knows what a worker has stored or evicted.
    """

    per_token: float = 1.996e-3
    per_pair: float = 1.38e-7
    step: float = 23.3e-3
    per_row: float = 2.0e-3
    per_context: float = 4.1e-7
    token_bytes: int = 9216
    link: float = 1.25e9
    latency: float = 1e-3
    event_delay: float = 0.1

    def prompt(self, num_tokens: int, cached: int = 0) -> float:
        """Seconds to compute a prompt of which the first `cached` tokens are there."""
        new = num_tokens - cached
        return self.per_token * new + self.per_pair * new * (cached + (new + 1) / 2)

    def decodes(self, rows: int, context: int) -> float:
        """Seconds of a step of `rows` answers, whose contexts have `context` tokens together."""
        return self.step + self.per_row * rows + self.per_context * context

    def shares(self, rows: int, context: int, *, prompt_runs: bool) -> tuple[float, float]:
        """How fast a prompt proceeds with `rows` answers, 1 is alone; and the steps of the answers in a second.

        A step has the time for pieces of prompts that the `TokenBudget` of `BatchEngine` gives them.
        """
        if not rows:
            return 1.0, 0.0
        decodes = self.decodes(rows, context)
        if not prompt_runs:
            return 0.0, 1 / decodes
        piece = max(_AIM * _GAP - decodes, decodes)
        return piece / (piece + decodes), 1 / (piece + decodes)

    def transfer(self, num_tokens: int) -> float:
        """Seconds of a worker's link for K and V of `num_tokens`."""
        return num_tokens * self.token_bytes / self.link

    @classmethod
    def measured(
        cls, model: str | Path, lengths: Sequence[int] = (128, 512, 1024), rows: Sequence[int] = (1, 8)
    ) -> Costs:
        """The costs of a checkpoint on this machine, K and V in q4; of the store and of contexts the defaults."""
        rng = np.random.default_rng(0)
        with BatchEngine.from_pretrained(model, dtype="q4", num_blocks=1024, draft=None) as engine:
            config = engine.config

            def run(count: int, length: int, new: int) -> tuple[float, float]:
                """Seconds to the first token of the last of `count` requests, and the median between later ones."""
                params = SamplingParams(temperature=0.0, max_tokens=new)
                made = [engine.submit(rng.integers(1, config.vocab_size, length), params) for _ in range(count)]
                for each in made:
                    each.result()
                gaps = [gap for each in made for gap in each.metrics.itl]
                return max(each.metrics.ttft or 0.0 for each in made), median(gaps or [0.0])

            run(1, lengths[0], 4)
            firsts = [min(run(1, length, 1)[0] for _ in range(3)) for length in lengths]
            steps = [min(run(count, 16, 48)[1] for _ in range(2)) for count in rows]
        pairs = [length * (length + 1) / 2 for length in lengths]
        (per_token, per_pair), *_ = np.linalg.lstsq(np.array([lengths, pairs]).T, np.array(firsts), rcond=None)
        per_row = max(0.0, (steps[-1] - steps[0]) / (rows[-1] - rows[0]))
        cache = PagedKvCache(1, 64, config.num_kv_heads, config.head_dim, dtype="q4", num_layers=config.num_layers)
        return cls(
            per_token=float(per_token), per_pair=max(0.0, float(per_pair)), step=steps[0] - per_row * rows[0],
            per_row=per_row, token_bytes=cache.block_memory_bytes // 64,
        )
