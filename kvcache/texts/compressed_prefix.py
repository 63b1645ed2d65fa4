"""`CompressedPrefix`: K and V of the tokens of a prefix that a policy keeps, other ones in each KV head.

    layer 0, head 0    0  .  .  3  4  .  .  .  8      a sequence of its own, in blocks of one head
    layer 0, head 1    0  1  .  .  .  .  .  7  8
    a text behind it                             9 10 11 12     in the cache of its engine, as of any other text

A text behind it keeps all of its own tokens. Each of its queries sees all that a head has of the prefix, and the tokens
of its own text up to itself: two parts of a context, attended apart and merged by their log-sum-exps. So the bits of a
text depend on the compressed prefix and on the text alone, as those of other texts do, and cached blocks of such texts
have a namespace of their own, which the bytes of the prefix name.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.core.calibration import Calibration
from kvcache.errors import SnapshotError
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.model import Transformer
from kvcache.networks.protocols import Float32, LayerAttention, Model, cached_sizes, layer_attention
from kvcache.paged.cache import PagedKvCache
from kvcache.saved.file_tables import Arena
from kvcache.saved.segments import Segments
from kvcache.saved.snapshot import Snapshot, write_snapshot
from kvcache.support.arguments import as_index
from kvcache.support.copies import refuse_copies
from kvcache.texts.behind import NO_PLACES, space_behind

__all__ = ["CompressedPrefix", "Storing"]

Int64 = NDArray[np.int64]
Tokens = NDArray[np.uint32]
Kept = Sequence[Sequence[Int64]]
_FILLING = 2**32 - 1  # no position: fills the last block of a list
_PAGE = 256  # tokens of the prefix in a page of a file, which has no bytes beside them


class Storing(NamedTuple):
    """How K and V of a compressed prefix are stored; see `PagedKvCache`."""

    key_dtype: Any
    value_dtype: Any
    rotate: bool | str = "auto"
    block_size: int = 16
    calibration: Calibration | None = None

    def make_cache(self, model: Model, num_blocks: int) -> PagedKvCache:
        """Make a cache in which each KV head of each layer has a sequence of its own.

        Raises:
            TypeError, ValueError: no such formats or sizes.
            OutOfMemoryError: the system refuses the memory.
        """
        known, (heads, dim) = self.calibration, cached_sizes(model)
        return PagedKvCache(
            num_blocks, self.block_size, 1, dim, num_layers=model.config.num_layers * heads,
            separate_layers=True, key_dtype=self.key_dtype, value_dtype=self.value_dtype, rotate=self.rotate,
            calibration=None if known is None else known.by_head(),
        )

    @property
    def suffix(self) -> str:
        """The part of a name that says what rows mean, beside the network and the library's formats."""
        return "" if self.calibration is None else f" calibrated {self.calibration.fingerprint}"


