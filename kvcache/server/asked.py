"""`Asked`: what a client asks for, whatever interface its body has."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcache.engine import SamplingParams
from kvcache.grammar import Grammar
from kvcache.server.conversations import Conversation
from kvcache.server.retention import CacheMark

__all__ = ["Asked"]


class Asked(NamedTuple):
    """The answers that a body asks for. Each interface reads its own bodies into this."""

    model: str
    prompts: list[Any]  # one conversation, or texts and lists of token ids
    params: SamplingParams  # with the grammar of the answer, once that is known
    field: str  # the name of the prompts in messages of errors
    n: int = 1  # samples of each prompt
    stream: bool = False
    with_usage: bool = False  # whether a stream of completions ends with the numbers of tokens
    salt: str | None = None  # requests of another one share no prefixes with it
    keep: float | None = None  # seconds that the prompts stay cached for; None: nothing is said
    marks: tuple[CacheMark, ...] = ()  # ends of blocks of a conversation that stay for times of their own
    echo: bool = False  # whether an answer begins with its prompt
    with_tokens: bool = False  # whether it has token ids, the prompt's too
    priority: int = 0
    warnings: tuple[str, ...] = ()  # about parts of the body that are not read
    adapter: str | None = None  # the name of one of the model's
    applied: tuple[dict[str, Any], ...] | None = None  # what edits of the conversation have cleared; None: no edits
    form: Grammar | None = None  # that the body asks for, before calls are added to it

    @property
    def conversation(self) -> Conversation | None:
        """The conversation; None: the prompts are texts and token ids."""
        first = self.prompts[0]
        return first if isinstance(first, Conversation) else None

    @property
    def scores(self) -> int | None:
        """For how many tokens beside each token of the prompts log-probabilities are due; None: for no prompt."""
        return self.params.logprobs if self.echo else None

    @property
    def seconds(self) -> float | None:
        """`keep`; a body for no new token asks for its prompt in the cache, for no time of its own."""
        is_warm = self.params.max_tokens == 0 and self.scores is None
        return 0.0 if self.keep is None and is_warm else self.keep
