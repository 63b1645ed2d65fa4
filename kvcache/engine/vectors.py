"""Vectors and scores of texts: from texts to the tokens that run, and from their rows to vectors and scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvcache.engine.completion import as_prompt, listed
from kvcache.engine.text_rows import LastLogits, LastRow, MeanRow, SharedRow, TextRows, common_tokens
from kvcache.kernels.functions import exp, sum_of
from kvcache.networks.protocols import Float32, Model
from kvcache.networks.tokens import as_tokens
from kvcache.networks.vector_layout import VectorLayout
from kvcache.sampling.plain_text import PlainText
from kvcache.sampling.text_tokens import TooManyTokens, encoded, encoded_within
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import as_count, as_instance, is_integer, short
from kvcache.texts.text import Tokens

__all__ = ["INSTRUCTION", "VectorOptions", "Vectors"]

_TOGETHER = 64  # texts whose vectors are made at a time, so that little is beside the result
_READERS: Mapping[str, type[LastRow] | type[MeanRow]] = {"last": LastRow, "mean": MeanRow}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt of Qwen3-Reranker, whose next token is "yes" or "no".
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NEEDED = ("<|im_start|>", "<|im_end|>", "yes", "no")


class VectorOptions(NamedTuple):
    """The options of vectors, as `ChatEngine.embed` takes them.

    Attributes:
        pooling: "last", "mean", or None for that of the checkpoint.
        normalise: whether vectors have the length 1.
        dimensions: how many of the first numbers stay; None: those of the checkpoint.
        prompt_name: of the checkpoint's prompts; None: its default.
        truncate: whether texts that are too long are cut.
    """

    pooling: str | None = None
    normalise: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: bool = False


class Vectors:
    """Makes vectors and scores of texts.

    Args:
        model: the network.
        text: the text side of its checkpoint; None: there is none.
        most: the most tokens of a text; None: any number.

    Attributes:
        plain: encodes texts in which special tokens are text; None: they are special tokens.
    """

    def __init__(self, model: Model, text: CheckpointText | GgufText | None, most: int | None) -> None:
        self._model, self._text = model, text
        self.plain: PlainText | None = None
        self._layout: VectorLayout = (None if text is None else text.vectors) or VectorLayout()
        self._ranks = self._layout.is_reranker
        self._most = min((each for each in (most, self._layout.most_tokens) if each is not None), default=None)

    def declare(self, pooling: str | None, reranker: bool) -> None:
        """Say what the checkpoint does not: the pooling of its vectors, None: nothing; that it judges documents.

        ValueError: no such pooling, or another one than that of the checkpoint.
        """
        if pooling is not None:
            self._pooling(pooling)
            if self._layout.pooling not in (None, pooling):
                raise ValueError(f"pooling: expected {self._layout.pooling}, as the checkpoint says, got {pooling}")
            self._layout = replace(self._layout, pooling=pooling)
        self._ranks = self._ranks or reranker

    # -- vectors --------------------------------------------------------------------------------------------

    def readings(self, texts: Iterable[Any], options: VectorOptions, name: str = "texts") -> list[TextRows]:
        """The texts as they run. TypeError, ValueError: as `ChatEngine.embed`.

        Args:
            name: of the texts in messages.
        """
        if not getattr(self._model, "gives_hidden", False):
            raise ValueError(f"model: expected one that gives hidden rows, got {type(self._model).__name__}")
        pooling, prompt = self._pooling(options.pooling), self._prompt(options.prompt_name)
        if prompt and pooling == "mean" and not self._layout.pools_prompt:
            raise ValueError("prompt_name: expected none where prompts are left out of the mean, got one")
        self.dimensions(options.dimensions)
        as_instance(options.normalise, bool, "normalise")
        make, truncate = _READERS[pooling], as_instance(options.truncate, bool, "truncate")
        texts = listed(texts, name)
        return [make(self._tokens(each, prompt, f"{name}.{i}", truncate)) for i, each in enumerate(texts)]

    def _pooling(self, asked: str | None) -> str:
        if asked is not None and as_instance(asked, str, "pooling") not in _READERS:
            raise ValueError(f"pooling: expected last or mean, got {short(asked)}")
        pooling = self._layout.pooling if asked is None else asked
        if pooling is None:
            raise ValueError("pooling: expected last or mean, as this checkpoint says none, got None")
        return pooling

    def _prompt(self, name: str | None) -> str:
        name = None if name is None else as_instance(name, str, "prompt_name")
        prompts, name = self._layout.prompts, self._layout.default_prompt if name is None else name
        if name is not None and name not in prompts:
            raise ValueError(f"prompt_name: expected one of {', '.join(prompts) or 'none'}, got {short(name)}")
        return "" if name is None else prompts[name]

    def _tokens(self, text: Any, prompt: str, name: str, truncate: bool) -> Tokens:
        most = self._most
        if isinstance(text, str):
            tokenizer, plain = self._tokenizer(name), self.plain
            if plain is None:
                text = prompt + text
            else:
                tokenizer, text = plain.tokenizer, plain.chat_text([text], lambda texts: prompt + texts[0])
            if truncate and most is not None:
                return self._checked(encoded_within(tokenizer, text, name, most), name)
            return self._checked(encoded(tokenizer, text, name, most=most), name)
        if text is None or is_integer(text):
            raise TypeError(f"{name}: expected a text or token ids, got {type(text).__name__}")
        if prompt:
            raise ValueError(f"{name}: expected a text behind a prompt, got token ids")
        try:
            tokens = as_tokens(text, self._model.config.vocab_size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {str(error).partition(': ')[2]}") from None
        return self._checked(tokens[:most] if truncate else tokens, name)

    def _checked(self, ids: Any, name: str) -> Tokens:
        if not len(ids):
            raise ValueError(f"{name}: expected at least one token, got none")
        if self._most is not None and len(ids) > self._most:
            raise TooManyTokens(name, self._most, f"{len(ids)} tokens")
        return as_prompt(ids, lambda: None, self._model.config.vocab_size)

    def _tokenizer(self, name: str) -> Any:
        tokenizer = None if self._text is None else self._text.tokenizer
        if tokenizer is None:
            raise ValueError(f"{name}: expected token ids, since the engine has no tokenizer, got a text")
        return tokenizer

    def dimensions(self, asked: int | None = None) -> int:
        """How many numbers a vector has; None: as many as the checkpoint says. ValueError: there are fewer."""
        dense = self._layout.dense
        most: int = len(dense[-1].weight) if dense else self._model.config.hidden_size  # type: ignore[attr-defined]
        if asked is None:
            return min(most, self._layout.dimensions or most)
        return as_count(asked, "dimensions", 1, most)

    def made(self, readings: Sequence[TextRows], options: VectorOptions) -> Float32:
        """The vectors of texts that have run, float32 `(n, dimensions)`.

        ValueError: a vector without a direction, or with numbers that are not finite.
        """
        count = self.dimensions(options.dimensions)
        found = np.empty((len(readings), count), np.float32)
        for start in range(0, len(readings), _TOGETHER):
            rows = np.stack([_result_of(each) for each in readings[start : start + _TOGETHER]])
            for layer in self._layout.dense:
                rows = layer(rows)
            rows = rows[:, :count]
            if not np.isfinite(rows).all():
                raise ValueError("model: expected finite hidden rows, got others")
            found[start : start + _TOGETHER] = [_unit(row) for row in rows] if options.normalise else rows
        return found

    # -- scores ---------------------------------------------------------------------------------------------

    @property
    def is_reranker(self) -> bool:
        """Whether the checkpoint, or `declare`, says that it judges documents."""
        return self._ranks

    @property
    def pools(self) -> bool:
        """Whether the checkpoint, or `declare`, says how its vectors are made."""
        return self._layout.pooling is not None

    def judged(self, query: str, documents: Iterable[Any], instruction: str | None, truncate: bool) -> list[TextRows]:
        """The prompts that ask whether each document answers a query, with what they have in common noted."""
        query = as_instance(query, str, "query")
        instruction = INSTRUCTION if instruction is None else as_instance(instruction, str, "instruction")
        documents, truncate = listed(documents, "documents"), as_instance(truncate, bool, "truncate")
        tokenizer = self._tokenizer("query")
        ids = {token: tokenizer.token_to_id(token) for token in _NEEDED}
        if missing := [token for token, number in ids.items() if number is None]:
            raise ValueError(f"model: expected a reranker, with a token {missing[0]}, got one without")
        judge, chosen = self._layout.judge, self._layout.judges or (ids["yes"], ids["no"])
        before, behind = (encoded(tokenizer, text, "query", add_special_tokens=False) for text in (_BEFORE, _BEHIND))
        if self.plain is not None:
            tokenizer = self.plain.tokenizer
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        ids_of_query = encoded(tokenizer, asked, "query", most=self._most, add_special_tokens=False)
        least = len(before) + len(ids_of_query) + 1 + len(behind)
        if self._most is not None and least > self._most:
            raise TooManyTokens("query", self._most, f"{least} tokens with one of a document")
        room = None if self._most is None or not truncate else self._most - len(before) - len(behind)
        found: list[TextRows] = []
        for i, document in enumerate(documents):
            name = f"documents.{i}"
            text = asked + as_instance(document, str, name)
            middle = encoded(tokenizer, text, name, most=None if truncate else self._most, add_special_tokens=False)
            middle = middle[:room]
            tokens = self._checked([*before, *middle, *behind], name)
            found.append(LastLogits(tokens, chosen) if judge is None else SharedRow(tokens))
        common = common_tokens([each.tokens for each in found])
        for each in found:
            each.parts_at = (common,) if 0 < common < len(each.tokens) else ()
        return found

    def scores(self, readings: Sequence[TextRows]) -> list[float]:
        """The scores of prompts that have run: the share of "yes" of the two answers, from 0 to 1."""
        judge, found = self._layout.judge, []
        for each in readings:
            row = _result_of(each)
            yes, no = map(float, row if judge is None else judge(row[None])[0])
            if not np.isfinite(yes - no):
                raise ValueError(f"model: expected finite logits, got {yes} and {no}")
            distance = exp(-abs(yes - no))
            found.append((1.0 if yes >= no else distance) / (1.0 + distance))
        return found


def _result_of(reading: TextRows) -> Float32:
    assert reading.result is not None, "it has run"
    return reading.result


def _unit(row: Float32) -> Float32:
    """A vector with the length 1."""
    wide = row.astype(np.float64)
    length = np.sqrt(sum_of(wide * wide))
    if not length:
        raise ValueError("normalise: expected a vector with a direction, got zeros")
    unit: Float32 = (wide / length).astype(np.float32)
    return unit
