"""The inference engine: a network, its cache, and the loop from a prompt to new tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.layer_formats import is_mixed
from kvcache.core.memory import total
from kvcache.drafts.draft_pace import MOST_DRAFTS
from kvcache.drafts.sources import DraftSources
from kvcache.engine.chat import Answer
from kvcache.engine.completion import Completion, Request
from kvcache.engine.compression import compressed
from kvcache.engine.current import CurrentText, Share
from kvcache.engine.documents import LINK, NO_DOCUMENTS, Documents
from kvcache.engine.network_engine import NetworkEngine
from kvcache.engine.opening import open_drafts
from kvcache.engine.requests import Requests
from kvcache.engine.text_rows import TextRows
from kvcache.engine.vectors import Vectors
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.eviction import EvictionPolicy
from kvcache.networks.protocols import Float32, Model
from kvcache.networks.tokens import as_tokens
from kvcache.paged.cache import PagedKvCache
from kvcache.sampling.sampling import SamplingParams
from kvcache.sampling.text_tokens import encoded
from kvcache.sampling.tokenizer import CheckpointText, GgufText
from kvcache.support.arguments import as_count, as_finite, as_floats, as_index
from kvcache.support.copies import refuse_copies
from kvcache.support.exclusions import expect
from kvcache.texts.behind import Behind
from kvcache.texts.compressed_prefix import CompressedPrefix, Storing
from kvcache.texts.kv_settings import Options, Settings, with_options
from kvcache.texts.policy import Policy
from kvcache.texts.prefix_policy import PrefixPolicy
from kvcache.texts.settings import CacheSettings, Load
from kvcache.texts.text_adapter import TextAdapter

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Unpack

__all__ = ["InferenceEngine"]


class InferenceEngine(NetworkEngine):
    """Runs one sequence at a time through a network and stores its keys and values in a `PagedKvCache`.

    `generate`, `stream` and `score` start a new sequence; `prefill_from_pos` and `decode_step` extend the current one.
    Calls are serialised, so threads may share an engine.

    Failing calls are atomic: `prefill_from_pos`, `decode_step` and `begin` leave the sequence unchanged, except when
    `prefill_from_pos` has no memory for both the old tokens and the new ones (see there). `generate`, `stream` and
    `score` check their arguments, then free the old sequence, since two would need twice the memory. A later failure
    (memory, the network) leaves an empty sequence after `generate` and `score`, the delivered tokens after `stream`.

    Args:
        model: a `Transformer`, or anything with the `Model` protocol.
        sampling_params: the default for requests without `params`.
        seed: a request without its own seed derives one from this and the number of earlier requests.
        settings, options: how K and V are stored, see `Settings`; its attributes are keywords too.
        prefill_chunk: prompts run through the network in pieces of at most this many tokens, cut at its multiples.
        draft, draft_tokens: as of `BatchEngine`, but None by default, and with an `eviction_policy`. Tokens that were
            drawn from one pass are in the cache when the first of them is given.
        adapters: as `load_adapter` takes them, by name.

    Under `EvictionPolicy.StreamingLLM` the length of a text is not limited: distances count within the cache, so
    positions may exceed `max_position_embeddings`, in constant memory and at a constant cost per token. Sinks, window
    and one piece must fit the network's positions: pieces are shorter than `prefill_chunk` where they would not.

    Layers with a sliding window keep it, and 64 tokens before it or more, in caches of their own; `memory` counts them.
    A position whose window has left is an InvalidOperationError; a text may always begin again at position 0. Where
    angles depend on the length of the text (longrope), a text that crosses the border runs again from its start.

    Positions always count the whole text. After an eviction, `prefill_from_pos` and `decode_step` cannot go back to a
    position after the first evicted token: InvalidOperationError.

    Attributes:
        model: the network.
        sampling_params: the defaults of a request.
        adapters: a mapping from names to each `Adapter`.
    """

    @with_options
    def __init__(
        self,
        model: Model,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        *,
        settings: Settings | None = None,
        prefill_chunk: int = 512,
        draft: Any = None,
        draft_tokens: int = MOST_DRAFTS,
        adapters: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, sampling_params, adapters=adapters)
        prefill_chunk = as_count(prefill_chunk, "prefill_chunk", 1, most=None)
        draft_tokens = as_count(draft_tokens, "draft_tokens", 1, 16)
        load, given = Load(0, prefill_chunk, draft_tokens), Settings.of(settings, options)
        sources = DraftSources(open_drafts(draft), model, load, as_count(given.block_size, "block_size", 1, most=None))
        checked = CacheSettings.of(model, load, given, self._make_cache)
        self._budgets = checked.budgets
        expect("draft", None if sources.is_empty else draft, checked.features)
        self._settings = sources.split(checked)
        self._sequence = CurrentText(self._settings, self._settings.total_blocks())
        # Internal: a `PrefixCachedEngine` runs its own by it too.
        self.requests = Requests(self._sequence, seed, sources, draft_tokens)

    def _set_text(self, text: CheckpointText | GgufText) -> None:
        self.requests.text = text

    def _make_cache(self, **options: Any) -> PagedKvCache:
        """Make a cache; the constructor and `enlarge` call this."""
        return PagedKvCache(**options)

    def reseed(self, seed: int) -> None:
        """Restart the random numbers of requests without their own seed."""
        self.requests.new.reseed(seed)

    def enlarge(self, blocks: int) -> None:
        """Replace the cache by an empty one with `blocks` more; a `PrefixCachedEngine` over the old one then raises.

        Raises:
            OutOfMemoryError: the system refuses the memory; the old cache is kept.
        """
        self.requests.enlarge(as_count(blocks, "blocks", most=None))

    # ---------------------------------------------------------------- state

    @property
    def cache(self) -> PagedKvCache:
        """The cache of keys and values, of the layers that keep all tokens, in their order.

        Its sequences 0 and 1 belong to the engine; callers may use other ids.
        In an engine that evicts, the ids below `2 * num_layers` belong to it: sequence l holds layer l's survivors.
        Where a policy chooses per head, a sequence and a layer of the cache are a KV head of a layer: `l * heads + h`.
        """
        return self._sequence.cache

    @property
    def eviction_policy(self) -> EvictionPolicy | Policy | None:
        """The policy that chooses the tokens each layer keeps; None: all tokens are kept."""
        return None if self._budgets is None else self._budgets.policy

    @property
    def kv_budget(self) -> int | None:
        """The number of tokens each layer keeps (PyramidKV: on average); None: all tokens are kept."""
        return None if self._budgets is None else self._budgets.kv_budget

    @property
    def residual_length(self) -> int:
        """Tokens per group of the residual; 0: queries read all tokens as the cache stores them."""
        return self._settings.storage.residual_length

    @property
    def sparse_tokens(self) -> int | None:
        """`top_tokens` of the attention of `PagedKvCache`; None: queries attend to all tokens."""
        return self._settings.sparse_tokens

    @property
    def storage(self) -> dict[str, Any]:
        """The arguments of engines that say how K and V are stored, as this one has them; the sizes are left out."""
        storage = self._settings.storage
        return {
            "key_dtype": storage.formats[0], "value_dtype": storage.formats[1], "rotate": self._settings.rotate,
            "residual_length": storage.residual_length, "calibrate": storage.calibration or False,
            "sparse_tokens": self.sparse_tokens,
        }

    def alive_tokens(self, layer: int, head: int | None = None) -> int:
        """The number of tokens whose K and V this layer has; `num_tokens` without eviction.

        Args:
            head: of the KV heads, which differ under a policy that chooses per head; None: any of them.

        Raises:
            TypeError, IndexError: no such layer or head.
        """
        return len(self.kept_positions(layer, head))

    def kept_positions(self, layer: int, head: int | None = None) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V this layer has, ascending, int64 `(n,)`.

        Args:
            head: of the KV heads, which differ under a policy that chooses per head; None: any of them.

        Raises:
            TypeError, IndexError: no such layer or head.
        """
        layer = as_index(layer, "layer", self.config.num_layers)
        head = None if head is None else as_index(head, "head", self.config.num_kv_heads)
        with self.requests.lock:
            return self._sequence.positions(layer, head)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the current sequence, evicted ones included: the position of the next token.

        Draft tokens that were drawn count before a stream gives them, until it is closed.
        """
        return self._sequence.num_tokens

    @property
    def reclaim(self) -> Callable[[OutOfMemoryError], bool] | None:
        """A function that is called with the OutOfMemoryError when the cache has no block for new tokens.

        If it returns true, because it freed some, the engine tries again. If it is None or returns false, the error
        is raised.
        """
        return self._sequence.reclaim

    @reclaim.setter
    def reclaim(self, function: Callable[[OutOfMemoryError], bool] | None) -> None:
        self._sequence.reclaim = function

    @property
    def seq_id(self) -> int:
        """The id of the current sequence in `cache`. It changes when a sequence is replaced.

        Raises:
            InvalidOperationError: the engine evicts, so each layer has its own sequence.
        """
        self._expect_one_sequence()
        return self._sequence.text.seq_id

    def _expect_one_sequence(self) -> None:
        if self._budgets is not None:
            raise InvalidOperationError("an engine that evicts has one sequence per layer: layer l is sequence l")

    @property
    def version(self) -> int:
        """A counter of changes of the current sequence: an equal number means the same tokens in the same blocks."""
        return self._sequence.version

    @property
    def prefill_token_count(self) -> int:
        """The number of tokens prefilled by all requests so far; failed calls and `score` do not count."""
        return self.requests.num_prefilled

    def _checkpoint(self) -> CheckpointText | GgufText | None:
        return self.requests.text

    def _limits(self) -> tuple[Collection[str], int | None]:
        return self._settings.features, self.requests.max_positions

    def vectors(self) -> Vectors:
        """See `ChatEngine`."""
        expect("embed", self.eviction_policy, self._settings.features)
        return Vectors(self.model, self.requests.text, self.requests.max_positions)

    def _read(self, readings: Sequence[TextRows], progress: Callable[[int, int], object] | None) -> None:
        self.requests.read(readings, progress)

    def memory(self) -> dict[str, int]:
        """Bytes: "weights" (0: the model does not say), "kv" (cache, residual), "bookkeeping", "scratch", "huge"."""
        weights, current = getattr(self.model, "weights", None), self._sequence
        products = {"scratch": getattr(weights, "scratch_bytes", 0), "huge": getattr(weights, "huge_bytes", 0)}
        read = getattr(weights, "nbytes", 0) + self.adapters.nbytes
        own = {"weights": read, **total(current.pool.memory([current.text]), products)}
        drafter = self.requests.drafter
        return own if drafter is None else total(own, drafter.memory())

    __reduce_ex__ = refuse_copies("make another one over the same `model`")

    def __repr__(self) -> str:
        of = self.requests.max_positions or "endless"
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {self.config.num_layers} layers, "
            f"{self._sequence.num_tokens} of {of} positions in use)"
        )

    def check(self) -> None:
        """Verify the invariants of the engine and of its cache; AssertionError names the broken one."""
        with self.requests.lock:
            self._sequence.check()

    # ---------------------------------------------------------------- whole requests

    def complete(
        self, prompt: Any, params: SamplingParams | None = None, *, prefix: Behind | None = None,
        head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK, adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """Continue a prompt: the new tokens, their text and why it ended; log-probabilities if `params` asks for them.

        It ends at a stop token or string, after `max_tokens`, or at the last position (StreamingLLM has none).

        Args:
            prompt: at least one token id; or a text, if the engine has a tokenizer.
            params: how to sample; by default the engine's `sampling_params`.
            prefix: what `compress` made of a text before the prompt, whose tokens the prompt does not repeat; or a
                `SeenParts`.
            head: the text before segments, or token ids: a system prompt.
            segments: documents between the head and the prompt, each a `Segment`, a text or token ids. Each sees the
                head and itself alone, and the prompt sees all, at positions behind all: another answer than that of one
                text.
            link: this many first tokens of each segment but the first run again in place, and see all before them.
            adapter: the name of one of `adapters`; None: the network alone. An activated one changes the prompt from
                its last invocation on.
            sampling: attributes of `SamplingParams`, in place of those of `params`: `complete(text, max_tokens=8)`.

        Raises:
            TypeError: no such attribute.
            ValueError: an empty prompt, an id outside the vocabulary, or more tokens than positions; a prefix of
                another network, with an adapter, or with an eviction policy; no such adapter, or no invocation of it.
            InvalidOperationError: this thread has an open stream of this engine; the adapter was unloaded meanwhile.
            OutOfMemoryError: the cache is too small.
        """
        documents = Documents(head, segments, link)
        request = self._request(prompt, params, sampling, documents, adapter, with_text=True, prefix=prefix)
        return request.complete(self.requests.stream(request, whole=True))

    def generate(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, prefix: Behind | None = None,
        head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK, adapter: str | None = None,
        **sampling: Any,
    ) -> list[int]:
        """Do what `complete` does, and return the new tokens alone."""
        documents = Documents(head, segments, link)
        request = self._request(prompt_tokens, params, sampling, documents, adapter, prefix=prefix)
        return list(self.requests.stream(request, whole=True))

    def stream(
        self, prompt_tokens: Any, params: SamplingParams | None = None, *, prefix: Behind | None = None,
        head: Any = None, segments: Iterable[Any] | None = None, link: int = LINK, adapter: str | None = None,
        **sampling: Any,
    ) -> Iterator[int]:
        """Do what `generate` does, token by token: check the arguments now, run the prompt at the first `next`.

        From its first token to its last, or until it is closed or dropped, a stream has exclusive use of the engine:
        calls of other threads wait. On the same thread, a second stream (or `generate`) raises InvalidOperationError.
        So does the next token of a stream if another call of that thread has changed the sequence. A stream may be
        continued on another thread.
        """
        documents = Documents(head, segments, link)
        request = self._request(prompt_tokens, params, sampling, documents, adapter, prefix=prefix)
        return self.requests.stream(request, whole=False)

    def chat(
        self, messages: Any, params: SamplingParams | None = None, *, tools: Any = None, template: Any = None,
        edits: Any = None, adapter: str | None = None, segments: Iterable[Any] | None = None, link: int = LINK,
        **sampling: Any,
    ) -> Answer:
        """Answer a conversation: an iterator of pieces of text, which `stream` computes token by token.

        Arguments and errors are those of `chat_prompt` and `complete`; they are checked now.
        """
        found = self.chat_prompt(messages, edits, tools=tools, template=template, segments=segments, link=link)
        request = self._request(
            found.tokens, params, sampling, adapter=adapter, with_text=True, prefix=found.prefix
        )
        return Answer(request, self.requests.stream(request, whole=False), found)

    def score(self, tokens: Any, *, prefix: Behind | None = None, adapter: str | None = None) -> Float32:
        """Log-probability of each token after the first, given the tokens before it: float32 `(len(tokens) - 1,)`.

        Behind a `prefix` they are given that too; `adapter` as of `complete`.

        The mean of the negatives is the log of the perplexity. Starts a new sequence, which holds all tokens but the
        last afterwards. Raises like `generate`.

        An engine that evicts does so between pieces of `prefill_chunk` tokens: within a piece each token sees the
        survivors and all earlier tokens of the piece. `prefill_chunk=1` evicts after every token.
        """
        prefix, loaded = self._settings.expect(prefix, adapter), self.adapters.find(adapter)
        return self.requests.score(as_tokens(tokens, self.config.vocab_size), prefix, loaded)

    # ---------------------------------------------------------------- one sequence, step by step

    def reset(self, prefix: Behind | None = None, *, adapter: str | None = None) -> None:
        """Start an empty sequence, perhaps behind a prefix. `prefill_token_count` is not reset.

        Behind a prefix the first position is `prefix.num_tokens`, and `prefill_from_pos` goes back no further. A
        sequence keeps its adapter, that of the request that began it too, until another one begins.

        Args:
            adapter: as of `complete`; not an activated one, whose invocation is not known yet.
        """
        self._settings.expect(prefix, adapter)
        own = TextAdapter.of(self.adapters.find(adapter), np.empty(0, np.uint32))
        with self.requests.call:
            self._sequence.clear(prefix, adapter=own)

    def begin(self, share: Share) -> int:
        """Replace the current sequence by one that `share` creates, for example from blocks of another sequence.

        Args:
            share: called with the cache and the id of the new sequence; creates that sequence and returns its number
                of tokens. If it raises, the current sequence is kept. The old sequence is freed after `share` returns,
                so call `reset` first if memory is short.

        Returns:
            The number of tokens: the position at which `prefill_from_pos` continues.

        Raises:
            InvalidOperationError: the engine evicts, so each layer has its own sequence.
        """
        self._expect_one_sequence()
        with self.requests.call:
            self._sequence.replace(share)
            return self._sequence.num_tokens

    def prefill_from_pos(self, tokens: Any, pos: int) -> Float32:
        """Run tokens through the network at positions `pos`, `pos + 1`, ..., in pieces of `prefill_chunk`.

        Args:
            tokens: at least one token id.
            pos: at most `num_tokens`. If it is less, the sequence is first cut to `pos` tokens.

        Returns:
            float32 logits `(vocab_size,)` after the last token.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or a position that does not exist.
            InvalidOperationError: a token before `pos` was evicted, and `pos` is not the end.
            OutOfMemoryError: the cache cannot hold the tokens; raised before anything is computed (in an engine that
                evicts: before the piece that does not fit).

        A failing call leaves the sequence unchanged. Only if the cache cannot hold both the new tokens and the old ones
        from `pos` on does it leave just the tokens before `pos`. A text that crosses the border of longrope runs again
        from its start: where the cache cannot hold it twice, a failing call leaves an empty sequence.

        Layers that keep a state have that after the last token, and those in a prefix cache: the tokens between the
        nearest of them and `pos` run again. After a failing call the text does too.

        With a residual, tokens of a group are packed once the next group begins. A step back into such a group, but not
        to its beginning, reads them packed, so its logits differ from those of a text that ran in one piece. So do the
        next logits after a failing call of several pieces, where the cache had no block left for a copy.
        """
        tokens, pos = as_tokens(tokens, self.config.vocab_size), as_count(pos, "pos")
        with self.requests.call:
            return self.requests.prefill(tokens, pos)

    def decode_step(self, token: int, pos: int) -> Float32:
        """Run one token at position `pos`, as `prefill_from_pos` does, without counting it as prefill."""
        tokens, pos = as_tokens((token,), self.config.vocab_size), as_count(pos, "pos")
        with self.requests.call:
            return self.requests.extend(tokens, pos)

    def decode(self, logits: Float32, params: SamplingParams | None = None, history: Any = ()) -> Iterator[int]:
        """Sample from `logits`, run the token, sample again: the loop of every request after its prefill.

        A token enters the cache when the next one is requested. The last token does not enter it: at the end
        `num_tokens` counts the prompt and all new tokens but one (all of them if a stop token ended the text).

        Args:
            logits: `(vocab_size,)`, the result of `prefill_from_pos` or `decode_step`.
            params: how to sample; by default the engine's `sampling_params`.
            history: the tokens so far, for the sampling.

        Returns:
            An iterator of new tokens, without the stop token, with the rules of `stream`. It raises
            InvalidOperationError if another call has changed the sequence.
        """
        version, logits = self.version, as_floats(logits, (self.config.vocab_size,), "logits")
        return self.requests.decode_in_turn(version, logits, self._request(history, params, {}, is_history=True))

    # ---------------------------------------------------------------- prefixes

    def compress(
        self, prompt: Any, policy: Policy | PrefixPolicy, *, ratio: float = 0.25, dtype: str | None = None
    ) -> CompressedPrefix:
        """Run a prompt, and make a prefix of what a policy keeps of its K and V: other tokens in each KV head.

        Texts behind it (`complete(..., prefix=)`, also of other engines over this network) are not those behind the
        whole prompt. They depend on the prefix and on their own tokens alone, in any batch and any pieces. The current
        sequence is replaced by an empty one.

        Args:
            prompt: at least one token id; or a text, if the engine has a tokenizer.
            policy: `kvcache.policies.KVzip()`, or an object with the protocol of `Policy`, such as
                `ExpectedAttention(per_head=True)`, which chooses once, after the last token.
            ratio: the share of the tokens that stays, above 0 and up to 1; at least one.
            dtype: the format that stores them, see `PagedKvCache`; by default those of the engine.

        Raises:
            TypeError: no such policy.
            ValueError: as `complete`; a ratio out of range; an engine that evicts, or whose queries choose tokens;
                layers with a window, with a state or with other sizes; positions that depend on the length of the
                text; formats that differ between layers, without `dtype`; more tokens than positions, those that the
                policy adds counted.
            OutOfMemoryError: the cache is too small for the prompt and what the policy adds.
        """
        tokens = self.requests.new.prompt(prompt)
        share, storage = as_finite(ratio, "ratio", 0.0, 1.0, above=True), self._settings.storage
        formats = storage.formats if dtype is None else (dtype, dtype)
        if dtype is None and any(map(is_mixed, storage.dtypes)):
            raise ValueError(f"dtype: expected a format for an engine that has several, got {dtype}")
        storing = Storing(*formats, self._settings.rotate, self._settings.block_size, storage.calibration)
        with self.requests.call:
            return compressed(
                self._sequence, tokens, policy, max(1, int(len(tokens) * share)), self._encode, storing
            )

    def load_compressed(self, path: str | PathLike[str], *, exact: bool = True) -> CompressedPrefix:
        """Read the file of a prefix that an engine over the same network and with the same calibration compressed.

        Args:
            exact: as of `CompressedPrefix.load`.

        Raises:
            SnapshotError: of another network, calibration or version of bits; damaged.
            TypeError, OSError: as `CompressedPrefix.load`.
        """
        return CompressedPrefix.load(path, self.model, self._settings.storage.calibration, exact=exact)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("policy: expected one with token ids, since the engine has no tokenizer, got texts")
        return encoded(self.tokenizer, text, "policy", add_special_tokens=False)

    def _request(
        self, prompt: Any, params: SamplingParams | None, sampling: dict[str, Any], documents: Documents = NO_DOCUMENTS,
        adapter: str | None = None, *, prefix: Behind | None = None, **options: Any,
    ) -> Request:
        loaded, features = self.adapters.find(adapter), () if adapter is None else ("adapter",)
        placed = self.requests.new.placed(prompt, prefix, documents, features)
        self._settings.expect(placed.prefix, adapter, self.requests.new.features)
        params = self.sampling_params if params is None else params
        return self.requests.request(placed.prompt, params, sampling, placed=placed, adapter=loaded, **options)
