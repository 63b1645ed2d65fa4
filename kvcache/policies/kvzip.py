"""`KVzip`: what the network attends to when it repeats the prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.support.arguments import as_count
from kvcache.support.token_ids import as_tokens
from kvcache.texts.prefix_policy import Encode, Probe

__all__ = ["KVzip"]

Int64 = npt.NDArray[np.int64]
Words = str | npt.ArrayLike
_LEAD = 8  # tokens before a part that its prompt ends with


class KVzip:
    """Keeps what gets the highest attention while the network reads the prefix again, behind a prompt to repeat it.

    The prefix is read in parts. A token is worth the highest weight that a query gives to it in a softmax over the
    first tokens, its part and what has been read, and the tokens that are worth most in any layer and head stay there.
    It is a policy of `InferenceEngine.compress`, where the whole prefix is known. Each token of the prefix runs twice.

    Source: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv 2505.23416),
    section 3, and its implementation in kvpress.

    Args:
        part: tokens that are read again at a time, 1 to 4,096; the paper has 2,048.
        sinks: first tokens, which stay in every head; at most as many as the budget of a head.
        layerwise: whether each layer keeps as many tokens; if not, layers divide the budget as heads do.
        prompt: what is said before the first part; before the others `later`, and the 8 tokens before the part.
        suffix: what stands between the prompt and the part. Where a chat template would begin an answer, say so here.
            All three are texts, or token ids.

    Raises:
        TypeError, ValueError: not such numbers.
    """

    def __init__(
        self, part: int = 512, sinks: int = 4, *, layerwise: bool = False,
        prompt: Words = "\n\nRepeat the previous context exactly.",
        later: Words = "\n\nRepeat the part of the previous context exactly, starting with", suffix: Words = "\n",
    ) -> None:
        self.part, self.sinks = as_count(part, "part", 1, 4096), as_count(sinks, "sinks")
        words = (each if isinstance(each, str) else as_tokens(each) for each in (prompt, later, suffix))
        self.prompt, self.later, self.suffix = words
        self.layerwise = bool(layerwise)

    def probes(self, tokens: npt.NDArray[np.uint32], encode: Encode, /) -> list[Probe]:
        """See `PrefixPolicy.probes`."""
        prompt, later, suffix = (
            np.asarray(encode(each), np.uint32) if isinstance(each, str) else each
            for each in (self.prompt, self.later, self.suffix)
        )
        found = []
        for start in range(0, len(tokens), self.part):
            own = tokens[start : start + self.part]
            said = [later, tokens[max(0, start - _LEAD) : start]] if start else [prompt]
            found.append(Probe(start, start + len(own), np.concatenate([*said, suffix, own])))
        return found

    def keep_in_all(self, scores: npt.NDArray[np.float32], budget: int, /) -> list[list[Int64]]:
        """See `PrefixPolicy.keep_in_all`."""
        worth: Any = scores.copy()
        worth[..., : min(self.sinks, budget)] = np.inf
        groups = worth.reshape(len(worth) if self.layerwise else 1, -1)
        count = len(worth) * worth.shape[1] * budget // len(groups)
        stays = np.zeros(groups.shape, bool)
        np.put_along_axis(stays, np.argsort(-groups, axis=1, kind="stable")[:, :count], True, axis=1)
        return [[np.flatnonzero(head) for head in layer] for layer in stays.reshape(worth.shape)]
