"""`Settings`: how an engine stores K and V, in one object that engines of all kinds take."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, TypeVar

from kvcache.core.layer_formats import Formats
from kvcache.core.rowformat import Format
from kvcache.eviction import EvictionPolicy
from kvcache.support.arguments import as_instance
from kvcache.texts.policy import Policy

__all__ = ["Options", "Settings", "with_options"]

Init = TypeVar("Init", bound=Callable[..., None])


class Options(TypedDict, total=False):
    """The attributes of `Settings`, as keywords of an engine."""

    dtype: Formats | Format
    key_dtype: Formats | Format | None
    value_dtype: Formats | Format | None
    rotate: bool | str
    block_size: int
    num_blocks: int | None
    max_memory_bytes: int | str | None
    residual_length: int | None
    calibrate: Any
    eviction_policy: EvictionPolicy | Policy | None
    kv_budget: int | None
    sparse_tokens: int | None
    spill: str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The storage of K and V of an engine: `InferenceEngine(model, settings=Settings(dtype="q4"))`.

    `InferenceEngine(model, dtype="q4")` is the same engine: keywords count more than the object. Engines check the
    values, and raise TypeError or ValueError. The guide `combinations.md` says which settings go together.

    Attributes:
        dtype, key_dtype, value_dtype, rotate, block_size: storage of the cache, see `PagedKvCache`. Formats of layers
            are those of the network; an engine with an eviction policy has one format. "auto:4.0" chooses the formats
            of layers within 4.0 bits per value, by what each loses (`layer_losses`); it needs `calibrate`.
        num_blocks: size of the cache; by default enough for the whole context, at most for 8192 tokens.
        max_memory_bytes: the most bytes of K and V, an int or a text such as "4GiB", or "50%" of the memory that is
            available when the engine is made; with `num_blocks` the lower limit counts, without it the whole context is
            the other limit. ValueError: too few for one block.
        residual_length: the text is divided into groups of this many tokens (0 to 256). A query reads its own group in
            f16 and earlier groups as `dtype` packs them, see `PagedKvCache`. By default 64 if K or V is q6, q5, q4
            or q3, 128 if one is q2, else 0. With a calibration, 16 lowers q4's KL divergence by two thirds. With an
            eviction policy the default is 0, and a group is what is left of its tokens. Under StreamingLLM, or if
            layers keep a window alone, it must be 0.
        eviction_policy, kv_budget: an `EvictionPolicy` or a `Policy`, and the tokens that each layer keeps (under
            PyramidKV on average; by default sinks plus window, if the policy has them). After each piece of a
            prompt and each decode step, every layer evicts down to its budget and frees the memory; see
            `EvictingSequence`. The default `num_blocks` then covers the budget and one piece, for a text of any
            length. A block holds tokens of one layer.
        calibrate: a `Calibration` of the network's keys, or tokens to measure one by; False: none. Quantised keys are
            then centred and rounded with feedback, every query reads the first 16 tokens of the text in f16, and
            every quantised format has a residual by default. `from_pretrained` also takes "auto" and paths.
            With an eviction policy, tokens are in f16 only if `residual_length` is not 0. Under StreamingLLM, or where
            a layer has a window, keys are rounded with feedback alone, and no tokens are in f16.
        sparse_tokens: in layers that keep all tokens, if the text has at least 4 times this number of tokens, each KV
            head attends to pages that the query chooses: they have 1.75 times this number of tokens, besides the first
            16 and the newest 64 to 79; see `top_tokens` of `PagedKvCache.attention`. Every position does so, in prompts
            too: an answer does not depend on pieces, prefix hits or preemptions, but it differs from one without. Saved
            caches and tiers keep both apart. Block sizes are multiples of 16. None: queries attend to all tokens.
        spill: a folder for K and V that memory has no room for, see `PagedKvCache`: `max_memory_bytes`, which it needs,
            are then those in memory, and the cache has room for `num_blocks`, by default for the whole context (of a
            `BatchEngine` those of `max_running` texts), as far as the disk has. Of the memory, blocks have at least as
            much as their summaries for `sparse_tokens`; tokens in f16 and windows stay there too. Answers have the bits
            of those in memory. Without `sparse_tokens` each step reads all tokens, which a warning says. See
            `outgrown.md`.
    """

    dtype: Formats | Format = "f32"
    key_dtype: Formats | Format | None = None
    value_dtype: Formats | Format | None = None
    rotate: bool | str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    max_memory_bytes: int | str | None = None
    residual_length: int | None = None
    calibrate: Any = False
    eviction_policy: EvictionPolicy | Policy | None = None
    kv_budget: int | None = None
    sparse_tokens: int | None = None
    spill: str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, settings: Settings | None, options: Mapping[str, Any]) -> Settings:
        """The settings with other values of some attributes; None: the defaults. TypeError: no such attribute."""
        settings = cls() if settings is None else as_instance(settings, Settings, "settings")
        for name in options:
            if name not in cls.__dataclass_fields__:
                names = ", ".join(cls.__dataclass_fields__)
                raise TypeError(f"{name}: expected an argument of the engine or one of {names}, got another name")
        return replace(settings, **options)


def with_options(init: Init) -> Init:
    """Show the attributes of `Settings` in the signature of a constructor that takes them as keywords."""
    shown = inspect.signature(init)
    *own, _ = shown.parameters.values()
    more = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(Settings)
    ]
    init.__signature__ = shown.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return init
