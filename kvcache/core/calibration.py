"""`Calibration`: what is known of the keys of a network before any is stored, so that few bits hold them well."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvcache.errors import CheckpointError
from kvcache.kernels.functions import sums_of
from kvcache.support.arguments import as_floats, as_path
from kvcache.support.copies import refuse_copies
from kvcache.support.descriptors import Replacement
from kvcache.support.regular_files import open_regular, read_part, write_at

__all__ = ["Calibration"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# A key of up to 65504 in f16 or a quantised format, less a centre of up to half of that, is checked to fit again.
_MOST = 32752.0
_DAMPING = 0.01  # of the mean of the diagonal, as GPTQ has it: directions without any query are not without cost
_TOGETHER = 2**18  # numbers of moments whose factors are made together, in a cache of the CPU
_MAGIC = b"kvcache calibration 1\n"


class Calibration:
    """Centres of keys and second moments of queries, one per layer and KV head.

    The centre is subtracted from keys before they are stored: softmax cannot tell a constant that all keys share, and
    much of the range of a quantised row goes into it. The moments say how much an error of each channel changes scores:
    quantised keys are rounded so that errors cancel in them (ckernels/kvc_feedback.h). Where V is a part of K, as in
    latent rows, V lacks the centre too, and the moments count what an error of it changes.

    Args:
        centres: `(num_layers, num_heads, head_dim)`, after the rotation of RoPE, of magnitudes up to 32752. Zeros:
            nothing is subtracted.
        moments: `(num_layers, num_heads, head_dim, head_dim)`: the mean of the products of channels of the queries that
            read this head, symmetric, with a diagonal of at least 0. None: keys are rounded each channel by itself.
        losses: `(num_layers, 2)`, at least 0: what is lost where K, or V, of a layer alone is packed, see
            `dtype="auto:4.0"`. None: not measured. It says nothing of what keys mean.

    Raises:
        TypeError, ValueError: other shapes, kinds or values.

    Attributes:
        centres, moments, losses: float32 arrays, which cannot be written.
        fingerprint: 128 bits of BLAKE2 of centres and moments, hexadecimal.
    """

    def __init__(
        self, centres: npt.ArrayLike, moments: npt.ArrayLike | None = None, losses: npt.ArrayLike | None = None
    ) -> None:
        self.centres: Float32 = as_floats(centres, (None, None, None), "centres").copy()
        if not (np.abs(self.centres) <= _MOST).all():
            raise ValueError(f"centres: expected magnitudes up to {_MOST:.0f}, got others or NaN")
        self.centres.flags.writeable = False
        self.moments: Float32 | None = None
        if moments is not None:
            layers, heads, dim = self.centres.shape
            self.moments = as_floats(moments, (layers, heads, dim, dim), "moments").copy()
            if not np.isfinite(self.moments).all() or (np.diagonal(self.moments, axis1=2, axis2=3) < 0).any():
                raise ValueError("moments: expected finite numbers and diagonals of at least 0, got others")
            if not np.array_equal(self.moments, self.moments.swapaxes(2, 3)):
                raise ValueError("moments: expected symmetric matrices, got others")
            self.moments.flags.writeable = False
        self.losses: Float32 | None = None
        if losses is not None:
            self.losses = as_floats(losses, (len(self.centres), 2), "losses").copy()
            if not (np.isfinite(self.losses) & (self.losses >= 0)).all():
                raise ValueError("losses: expected finite numbers of at least 0, got others")
            self.losses.flags.writeable = False
        self._factors: dict[int, Float32] = {}

    @cached_property
    def fingerprint(self) -> str:
        """See above."""
        digest = hashlib.blake2b(repr(self.centres.shape).encode(), digest_size=16)
        digest.update(self.centres.tobytes())
        digest.update(b"none" if self.moments is None else self.moments.tobytes())
        return digest.hexdigest()

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(num_layers, num_heads, head_dim)`."""
        layers, heads, dim = self.centres.shape
        return layers, heads, dim

    @property
    def nbytes(self) -> int:
        """Bytes of centres and moments."""
        return sum(each.nbytes for each in (self.centres, self.moments, self.losses) if each is not None)

    def of_layers(self, layers: list[int]) -> Calibration:
        """The part of `layers`, in their order."""
        parts = [None if each is None else each[layers] for each in (self.moments, self.losses)]
        return Calibration(self.centres[layers], *parts)

    def by_head(self) -> Calibration:
        """The same, with each head as a layer of one head, in the order of layers."""
        layers, heads, dim = self.centres.shape
        moments = None if self.moments is None else self.moments.reshape(layers * heads, 1, dim, dim)
        return Calibration(self.centres.reshape(layers * heads, 1, dim), moments)

    def without_centres(self, layers: list[int]) -> Calibration:
        """The same, with centres of zeros in `layers`."""
        centres = self.centres.copy()
        centres[layers] = 0
        return Calibration(centres, self.moments, self.losses)

    def factors(self, rotated: int) -> Float32 | None:
        """The factors of the encoder, float32 `(num_layers, num_heads, head_dim, head_dim)`; None without moments.

        The inverse of the unit upper triangular A of  H = A D A', where H are the moments and 1 % of damping. The
        arithmetic is elementwise float64 in one order: every machine finds the same bits.

        Args:
            rotated: channels of each part of a row that is stored under a Hadamard rotation, a power of two that
                divides head_dim; 0: none is.
        """
        if self.moments is None:
            return None
        if rotated not in self._factors:
            shape, dim = self.moments.shape, self.shape[2]
            found = np.empty((shape[0] * shape[1], dim, dim), np.float32)
            flat, step = self.moments.reshape(found.shape), max(1, _TOGETHER // dim**2)
            for first in range(0, len(flat), step):
                here = slice(first, first + step)
                found[here] = _factors(flat[here].astype(np.float64), rotated)
            self._factors[rotated] = found.reshape(shape)
        return self._factors[rotated]

    def _check(self) -> bytes:
        """The checksum of a file."""
        own = bytes.fromhex(self.fingerprint)
        return own if self.losses is None else hashlib.blake2b(own + self.losses.tobytes(), digest_size=16).digest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads; the old file stays until the new one is whole. OSError: of the system."""
        arrays = [each for each in (self.centres, self.moments, self.losses) if each is not None]
        kinds = 1 + (self.moments is not None) + 2 * (self.losses is not None)
        head = np.array([*self.shape, kinds], "<u4")
        check = np.frombuffer(self._check(), np.uint8)
        with Replacement(as_path(path)) as fd:
            write_at(fd, [_MAGIC, head, check, *arrays], 0)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a saved calibration.

        Raises:
            OSError: of the file system.
            CheckpointError: a damaged file, or none of a calibration.
        """
        file, size = open_regular(path, CheckpointError)
        try:
            head, check = np.zeros(4, "<u4"), np.zeros(16, np.uint8)
            magic, what = bytearray(len(_MAGIC)), f"calibration {os.fspath(path)}"
            read_part(file.fd, [magic, head, check], 0, what)
            layers, heads, dim, kinds = (int(n) for n in head)
            means, more = layers * heads * dim, kinds in (2, 4)
            first = len(_MAGIC) + head.nbytes + check.nbytes
            floats = means * (1 + dim * more) + 2 * layers * (kinds > 2)
            if bytes(magic) != _MAGIC or not 1 <= kinds <= 4 or size != first + 4 * floats:
                raise CheckpointError(f"{what}: expected a saved calibration, got {size} bytes of something else")
            data = np.zeros(floats, np.float32)
            read_part(file.fd, [data], first, what)
        finally:
            file.close()
        try:
            moments = data[means : means * (1 + dim)].reshape(layers, heads, dim, dim) if more else None
            losses = data[-2 * layers :].reshape(layers, 2) if kinds > 2 else None
            found = cls(data[:means].reshape(layers, heads, dim), moments, losses)
        except ValueError as error:
            raise CheckpointError(f"{what}: {error}") from error
        if found._check() != check.tobytes():
            raise CheckpointError(f"{what}: expected its checksum, got damaged content")
        return found

    __reduce_ex__ = refuse_copies("`save` writes it to a file")

    def __repr__(self) -> str:
        layers, heads, dim = self.shape
        feedback = "" if self.moments is None else ", with moments"
        return f"Calibration({layers} layers, {heads} heads of {dim}{feedback}, {self.fingerprint[:8]})"


def _factors(h: Float64, rotated: int) -> Float32:
    dim = h.shape[-1]
    if rotated:  # a part x is stored as H x / rotated and read as H y: its query is H q
        h = _hadamard(_hadamard(h, rotated).swapaxes(-1, -2), rotated)
    diagonal = np.arange(dim)
    damping = _DAMPING * sums_of(h[..., diagonal, diagonal])[..., None] / dim
    h[..., diagonal, diagonal] += np.where(damping > 0, damping, 1.0)
    upper = np.zeros_like(h)  # A less its diagonal of ones
    for j in range(dim - 1, 0, -1):
        column = h[..., :j, j].copy()
        upper[..., :j, j] = column / h[..., j, j, None]
        h[..., :j, :j] -= upper[..., :j, j, None] * column[..., None, :]
    inverse = np.zeros_like(h)
    inverse[..., diagonal, diagonal] = 1.0
    for j in range(dim - 1, 0, -1):  # row j is final: take it from the rows above
        inverse[..., :j, j:] -= upper[..., :j, j, None] * inverse[..., j, None, j:]
    return np.ascontiguousarray(inverse, np.float32)


def _hadamard(x: Float64, part: int) -> Float64:
    """The transform of each part of the last axis, unscaled."""
    shape, step = x.shape, part // 2
    while step:
        pairs = x.reshape(*shape[:-1], -1, 2, step)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(shape)
        step //= 2
    return x
