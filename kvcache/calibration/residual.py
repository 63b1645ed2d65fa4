"""KIVI's residual of an engine, which its cache has (`kvcache.paged.residual`): the default length, and the memory.

Whether a query reads a token packed depends on their positions alone, not on how the text entered the cache: in
pieces, token by token, or as a cached prefix of whole groups. The result is the same in each case.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache.core.layer_formats import Formats, names_of, unpacked
from kvcache.core.store import BlockStore
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.protocols import Float32, NetworkConfig
from kvcache.paged.residual import row_block
from kvcache.support.arguments import as_count

__all__ = [
    "FIRSTS", "LENGTHS", "AttendPiece", "as_length", "default_length", "most_unpacked", "num_firsts", "residual_bytes",
]

# Tokens of a group if K or V has this format, chosen by `python -m bench quality --only formats`. q8 rounds too finely
# for a residual to pay.
LENGTHS = {line.name: 64 if line.bits > 2 else 128 for line in FORMATS.values() if line.quantised and line.bits < 8}

FIRSTS = 16  # first tokens that are read unpacked beside centred keys

AttendPiece = Callable[[int, Float32, Float32, Float32], Float32]


def default_length(key_dtype: Formats, value_dtype: Formats) -> int:
    """The default length of a group; 0 if the rounding of both K and V is too fine for a residual to pay."""
    return max([0, *(LENGTHS.get(name, 0) for dtype in (key_dtype, value_dtype) for name in names_of(dtype))])


def as_length(
    length: int | None, key_dtype: Formats, value_dtype: Formats, *, has_none: bool = False, calibrated: bool = False
) -> int:
    """An engine's `residual_length`, or its default.

    Args:
        calibrated: keys have a calibration: any quantised format has a residual by default.
        has_none: whether there is none by default.

    Raises:
        ValueError: not 0 to 256.
    """
    if length is None:
        return 0 if has_none else default_length(key_dtype, value_dtype) or 64 * calibrated
    return as_count(length, "residual_length", 0, 256)


def num_firsts(measured: bool, length: int) -> int:
    """How many first tokens are kept unpacked with a residual of `length`: some with a measured calibration."""
    return min(FIRSTS, length or FIRSTS) if measured else 0


def most_unpacked(length: int, chunk: int, firsts: int = 0) -> int:
    """Tokens that the cache of one text keeps unpacked at most, in its blocks of them.

    They are the groups before a change and at its end, each behind the first tokens, and a piece; with blocks that are
    in use in part, and two more for which `unpack` makes room.
    """
    size = row_block(length, firsts)
    return size * (2 * (-(-(firsts + length) // size) + 1) + (chunk if length else min(chunk, firsts)) // size + 2)


def residual_bytes(
    config: NetworkConfig, dtypes: tuple[Formats, Formats], length: int, chunk: int, firsts: int = 0
) -> int:
    """Bytes of K and V of the unpacked tokens of a cache with the given formats."""
    if not length and not firsts:
        return 0
    key, value = map(unpacked, dtypes)
    token = BlockStore(config.num_layers, 0, 1, config.num_kv_heads, config.head_dim, key, value).block_bytes
    return token * most_unpacked(length, chunk, firsts)