class CompressedPrefix:
    """K and V of what stays of a prefix; it never changes. `InferenceEngine.compress` and `load_compressed` make one.

    Engines of any kind over the same network take it as `prefix=`. Its memory is its own, beside that of engines.

    Args:
        model: the network.
        tokens: of the prefix, `(n,)`.
        kept: for each layer and KV head the positions that stay, ascending, `(m,)`.
        whole_bytes: the bytes of K and V of all tokens.
        storing: how K and V are stored.

    Attributes:
        tokens: those of the prefix, uint32 `(n,)`.
        whole_nbytes: the bytes of K and V that all tokens took before.
        exact: whether K and V have the bits of this version. What is computed behind them is named by them, so that
            texts behind a prefix of before may be cached and shared.
        places, parts, sinces, offsets, gaps: see `Behind`; none.
    """

    places: Int64 = NO_PLACES
    sinces: Int64 = NO_PLACES
    offsets: Int64 = NO_PLACES
    parts: tuple[()] = ()
    gaps: tuple[()] = ()

    def __init__(self, model: Model, tokens: Tokens, kept: Kept, whole_bytes: int, storing: Storing) -> None:
        self.tokens, self.whole_nbytes, self._model, self._storing = tokens, whole_bytes, model, storing
        self._kept = [[np.asarray(each, np.int64) for each in layer] for layer in kept]
        self._options = [_without_sinks(each) for each in layer_attention(model)]
        self._known: list[Model] = [model]
        counts = np.array([len(each) for layer in self._kept for each in layer])
        self.cache = storing.make_cache(model, int((-(-counts // storing.block_size)).sum()))
        self.cache.allocate_batch(np.arange(len(counts)), counts)
        self.tokens.flags.writeable = False
        self._name: bytes | None = None
        self.exact = True

    def write(self, layer: int, keys: Float32, values: Float32) -> None:
        """Store what stays of the K and V of a layer, `(n, num_kv_heads, head_dim)`, of all tokens."""
        for head, kept in enumerate(self._kept[layer]):
            if len(kept):
                number = layer * len(self._kept[layer]) + head
                self.cache.write(number, number, keys[kept, head, None], values[kept, head, None])

    # -- what it has ----------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix: the position of the first one behind it."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.cache.total_memory_bytes

    @property
    def name(self) -> bytes:
        """A hash of all that texts behind it depend on, 20 bytes."""
        if self._name is None:
            digest = blake2b(self.tokens.tobytes(), digest_size=20, person=b"compressed")
            digest.update(repr((self._arenas()[0], self._storing.suffix)).encode())
            for each in [positions for layer in self._kept for positions in layer]:
                digest.update(len(each).to_bytes(8, "little") + each.tobytes())
            digest.update(self.cache.blocks.store.raw(0).data)
            self._name = digest.digest()
        return self._name

    def space(self, namespace: Hashable) -> Hashable:
        """The namespace of cached blocks of the texts behind it."""
        return space_behind(self.name, namespace)

    def positions(self, layer: int, head: int | None = None) -> Int64:
        """The positions that a KV head of a layer has, ascending, int64 `(m,)`; None: any head.

        Raises:
            TypeError, IndexError: no such layer or head.
        """
        each = self._kept[as_index(layer, "layer", len(self._kept))]
        return np.unique(np.concatenate(each)) if head is None else each[as_index(head, "head", len(each))].copy()

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        beside = self.tokens.nbytes + sum(each.nbytes for layer in self._kept for each in layer)
        found = self.cache.memory()
        return found | {"bookkeeping": found["bookkeeping"] + beside}

    def expect(self, model: Model) -> None:
        """Raise ValueError unless it is of this network."""
        if any(model is each for each in self._known):
            return
        transformers = isinstance(model, Transformer) and isinstance(self._model, Transformer)
        if not transformers or fingerprint(model) != fingerprint(self._model):
            raise ValueError(f"prefix: expected one of this engine's network, got {self!r} of another one")
        self._known.append(model)

    # -- attention ------------------------------------------------------------------------------------------

    def attend(self, layer: int, queries: Float32) -> tuple[Float32, Float32]:
        """Attention of queries behind the prefix over what a layer has of it.

        Args:
            queries: `(n, num_heads, head_dim)`.

        Returns:
            Outputs, float32 `(n, num_heads, head_dim)`, and log-sum-exps, float32 `(n, num_heads)`.
        """
        count, heads = np.array([len(queries)]), len(self._kept[layer])
        group, outputs, masses = queries.shape[1] // heads, [], []
        for head in range(heads):
            number = layer * heads + head
            output, mass = self.cache.attention(
                number, queries[:, head * group : (head + 1) * group], np.array([number], np.uint64),
                query_lens=count, causal=False, return_lse=True, **self._options[layer],
            )
            outputs.append(output)
            masses.append(mass)
        return np.concatenate(outputs, axis=1), np.concatenate(masses, axis=1)

    # -- files ----------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which `InferenceEngine.load_compressed` reads; on failure an old file stays.

        Raises:
            TypeError: the network is no `Transformer`, and has no name.
            OSError: an error of the file system.
        """
        model, size = fingerprint(self._model) + self._storing.suffix, self.cache.block_size
        lists = [(i, each) for i, each in enumerate(each for layer in self._kept for each in layer) if len(each)]
        padded = [_padded(each, size) for _, each in lists]
        names: list[tuple[int, Hashable]] = [(1, self.whole_nbytes), *[(0, i) for i, _ in lists]]
        segments = Segments(
            np.arange(len(names)), np.full(len(names), -1), np.array([self.num_tokens, *map(len, padded)]),
            np.zeros(len(names), bool), np.concatenate([self.tokens, *padded]),
        )
        raw = self.cache.blocks.store.raw(0)
        blocks = self.cache.block_table(np.array([i for i, _ in lists], np.uint64)).block_ids.tolist()

        def pages(arena: int) -> Iterable[Sequence[Any]]:
            return ([raw[block]] for block in blocks) if arena == 0 else ([] for _ in range(0, self.num_tokens, _PAGE))

        write_snapshot(path, "prefix", model, self._arenas(), names, segments, pages, exact=self.exact)

    def _arenas(self) -> list[Arena]:
        store = self.cache.blocks.store
        key, value = str(store.key_dtype), str(store.value_dtype)
        own = store.num_heads, store.head_dim, store.value_head_dim, key, value, *store.rotated, "blocks"
        return [Arena(1, *own, store.block_size, store.block_bytes), Arena(0, *own, _PAGE, 0)]

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Model, calibration: Calibration | None = None, *, exact: bool = True
    ) -> CompressedPrefix:
        """Read a file that `save` wrote.

        Args:
            model: the network.
            calibration: of its keys, that of the engine that compressed the prefix; None: it had none.
            exact: False takes a file of another version of bits too; the attribute `exact` is False then.

        Raises:
            SnapshotError: the file is damaged, of another kind or version, of another version of bits, or of another
                network or calibration.
            OSError: it cannot be read.
            TypeError: the network is no `Transformer`.
        """
        suffix = Storing("", "", calibration=calibration).suffix
        snapshot = Snapshot(path, "prefix", fingerprint(model) + suffix, exact=exact)
        try:
            return cls._of(snapshot, model, calibration)
        except SnapshotError as error:
            raise SnapshotError(f"{snapshot.path}: {error}") from error

    @classmethod
    def _of(cls, snapshot: Snapshot, model: Model, calibration: Calibration | None) -> CompressedPrefix:
        config, segments = model.config, snapshot.segments
        heads, starts = config.num_kv_heads, np.cumsum([0, *segments.lengths])
        texts = [segments.tokens[start:stop] for start, stop in pairwise(starts.tolist())]
        names = [snapshot.names[int(space)] for space in segments.namespaces]
        owners = snapshot.arena_of[segments.namespaces]
        numbers = [each for each in names[1:] if isinstance(each, int)]
        ordered = sorted(set(numbers)) == numbers and all(0 <= each < config.num_layers * heads for each in numbers)
        well = len(snapshot.arenas) == 2 and len(names) > 1 and ordered and len(numbers) == len(names) - 1
        if not well or owners.tolist() != [1] + [0] * len(numbers) or type(names[0]) is not int:
            raise SnapshotError("arenas: expected the tokens of a prefix and what heads have of it, got others")
        tokens, arena = texts[0].astype(np.uint32), snapshot.arenas[0]
        if int(tokens.max()) >= config.vocab_size or len(tokens) > config.max_position_embeddings:
            raise SnapshotError("tokens: expected those of this network, got others")
        kept = [[np.empty(0, np.int64)] * heads for _ in range(config.num_layers)]
        for number, text in zip(numbers, texts[1:], strict=True):
            kept[number // heads][number % heads] = _positions(text, arena.page_tokens, len(tokens))
        rotate = arena.rotate_keys or arena.rotate_values
        storing = Storing(arena.key_dtype, arena.value_dtype, rotate, arena.page_tokens, calibration)
        try:
            prefix = cls(model, tokens, kept, int(names[0]), storing)
        except (TypeError, ValueError) as error:
            raise SnapshotError(f"formats: expected those of this library, got others: {error}") from error
        for want, got in zip(prefix._arenas(), snapshot.arenas, strict=True):
            want.expect(got)
        store, blocks = prefix.cache.blocks.store, prefix.cache.block_table(np.array(numbers, np.uint64)).block_ids
        pages = snapshot.read_pages(0, range(len(blocks)), [store.overwrite(block) for block in blocks.tolist()])
        if not pages.all():
            raise SnapshotError(f"pages: expected whole ones, got page {int(pages.argmin())} damaged")
        prefix.exact = snapshot.exact
        return prefix

    __reduce_ex__ = refuse_copies("`save` writes it to a file")

    def __repr__(self) -> str:
        share = sum(len(each) for layer in self._kept for each in layer) / sum(map(len, self._kept)) / self.num_tokens
        return (
            f"{type(self).__name__}({self.num_tokens} tokens, {share:.0%} of them in a head on average, "
            f"{self.nbytes} bytes of {self.whole_nbytes})"
        )


def _without_sinks(attention: LayerAttention | None) -> dict[str, Any]:
    """The options of attention of a layer, but for sinks, which join the softmax once, with the text."""
    options = {} if attention is None else attention.options()
    options.pop("sinks", None)
    return options


def _padded(positions: Int64, size: int) -> Tokens:
    """Positions, and behind them what fills their last block."""
    whole = np.full(-(-len(positions) // size) * size, _FILLING, np.uint32)
    whole[: len(positions)] = positions
    return whole


def _positions(padded: Tokens, size: int, num_tokens: int) -> Int64:
    """The inverse of `_padded`, of positions below `num_tokens`. SnapshotError: it is not one."""
    count = int(np.count_nonzero(padded != _FILLING))
    found = padded[:count].astype(np.int64)
    if not count or len(padded) != -(-count // size) * size or (np.diff(found, append=num_tokens) <= 0).any():
        raise SnapshotError("positions: expected ascending ones in whole blocks, got others")
    return found
