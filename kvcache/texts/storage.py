"""How an engine stores K and V: formats, calibration, residual, first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcache.calibration.calibrating import as_calibration, path_of
from kvcache.calibration.checking import check_formats
from kvcache.calibration.layer_losses import budget_of, formats_within
from kvcache.calibration.residual import as_length, num_firsts
from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import Formats, formats_of_layers, is_mixed
from kvcache.core.rowformat import Format, stored_dtypes
from kvcache.kernels.kernels import bf16_order
from kvcache.networks.model import Transformer
from kvcache.networks.protocols import Model, cached_sizes, draft_layers, latent_layers
from kvcache.networks.tokens import as_tokens
from kvcache.support.arguments import short
from kvcache.support.exclusions import excluded, expect
from kvcache.texts.budgets import Budgets
from kvcache.texts.features import features_of
from kvcache.texts.kv_settings import Settings

__all__ = ["Storage", "computed_with"]


class Storage(NamedTuple):
    """The storage arguments of an engine, checked.

    Attributes:
        dtypes: formats that store K and V: one for all layers, or one for each.
        calibration: of the keys; None: there is none.
        residual_length: tokens of a group of the residual; 0: there is none.
        firsts: first tokens of the text that every query reads unpacked.
        formats: what the caches are made with: `dtypes`, or formats that are written in Python.
    """

    dtypes: tuple[Formats, Formats]
    calibration: Calibration | None
    residual_length: int
    firsts: int
    formats: tuple[Formats | Format, Formats | Format]

    @classmethod
    def of(cls, model: Model, given: Settings, budgets: Budgets | None) -> Storage:
        """Check the settings of an engine.

        Args:
            budgets: of layers that evict; None: they keep all tokens.

        Raises:
            TypeError, ValueError: see `as_calibration`, `as_length` and `formats_within`; a calibration of layers of
                several sizes; a format for each of layers that share K and V.
        """
        dtype, calibrate = given.dtype, given.calibrate
        own = given.key_dtype, given.value_dtype
        formats = dtype if own[0] is None else own[0], dtype if own[1] is None else own[1]
        dtypes, bits = stored_dtypes(formats, calibrate), budget_of(dtype)
        if bits is not None and own != (None, None):
            raise ValueError(f"key_dtype: expected None, as value_dtype, with {short(dtype)}, got {short(formats)}")
        features = features_of(model) | (set() if budgets is None else budgets.features)
        measured = calibrate is not None and calibrate is not False
        expect("calibrate", calibrate if measured else None, features)
        expect("dtype: of each layer", formats if any(map(is_mixed, dtypes)) else None, features)
        if measured:
            expect("dtype: a budget of bits", None if bits is None else dtype, features)
        # What excludes a residual excludes centred keys: the two sets of queries that StreamingLLM has in one softmax
        # tell a constant, and attend in one call; beside windows centres are not measured.
        without = bool(excluded("residual_length", features))
        calibration = as_calibration(model, calibrate, dtypes[0], bits is not None, centred=not without)
        if bits is not None and calibration is not None and calibration.losses is not None:
            losses = calibration.losses[:, : 1 if latent_layers(model) else 2]
            formats = dtypes = formats_within(losses, cached_sizes(model)[1], bits, draft_layers(model))
        measured = calibration is not None and calibrate is not False
        residual_length = 0 if given.residual_length is None and budgets is not None else given.residual_length
        length = as_length(residual_length, *dtypes, has_none=without, calibrated=measured)
        expect("residual_length", length or None, features)
        is_alike = not excluded("dtype: a budget of bits", features)
        if measured and calibration is not None and not isinstance(calibrate, Calibration) and is_alike:
            ids = as_tokens(calibrate, model.config.vocab_size)
            path = path_of(model, ids).with_suffix(".checks") if isinstance(model, Transformer) else None
            check_formats(model, dtypes, calibration, length, num_firsts(measured, length), ids, path)
        firsts = num_firsts(measured and not without and (budgets is None or length > 0), length)
        return cls(dtypes, calibration, length, firsts, formats)

    def calibration_of(self, layers: Sequence[int]) -> Calibration | None:
        """The calibration of a cache of these layers."""
        known = self.calibration
        if known is None or not len(layers):
            return None
        return known if len(layers) == len(known.centres) else known.of_layers([*layers])

    def formats_of(self, layers: Sequence[int]) -> tuple[Any, Any]:
        """The formats of K and V of a cache of these layers."""
        keys, values = (formats_of_layers(each, layers) for each in self.formats)
        return keys, values


def computed_with(model: Model, residual_length: int, sparse_tokens: int | None) -> str:
    """The words, in names of saved K and V, for what decides them beside weights, inputs and formats."""
    residual = f", residual_length {residual_length}" if residual_length else ""
    sparse = "" if sparse_tokens is None else f", sparse_tokens {sparse_tokens}"
    order = f", bf16 in {bf16_order()}" if getattr(model, "activations", "") == "bf16" else ""
    return residual + sparse + order
