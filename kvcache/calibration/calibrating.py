"""Calibrations: measured by running a text through a network, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.calibration.calibration_text import TEXT
from kvcache.calibration.layer_losses import measure_losses
from kvcache.calibration.passes import new_cache, run_piece
from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import Formats, names_of
from kvcache.errors import CheckpointError
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.model import Transformer
from kvcache.networks.protocols import Float32, Model, cached_sizes, layer_attention
from kvcache.networks.tokens import as_tokens
from kvcache.sampling.text_tokens import encoded
from kvcache.support.arguments import short

__all__ = [
    "as_calibration", "bias_centres", "cache_folder", "calibration_of", "measure", "path_of",
    "text_or_calibration",
]

# Tokens of one text: longer ones are cut, since the slow pairs of RoPE turn with the position. The first tokens of each
# count for nothing: caches keep them in f16, and their keys are unlike all others.
_WINDOW, _FIRSTS, _PIECE = 2048, 16, 256
_LEAST = 64  # tokens of a text
_MOST = 32752  # of a centre, see `Calibration`

logger = logging.getLogger("kvcache")


def cache_folder() -> Path:
    """The folder of the user's calibrations: `kvcache` in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"


def as_calibration(
    model: Model, calibrate: Any, key_dtype: Formats, with_losses: bool = False, *, centred: bool = True
) -> Calibration | None:
    """An engine's argument `calibrate` as the calibration of its cache; None: it has none.

    Args:
        with_losses: whether those of the layers are needed too; keys count as packed.
        centred: whether keys are centred at all.

    Raises:
        TypeError, ValueError: another kind of argument.
    """
    packed = with_losses or any(FORMATS[name].quantised for name in names_of(key_dtype))
    # A softcap tells the constant that a centre takes from all scores.
    tell = [i for i, each in enumerate(layer_attention(model)) if not centred or (each and each.softcap)]
    if calibrate is False or calibrate is None:
        if with_losses:
            raise ValueError(f"calibrate: expected one with dtype {short(key_dtype)}, got none")
        return bias_centres(model, tell) if packed and centred else None
    if isinstance(calibrate, (str, Path, bool)):
        raise TypeError(f"calibrate: expected False, a Calibration or tokens, got {short(calibrate)}")
    if not isinstance(calibrate, Calibration):
        try:
            calibrate = as_tokens(calibrate, model.config.vocab_size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"calibrate: {str(error).partition(': ')[2]}") from None
    if not packed:
        return None
    found = calibrate if isinstance(calibrate, Calibration) else calibration_of(model, calibrate, with_losses)
    if with_losses and found.losses is None:
        raise ValueError(f"calibrate: expected one with losses for dtype {short(key_dtype)}, or tokens, got {found}")
    shape = _shape_of(model)
    if found.shape != shape:
        raise ValueError(f"calibrate: expected one of {shape} layers, heads and channels, got {found.shape}")
    return found.without_centres(tell) if tell else found


def _shape_of(model: Model) -> tuple[int, int, int]:
    """Layers, KV heads and channels of a network whose K and V have one size."""
    return model.config.num_layers, *cached_sizes(model)


def text_or_calibration(calibrate: Any, load: Callable[[], Any]) -> Any:
    """Tokens or a calibration from what `from_pretrained` takes beyond the constructor: "auto" and paths.

    Args:
        load: loads the tokenizer, or None.

    Raises:
        TypeError: True; a text for a checkpoint without a tokenizer. FileNotFoundError: no such file. CheckpointError:
            a damaged calibration.
    """
    if calibrate is True:
        raise TypeError('calibrate: expected False, "auto", a path, a Calibration or tokens, got True')
    if not isinstance(calibrate, (str, Path)):
        return calibrate
    text = TEXT
    if calibrate != "auto":
        try:
            data = Path(calibrate).read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(
                f'calibrate: expected "auto", or a file of text or of a calibration, got none at {calibrate}'
            ) from None
        if data.startswith(b"kvcache calibration"):
            return Calibration.load(calibrate)
        text = data.decode("utf-8", "replace")
    tokenizer = load()
    if tokenizer is None:
        raise TypeError(f"calibrate: expected tokens for a checkpoint without a tokenizer, got {short(calibrate)}")
    return np.array(encoded(tokenizer, text, "calibrate", add_special_tokens=False), np.uint32)


def path_of(model: Transformer, ids: NDArray[np.uint32]) -> Path:
    """Where the calibration of a network by a text is kept."""
    text = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
    return cache_folder() / f"{fingerprint(model)}-{text}.calibration"


def calibration_of(model: Model, tokens: Any, with_losses: bool = False) -> Calibration:
    """The calibration of a network by a text: the one in the user's cache folder, or measured and kept there.

    Losses of layers are measured where they are needed, and then kept too. A network that is not a `Transformer` has no
    name, and its calibrations are not kept.
    """
    ids = as_tokens(tokens, model.config.vocab_size)
    if not isinstance(model, Transformer):
        return _with_losses(model, measure(model, ids), ids, with_losses)
    path, shape = path_of(model, ids), _shape_of(model)
    found = None
    try:
        found = Calibration.load(path)
        if found.shape == shape and (found.losses is not None or not with_losses):
            return found
    except FileNotFoundError:
        pass
    except (CheckpointError, OSError) as error:
        logger.warning("%s; measuring again", error)
    if found is None or found.shape != shape:
        count = f"{len(ids):,}"
        logger.info("calibrating: %s tokens run through the network once; the result is kept in %s", count, path)
        found = measure(model, ids)
    found = _with_losses(model, found, ids, with_losses)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except OSError as error:
        logger.warning("the calibration is not kept: %s", error)
    return found


