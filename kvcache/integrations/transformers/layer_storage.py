"""`LayerStorage`: the formats of the layers of a model, and the calibration of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcache.calibration.layer_losses import budget_of, formats_within
from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import formats_of_layers, is_mixed
from kvcache.core.rowformat import is_format, name_of, stored_dtypes
from kvcache.core.store import BlockStore
from kvcache.support.arguments import as_instance, short

__all__ = ["Kind", "LayerStorage"]


class Kind(NamedTuple):
    """Properties that all layers of one `PagedKvCache` share; `layer` is set where each layer has its own cache."""

    window: int | None
    heads: int
    channels: int
    layer: int | None


class LayerStorage(NamedTuple):
    """How K and V of each layer are stored.

    Attributes:
        formats: of K and of V: one for all layers, in Python perhaps, or one for each.
        calibration: of the keys of all layers, without centres; None: there is none.
    """

    formats: tuple[Any, Any]
    calibration: Calibration | None

    @classmethod
    def of(cls, settings: dict[str, Any], num_layers: int, said: dict[int, Kind]) -> LayerStorage:
        """Check `dtype`, `key_dtype`, `value_dtype` and `calibrate` of a cache.

        Args:
            said: the kinds of the layers, as far as the configuration says them.

        Raises:
            TypeError, ValueError: another kind of argument; a format for each of another number of layers; a budget of
                bits without losses of layers; a calibration of other layers, heads or channels.
        """
        dtype, known = settings["dtype"], settings.get("calibrate")
        pair = settings["key_dtype"] or dtype, settings["value_dtype"] or dtype
        if isinstance(known, (str, bool)):
            raise TypeError(
                f"calibrate: expected a Calibration (kvcache.integrations.transformers.calibrate makes one of a model "
                f"and a text) or None, got {short(known)}"
            )
        if known is not None:
            _check_sizes(as_instance(known, Calibration, "calibrate"), num_layers, said)
        bits = budget_of(dtype)
        if bits is not None:
            if settings["key_dtype"] is not None or settings["value_dtype"] is not None:
                raise ValueError(f"key_dtype: expected None, as value_dtype, beside {short(dtype)}, got {short(pair)}")
            if known is None or known.losses is None:
                raise ValueError(f"calibrate: expected a Calibration with losses for dtype {short(dtype)}, got {known}")
            pair = formats_within(known.losses, known.shape[2], bits)
        stored_dtypes(pair, known)
        for each, name in zip(pair, ("key_dtype", "value_dtype"), strict=True):
            if is_mixed(each) and (len(each) != num_layers or len(said) != num_layers):
                count, named = len(said), "dtype" if settings[name] is None else name
                raise ValueError(
                    f"{named}: expected one format, or one for each of {count} layers with K and V, got {short(each)}"
                )
        centred = None if known is None else known.without_centres([*range(num_layers)])
        return cls(pair, centred)

    def __str__(self) -> str:
        """The name of the format, those of K and V if they differ."""
        names = [name_of(each) if is_format(each) else short(each).strip("'") for each in self.formats]
        return "/".join(dict.fromkeys(names))

    def of_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """The arguments of a `PagedKvCache` of these layers; none are named: of layers that the config does not say."""
        known = self.calibration
        if not layers and (known is not None or any(map(is_mixed, self.formats))):
            raise ValueError(
                "dtype: expected one format, and no calibration, for layers whose heads are not those that the config "
                "names, got others"
            )
        keys, values = (formats_of_layers(each, layers) for each in self.formats)
        return {
            "key_dtype": keys, "value_dtype": values,
            "calibration": None if known is None else known.of_layers([*layers]),
        }

    def stored(self, layers: Sequence[int]) -> tuple[Any, Any]:
        """The formats of the library in which K and V of the layers lie."""
        keys, values = stored_dtypes(self.formats, None)
        return formats_of_layers(keys, layers), formats_of_layers(values, layers)

    def check(self, block_size: int) -> None:
        """Raise TypeError or ValueError for formats that the library does not have."""
        keys, values = self.stored([0]) if not any(map(is_mixed, self.formats)) else self.formats
        BlockStore(len(keys) if is_mixed(keys) else 1, 0, block_size, 1, 8, keys, values)


def _check_sizes(known: Calibration, num_layers: int, said: dict[int, Kind]) -> None:
    sizes = {(each.heads, each.channels) for each in said.values()}
    if len(said) != num_layers or len(sizes) != 1:
        raise ValueError("calibrate: expected None for a model with layers of several kinds, got a Calibration")
    shape = (num_layers, *next(iter(sizes)))
    if known.shape != shape:
        raise ValueError(f"calibrate: expected one of {shape} layers, heads and channels, got {known.shape}")
