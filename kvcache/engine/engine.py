"""The inference engine: a network, a cache of its own, and the loop that turns prompts into tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import as_count, as_index, as_instance
from kvcache.engine.evicting import Budgets, EvictingSequence
from kvcache.engine.model import Transformer
from kvcache.engine.protocols import Float32, Model, NetworkConfig
from kvcache.engine.requests import Requests
from kvcache.engine.residual import default_length
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import LiveSequence, ModelSequence, Share
from kvcache.engine.tokenizer import load_tokenizer
from kvcache.engine.tokens import as_tokens
from kvcache.errors import OutOfMemoryError
from kvcache.eviction import EvictionPolicy
from kvcache.paged.cache import PagedKvCache

__all__ = ["InferenceEngine"]

_DEFAULT_TOKENS = 8192  # the default pool holds the whole context, up to so many tokens


class InferenceEngine:
    """Runs one sequence at a time through a network whose keys and values live in a `PagedKvCache`.

    `generate`, `stream` and `score` start a new sequence; `prefill_from_pos` and `decode_step` go on with the
    one there is. Calls are serialised, so threads may share an engine.

    Failing calls are atomic: `prefill_from_pos`, `decode_step` and `begin` leave the sequence as it was, except where
    `prefill_from_pos` has no memory for both the old tokens and the new ones (see there).
    `generate`, `stream` and `score` check their arguments first and then give up the old sequence, since two
    would need twice the memory. A failure after that (memory, the network) leaves `generate` and `score` with
    an empty sequence, and `stream` with the tokens that it has delivered.

    Args:
        model: a `Transformer`, or anything with the `Model` protocol.
        sampling_params: used where a request brings none.
        seed: requests without a seed of their own derive one from this and from how many came before.
        dtype, key_dtype, value_dtype, rotate, block_size: storage of the cache, see `PagedKvCache`.
        num_blocks: size of the cache; by default enough for the whole context, but for 8192 tokens at most.
        prefill_chunk: prompts run through the network in pieces of at most so many tokens, which end at its multiples.
        residual_length: a query sees the newest tokens, those of its own group of so many (0 to 256), in f16, and only
            those before them as `dtype` packs them; see `residual.Residual`. By default 64 where K or V are q4 or q3,
            128 where one is q2, else 0, as with an eviction policy, which cannot have both.
        eviction_policy, kv_budget: one of `EvictionPolicy`, and how many tokens each layer keeps (under PyramidKV: on
            average over the layers; by default all that a window and its sinks count). After each piece of a prompt
            and each step, every layer is held to its budget, and what leaves gives its memory back; see
            `EvictingSequence`. The default `num_blocks` is then what the budget and one piece need, however long
            the text. A block holds tokens of one layer.

    Under `EvictionPolicy.StreamingLLM` a text has no end: distances count within the cache, so that positions may
    pass `max_position_embeddings`, in constant memory and at a constant cost per token. Sinks, window and one piece
    must fit the network's positions: pieces are shorter than `prefill_chunk` where they would not.

    Positions always count the whole text. Once tokens were evicted, `prefill_from_pos` and `decode_step` cannot go
    back behind the first of them: InvalidOperationError.

    Attributes:
        model: the network.
        sampling_params: the defaults of a request.
    """

    def __init__(
        self,
        model: Model,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        *,
        dtype: str = "f32",
        key_dtype: str | None = None,
        value_dtype: str | None = None,
        rotate: bool | str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        prefill_chunk: int = 512,
        residual_length: int | None = None,
        eviction_policy: EvictionPolicy | None = None,
        kv_budget: int | None = None,
    ) -> None:
        self.model = model
        self.sampling_params = _params(sampling_params, SamplingParams())
        block_size = as_count(block_size, "block_size", 1, most=None)
        prefill_chunk = as_count(prefill_chunk, "prefill_chunk", 1, most=None)
        budgets = None
        if eviction_policy is not None or kv_budget is not None:
            budgets = Budgets.of(eviction_policy, kv_budget, model)
        self._budgets = budgets
        endless = budgets is not None and budgets.policy.endless
        positions = None if endless else model.config.max_position_embeddings
        if num_blocks is None and budgets is not None:
            num_blocks = budgets.peak_blocks(block_size, prefill_chunk, model.config.max_position_embeddings)
        elif num_blocks is None:
            tokens = min(model.config.max_position_embeddings, _DEFAULT_TOKENS)
            # One more than they fill: going back by a token may need a copy of the last block.
            num_blocks = -(-tokens // block_size) + 1
        self._cache_options: dict[str, Any] = {
            "num_blocks": as_count(num_blocks, "num_blocks", 1, most=None),
            "block_size": block_size,
            "num_heads": model.config.num_kv_heads,
            "head_dim": model.config.head_dim,
            "num_layers": model.config.num_layers if budgets is None else 1,
            "dtype": dtype,
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "rotate": rotate,
        }
        cache = self._make_cache(**self._cache_options)
        self._sequence: ModelSequence
        if residual_length is None:
            residual_length = default_length(key_dtype or dtype, value_dtype or dtype) if budgets is None else 0
        self._residual_length = residual_length = as_count(residual_length, "residual_length", 0, 256)
        if budgets is None:
            self._sequence = LiveSequence(model, cache, prefill_chunk, residual_length)
        elif residual_length:
            raise ValueError(f"residual_length: expected 0 or none with an eviction_policy, got {residual_length}")
        else:
            self._sequence = EvictingSequence(model, cache, prefill_chunk, budgets)
        self._requests = Requests(self._sequence, positions, seed)
        self._directory: Path | None = None
        self._tokenizer: Any = None

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        **options: Any,
    ) -> InferenceEngine:
        """An engine over a Hugging Face checkpoint directory: Llama, Mistral, Qwen2 or Qwen3.

        Args:
            directory: holds `config.json`, `*.safetensors` and, for `tokenizer`, `tokenizer.json`.
            sampling_params, seed, options: as for the constructor.

        Raises:
            FileNotFoundError: a file is missing.
            CheckpointError: a file is damaged, or names something that is not supported.
        """
        engine = cls(Transformer.from_pretrained(directory), sampling_params, seed, **options)
        engine._directory = Path(directory)
        return engine

    def _make_cache(self, **options: Any) -> PagedKvCache:
        """The one place where the cache is made."""
        return PagedKvCache(**options)

    def reseed(self, seed: int) -> None:
        """Start the random numbers of requests without a seed of their own anew."""
        self._requests.reseed(seed)

    def enlarge(self, blocks: int) -> None:
        """Replace the cache by an empty one of `blocks` more blocks; the sequence starts anew.

        Raises:
            OutOfMemoryError: the system refuses the memory; the old cache stays.
        """
        more = as_count(blocks, "blocks", most=None)
        with self._requests.call:
            total = self.cache.total_blocks + more
            self._sequence.move(self._make_cache(**self._cache_options | {"num_blocks": total}))

    # ---------------------------------------------------------------- what there is

    @property
    def cache(self) -> PagedKvCache:
        """Where keys and values are. The engine owns its sequences 0 and 1; others may live beside them.

        An engine that evicts owns the sequences below `2 * num_layers`: sequence l has what is left of layer l.
        """
        return self._sequence.cache

    @property
    def eviction_policy(self) -> EvictionPolicy | None:
        """Which tokens stay in each layer; None: all."""
        return None if self._budgets is None else self._budgets.policy

    @property
    def kv_budget(self) -> int | None:
        """How many tokens each layer keeps (PyramidKV: on average); None: all."""
        return None if self._budgets is None else self._budgets.kv_budget

    @property
    def residual_length(self) -> int:
        """Tokens per group that its own queries see in full; 0: all are seen as the cache keeps them."""
        return self._residual_length

    def alive_tokens(self, layer: int) -> int:
        """How many tokens' K and V this layer has; `num_tokens` where nothing is evicted.

        Raises:
            TypeError, IndexError: no such layer.
        """
        return len(self.kept_positions(layer))

    def kept_positions(self, layer: int) -> NDArray[np.int64]:
        """The positions in the text of the tokens whose K and V this layer has, ascending, int64 `(n,)`.

        Raises:
            TypeError, IndexError: no such layer.
        """
        layer = as_index(layer, "layer", self.config.num_layers)
        with self._requests.lock:
            return self._sequence.positions(layer)

    @property
    def config(self) -> NetworkConfig:
        """The sizes of the network: `model.config`."""
        return self.model.config

    @property
    def num_tokens(self) -> int:
        """Tokens of the current sequence, evicted or not; the next one stands at this position."""
        return self._sequence.num_tokens

    @property
    def reclaim(self) -> Callable[[OutOfMemoryError], bool] | None:
        """Called with the OutOfMemoryError when the cache has no block for new tokens.

        If it frees some and returns true, the engine tries again; without it, or if it returns false, the
        error is raised.
        """
        return self._sequence.reclaim

    @reclaim.setter
    def reclaim(self, function: Callable[[OutOfMemoryError], bool] | None) -> None:
        self._sequence.reclaim = function

    @property
    def seq_id(self) -> int:
        """The id of the current sequence in `cache`. It changes when a sequence is replaced.

        Raises:
            InvalidOperationError: the engine evicts, so every layer has a sequence of its own.
        """
        return self._sequence.seq_id

    @property
    def version(self) -> int:
        """Counts changes of the current sequence: equal numbers, the same tokens in the same blocks."""
        return self._sequence.version

    @property
    def prefill_token_count(self) -> int:
        """How many tokens have been prefilled, over all requests; failed calls and `score` do not count."""
        return self._requests.num_prefilled

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's `tokenizers.Tokenizer`, loaded at first use; None if it has no `tokenizer.json`.

        Raises:
            ImportError: there is one, and the `tokenizers` package (extra `text`) is not installed.
            CheckpointError: `tokenizer.json` is damaged.
        """
        if self._tokenizer is None and self._directory is not None:
            self._tokenizer = load_tokenizer(self._directory)
        return self._tokenizer

    def __repr__(self) -> str:
        of = self._requests.max_positions or "endless"
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {self.config.num_layers} layers, "
            f"{self._sequence.num_tokens} of {of} positions in use)"
        )

    def check(self) -> None:
        """Verify the invariants of the engine and of its cache; AssertionError names the broken one."""
        with self._requests.lock:
            self.cache.check()
            self._sequence.check()

    # ---------------------------------------------------------------- whole requests

    def generate(self, prompt_tokens: Any, params: SamplingParams | None = None) -> list[int]:
        """Continue a prompt; the new tokens only, without the stop token that ended them.

        The text ends with a stop token, after `max_tokens`, or where the network's positions end (under
        StreamingLLM they do not).

        Args:
            prompt_tokens: at least one token id.
            params: how to sample; by default the engine's `sampling_params`.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or more tokens than positions.
            InvalidOperationError: a stream of this thread is open.
            OutOfMemoryError: the cache is too small.
        """
        tokens = self._requests.prompt(prompt_tokens)
        return list(self._requests.stream(tokens, *self._request(params), whole=True))

    def stream(self, prompt_tokens: Any, params: SamplingParams | None = None) -> Iterator[int]:
        """`generate`, token by token. Arguments are checked now, the prompt is run with the first `next`.

        From its first token to its last, or until it is closed or dropped, the stream has the engine: calls of other
        threads wait for that. On the same thread, a second stream (or `generate`) raises InvalidOperationError, and so
        does the next token of a stream whose sequence another call of that thread has changed. A stream may be
        continued on another thread.
        """
        tokens = self._requests.prompt(prompt_tokens)
        return self._requests.stream(tokens, *self._request(params), whole=False)

    def score(self, tokens: Any) -> Float32:
        """Log-probability of each token after the first, given those before it: float32 `(len(tokens) - 1,)`.

        The mean of their negatives is the log of the perplexity. Starts a new sequence, which then holds all
        tokens but the last. Raises like `generate`.

        An engine that evicts scores with what was alive: tokens leave between pieces of `prefill_chunk`, so within
        a piece each token sees all tokens of the piece before it; `prefill_chunk=1` evicts after every token.
        """
        return self._requests.score(as_tokens(tokens, self.config.vocab_size))

    # ---------------------------------------------------------------- one sequence, step by step

    def reset(self) -> None:
        """Start an empty sequence. `prefill_token_count` goes on counting."""
        with self._requests.call:
            self._sequence.clear()

    def begin(self, share: Share) -> int:
        """Replace the current sequence by one that `share` makes, say of blocks that are there already.

        Args:
            share: called with the cache and the id of the new sequence; creates it and returns how many
                tokens it holds. If it raises, the current sequence stays. The old one is freed after it, so
                call `reset` first where memory is short.

        Returns:
            The number of tokens: the position from which `prefill_from_pos` goes on.

        Raises:
            InvalidOperationError: the engine evicts, so every layer has a sequence of its own.
        """
        with self._requests.call:
            self._sequence.replace(share)
            return self._sequence.num_tokens

    def prefill_from_pos(self, tokens: Any, pos: int) -> Float32:
        """Run tokens through the network at positions `pos`, `pos + 1`, ...; in chunks of `prefill_chunk`.

        Args:
            tokens: at least one token id.
            pos: at most `num_tokens`. If less, the sequence is cut there first.

        Returns:
            float32 logits `(vocab_size,)` after the last token.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or a position that does not exist.
            InvalidOperationError: `pos` is behind tokens that were evicted.
            OutOfMemoryError: the cache cannot hold them; found before anything is computed (by an engine that
                evicts: before the piece that does not fit).

        A failing call leaves the sequence as it was. Where the cache cannot hold the new tokens beside those from
        `pos` on, it leaves the tokens before `pos`.
        """
        tokens, pos = as_tokens(tokens, self.config.vocab_size), as_count(pos, "pos")
        with self._requests.call:
            return self._requests.prefill(tokens, pos)

    def decode_step(self, token: int, pos: int) -> Float32:
        """Run one token at position `pos`: `prefill_from_pos` of one token, but not counted as prefill."""
        tokens, pos = as_tokens((token,), self.config.vocab_size), as_count(pos, "pos")
        with self._requests.call:
            return self._requests.extend(tokens, pos)

    def decode(self, logits: Float32, params: SamplingParams | None = None, history: Any = ()) -> Iterator[int]:
        """Sample from `logits`, run the token, sample again: the loop of every request, after its prefill.

        A token enters the cache when the one after it is asked for; the last one does not, so that in the end
        `num_tokens` counts the prompt and all new tokens but one (all of them where a stop token ended it).

        Args:
            logits: `(vocab_size,)`, what `prefill_from_pos` or `decode_step` returned.
            params: how to sample; by default the engine's `sampling_params`.
            history: the tokens so far, which the repetition penalty counts.

        Returns:
            An iterator of new tokens, without the stop token: a stream as that of `stream`. Raises
            InvalidOperationError if another call has changed the sequence meanwhile.
        """
        version, history = self.version, as_tokens(history, self.config.vocab_size)
        return self._requests.decode_in_turn(version, logits, *self._request(params), history)

    def _request(self, params: SamplingParams | None) -> tuple[SamplingParams, np.random.Generator]:
        """The parameters and the random numbers of a request, which is counted here."""
        params = _params(params, self.sampling_params)
        return params, self._requests.randomness(params)


def _params(params: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    if params is None:
        return default
    return as_instance(params, SamplingParams, "params")