def _with_losses(model: Model, found: Calibration, ids: NDArray[np.uint32], wanted: bool) -> Calibration:
    """The same with the losses of layers, if they are wanted."""
    losses = measure_losses(model, found, ids) if wanted and found.losses is None else found.losses
    return Calibration(found.centres, found.moments, losses)


def bias_centres(model: Model, without: Sequence[int] = ()) -> Calibration | None:
    """The centres of keys without a text: the mean over positions of what biases add to them; None: no biases.

    Biases of some networks are a hundred times as large as what they are added to, in the pairs that RoPE hardly turns.

    Args:
        without: layers that have centres of zeros.
    """
    if not isinstance(model, Transformer):
        return None
    most = min(_WINDOW, model.config.max_position_embeddings)
    rows = model.key_bias(np.arange(0, most, max(1, most // 256)))
    if rows is None:
        return None
    centres = rows.mean(axis=1, dtype=np.float64).astype(np.float32)
    centres[list(without)] = 0
    return Calibration(np.clip(centres, -_MOST, _MOST)) if centres.any() else None


class _Sums:
    """Sums over tokens of the keys of a layer, and of products of channels of the queries that read each KV head.

    A layer that predicts draft tokens sees none here: its centres and products are zeros.

    Args:
        heads, dim: KV heads, and their channels.
        latent: channels of a key that are V too, or None.
    """

    def __init__(self, heads: int, dim: int, latent: int | None) -> None:
        self.latent = latent
        self.keys, self.products = np.zeros((heads, dim)), np.zeros((heads, dim, dim))
        self.squares, self.tokens, self.readers = 0.0, 0, 1

    def add(self, queries: Float32, keys: Float32) -> None:
        """Add the tokens of a piece."""
        heads, dim = keys.shape[1:]
        self.keys += keys.sum(axis=0, dtype=np.float64)
        for head, rows in enumerate(queries.reshape(len(queries), heads, -1, dim).swapaxes(0, 1)):
            flat = rows.reshape(-1, dim)
            self.products[head] += flat.T @ flat
        self.squares += float(np.square(keys[..., : self.latent], dtype=np.float64).sum())
        self.tokens, self.readers = self.tokens + len(keys), queries.shape[1]

    def centres(self) -> Float32:
        """The means of the keys, `(heads, dim)`."""
        return np.clip(self.keys / max(1, self.tokens), -_MOST, _MOST).astype(np.float32)

    def moments(self, scale: float) -> Float32:
        """The cost of errors of a key, `(heads, dim, dim)`: see `measure`."""
        tokens = max(1, self.tokens)
        found = self.products / tokens
        if self.latent is not None:
            means = self.keys[..., : self.latent] / tokens
            spread = self.squares / tokens - float((means * means).sum())
            found *= scale * scale * spread / self.readers
            found[:, np.arange(self.latent), np.arange(self.latent)] += 1.0
        return ((found + found.swapaxes(1, 2)) / 2).astype(np.float32)


def measure(model: Model, tokens: NDArray[np.uint32]) -> Calibration:
    """Run a text through a network with K and V in f32: the means of its keys, and what errors of them cost.

    An error e of a key moves the score of a query q by scale * q e: the moments are the means of q q'. Where V is a
    part of K, the error moves the output of a head by  w (scale * (q e) (v - o) + e_v)  to first order, with its weight
    w and the output o. Its mean square is  w w (scale^2 e' E[q q'] e E|v - o|^2 + |e_v|^2)  if q and v - o are
    independent, so the moments are  scale^2 E[q q'] E|v - o|^2  and 1 more for channels of V. It is taken that channels
    of outputs count alike, and that o is near the mean of v: E|v - o|^2 is the sum of the variances of V.

    Raises:
        ValueError: fewer than 64 tokens.
    """
    config, attention = model.config, [each for each in layer_attention(model) if each is not None]
    window = min(_WINDOW, config.max_position_embeddings, len(tokens))
    if window < _LEAST:
        raise ValueError(f"calibrate: expected a text of at least {_LEAST} tokens and positions, got {window}")
    _, heads, dim = _shape_of(model)
    sums = [_Sums(heads, dim, each.latent) for each in attention]

    def add(skipped: int, layer: int, queries: Float32, keys: Float32) -> None:
        sums[layer].add(queries[skipped:], keys[skipped:])

    show, began = sys.stderr is not None and sys.stderr.isatty(), perf_counter()
    for start in range(0, len(tokens) - window + 1, window):
        cache = new_cache(model, window, dtype="f32")
        cache.allocate(0, 0)
        for first in range(0, window, _PIECE):
            count = min(_PIECE, window - first)
            piece = tokens[start + first : start + first + count]
            run_piece(model, cache, piece, first, "none", window, partial(add, max(0, _FIRSTS - first)))
            if start == first == 0:
                seconds = (perf_counter() - began) * (len(tokens) // window * window) / count
                logger.info("calibrating: takes about %d s", math.ceil(seconds))
            if show:
                done = start + first + count
                print(f"\rcalibrating: {done} of {len(tokens)} tokens", end="", file=sys.stderr, flush=True)
    if show:
        print(file=sys.stderr)
    scales = [dim**-0.5 if each.scale is None else each.scale for each in attention]
    moments = [each.moments(scale) for each, scale in zip(sums, scales, strict=True)]
    return Calibration(np.stack([each.centres() for each in sums]), np.stack(moments))
