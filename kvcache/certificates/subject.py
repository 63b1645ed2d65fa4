"""`Subject`: a network and its formats, and engines over it that compute one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcache.certificates.answer_digests import LogitsDigests, Record
from kvcache.certificates.seeded_prompts import Case, tokens_of
from kvcache.engine.cached import PrefixCachedEngine
from kvcache.engine.completion import Completion
from kvcache.engine.inference import InferenceEngine
from kvcache.networks.model import Transformer
from kvcache.networks.protocols import layer_attention, layer_recurrences
from kvcache.serving.batch import BatchEngine

__all__ = ["Subject"]

BLOCK = 16  # tokens


class Subject:
    """A network, stored and computed as an engine does.

    Args:
        engine: over a `Transformer`; further engines store K and V as it does.

    Attributes:
        model, tokenizer: of the engine.
        windows: of its layers, ascending.
        has_states: whether layers keep a state.
        storage: the arguments of engines that say how K and V are stored.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        model = engine.model
        assert isinstance(model, Transformer)
        self.model, self.tokenizer = model, engine.tokenizer
        self.windows = sorted({each.window for each in layer_attention(model) if each and each.window})
        self.has_states = bool(layer_recurrences(model))
        self.storage: dict[str, Any] = engine.storage

    def blocks(self, *lengths: int) -> int:
        """Blocks for texts of these lengths, with one more for each: its last block is copied where it is shared."""
        return sum(-(-length // BLOCK) + 1 for length in lengths)

    def other(self, name: str, count: int) -> list[int]:
        """Tokens of another text, by its name."""
        found: list[int] = tokens_of(name, count, self.model.config.vocab_size).tolist()
        return found

    def engine(self, case: Case, **options: Any) -> InferenceEngine:
        """An engine with room for a prompt and its answer."""
        num_blocks = self.blocks(length_of(case))
        return InferenceEngine(self.model, num_blocks=num_blocks, block_size=BLOCK, **self.storage, **options)

    def cached(self, case: Case, **options: Any) -> PrefixCachedEngine:
        """An engine with a prefix cache that has room for a few such texts."""
        return PrefixCachedEngine(self.engine(case), 4 * self.blocks(length_of(case)), strict=True, **options)

    def batch(self, num_blocks: int, **options: Any) -> BatchEngine:
        """An engine for many requests."""
        options = {"draft": None, "max_running": 8, **options}
        return BatchEngine(self.model, num_blocks=num_blocks, block_size=BLOCK, **self.storage, **options)

    def record(self, case: Case, complete: Callable[..., Completion]) -> tuple[Record, Completion]:
        """The answer of `complete`, called with a prompt and its sampling parameters."""
        digests = LogitsDigests()
        answer = complete(case.tokens, digests.params(case.params))
        return digests.record(len(case.tokens), answer), answer

    def scored(self, case: Case, engine: InferenceEngine) -> Record:
        """The answer of an engine, with the log-probabilities of the prompt."""
        digests = LogitsDigests()
        answer = engine.complete(case.tokens, digests.params(case.params))
        return digests.record(len(case.tokens), answer, engine.score(case.tokens))


def length_of(case: Case) -> int:
    """Tokens of a prompt and its answer."""
    return len(case.tokens) + case.params.max_tokens
