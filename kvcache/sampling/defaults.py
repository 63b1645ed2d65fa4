"""The sampling defaults of a checkpoint: `generation_config.json`, or `general.sampling.*` of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.gguf.file import GgufFile
from kvcache.networks.files import read_json
from kvcache.sampling.sampling import SamplingParams
from kvcache.support.arguments import short

__all__ = ["folder_defaults", "gguf_defaults"]

logger = logging.getLogger("kvcache")

# From the keys of both kinds of file to the fields of `SamplingParams`.
_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF = "general.sampling."
_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys that change which tokens are drawn and that `SamplingParams` has no field for, and the values without an effect.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "typical_p": (1, 1.0),
    "top_h": (),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "bad_words_ids": ([],),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "stop_strings": ([],),
}
_GGUF_IGNORED: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "xtc_probability": (0.0,), "penalty_last_n": (-1,)}


def folder_defaults(directory: Path) -> SamplingParams:
    """The options of `generation_config.json`; of `SamplingParams` for what it does not say, or without such a file.

    `do_sample` false is a temperature of 0. Keys for ways to generate that the engine does not have, such as beams, are
    ignored as long as they are well-formed JSON; a warning names them.

    Raises:
        CheckpointError: a damaged file; a value that is not one of its key.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    found = read_json(path)
    params = _params(found, _KEYS, f"{path}: ")
    sample = found.get("do_sample")
    if not isinstance(sample, (bool, type(None))):
        raise CheckpointError(f"{path}: do_sample: expected true or false, got {short(sample)}")
    _warn(found, _IGNORED, f"{path}: ")
    return replace(params, temperature=0.0) if sample is False else params


def gguf_defaults(file: GgufFile) -> SamplingParams:
    """The options of `general.sampling.*`; of `SamplingParams` for what the file does not say.

    Raises:
        CheckpointError: a value that is not one of its key.
    """
    found = {key.removeprefix(_GGUF): file.metadata[key] for key in file.metadata if key.startswith(_GGUF)}
    where = f"{file.path}: {_GGUF}"
    _warn(found, _GGUF_IGNORED, where)
    return _params(found, _GGUF_KEYS, where)


def _params(found: Mapping[str, Any], keys: Mapping[str, str], where: str) -> SamplingParams:
    fields: dict[str, Any] = {}
    for key, field in keys.items():
        if (value := found.get(key)) is not None:
            try:
                SamplingParams(**{field: value})
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{where}{key}: {str(error).partition(': ')[2]}") from None
            fields[field] = value
    return SamplingParams(**fields)


def _warn(found: Mapping[str, Any], ignored: Mapping[str, tuple[Any, ...]], where: str) -> None:
    names = [key for key, neutral in ignored.items() if found.get(key) is not None and found[key] not in neutral]
    if names:
        logger.warning("%s%s: ignored, since the engine has no such sampling", where, ", ".join(names))
