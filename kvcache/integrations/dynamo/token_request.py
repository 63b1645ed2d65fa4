"""Requests as Dynamo's frontend sends them, and chunks as it reads them (`dynamo.common.backend.engine` of 1.6.1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcache.engine import SamplingParams, TokenLogprobs
from kvcache.grammar import Grammar, json_object, json_schema, lark, regex
from kvcache.support.arguments import as_count, as_instance, short

__all__ = ["TokenRequest", "chunk_of", "end_of"]

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"
)
_REASONS = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "cancelled", "error": "error"}
# What is not served: fields that ask for it, and the values with which they ask for nothing.
_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": dict.fromkeys(
        ("bootstrap_info", "encoder_result", "mm_processor_kwargs", "multi_modal_data", "prefill_result"), (None, {})
    ),
    "sampling_options": {
        "use_beam_search": (None, False), "length_penalty": (None, 1.0), "include_stop_str_in_output": (None, False)
    },
    "stop_conditions": {"min_tokens": (None, 0), "ignore_eos": (None, False), "max_thinking_tokens": (None,)},
    "output_options": {"prompt_logprobs": (None,), "skip_special_tokens": (None, True)},
}


class TokenRequest(NamedTuple):
    """A request: its tokens, how to sample, how many samples, and the namespace of its cached prefixes."""

    tokens: list[int]
    params: SamplingParams
    n: int
    namespace: str | None

    @classmethod
    def of(cls, request: Mapping[str, Any], defaults: SamplingParams, context: int) -> TokenRequest:
        """A request of the frontend.

        Args:
            request: as it came.
            defaults: for what it does not say.
            context: the most tokens of a text; an answer has what its prompt leaves, unless it says less.

        Raises:
            TypeError, ValueError, GrammarError: something that is not served, or of another kind.
        """
        probe = request.get("_HEALTH_CHECK") is True
        for group, fields in _REFUSED.items():
            given = request if not group else _dict(request, group)
            for name, neutral in fields.items():
                if given.get(name) not in neutral and not (probe and name == "ignore_eos"):  # it draws one token
                    raise ValueError(f"{name}: expected {short(neutral[-1])}, got {short(given[name])}")
        tokens = as_instance(request.get("token_ids"), list, "token_ids")
        n, changes = _sampling(request)
        stop, routing = _dict(request, "stop_conditions"), _dict(request, "routing")
        most = stop.get("max_tokens")
        changes["max_tokens"] = max(0, context - len(tokens)) if most is None else as_count(most, "max_tokens")
        ends = [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())]
        if (logprobs := _dict(request, "output_options").get("logprobs")) is not None:
            changes["logprobs"] = as_count(logprobs, "logprobs")
        salt = routing.get("cache_salt") or _dict(request, "extra_args").get("cache_salt")
        params = defaults.changed({**changes, "stop_token_ids": (*defaults.stop_token_ids, *ends)})
        return cls(tokens, params, n, None if salt is None else as_instance(salt, str, "cache_salt"))


def _dict(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = request.get(name)
    return {} if value is None else as_instance(value, dict, name)


def _sampling(request: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of samples, and what a request says about how to draw them."""
    given = _dict(request, "sampling_options")
    changes = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    n = 1 if given.get("n") is None else as_count(given["n"], "n", 1)
    if given.get("best_of") not in (None, n):
        raise ValueError(f"best_of: expected {n}, as n, got {short(given['best_of'])}")
    if given.get("guided_decoding"):
        changes["grammar"] = _grammar(as_instance(given["guided_decoding"], dict, "guided_decoding"))
    return n, changes


def _grammar(guided: Mapping[str, Any]) -> Grammar:
    kinds: dict[str, Callable[[Any], Grammar]] = {
        "json": json_schema, "regex": regex, "grammar": lark, "choice": _choice,
        "json_object": lambda value: json_object(),
    }
    found = {name: value for name, value in guided.items() if value not in (None, False)}
    space, names = found.pop("whitespace_pattern", None), [name for name in found if name in kinds]
    unknown = [name for name in found if name not in kinds and name != "backend"]
    if unknown or len(names) != 1:
        raise ValueError(f"guided_decoding: expected one of {', '.join(kinds)}, got {short(unknown or names)}")
    (name,) = names
    if name == "json" and space is not None:
        return json_schema(found[name], whitespace=as_instance(space, str, "whitespace_pattern"))
    if name in ("regex", "grammar"):
        as_instance(found[name], str, name)
    return kinds[name](found[name])


def _choice(texts: Any) -> Grammar:
    """One of several texts."""
    given = as_instance(texts, list, "choice")
    if not given or not all(isinstance(each, str) for each in given):
        raise ValueError(f"choice: expected a list of texts, got {short(given)}")
    return regex("|".join(re.sub(r"([^\w\s])", r"\\\1", each) for each in given))


def chunk_of(
    index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, text_of: Callable[[int], str]
) -> dict[str, Any]:
    """New tokens of the sample `index` as a chunk; `text_of` gives the text of a token."""
    chunk: dict[str, Any] = {"token_ids": list(tokens), "index": index}
    if logprobs is not None:
        chunk["log_probs"] = [each.logprob for each in logprobs]
        chunk["top_logprobs"] = [
            [_entry(rank, token, value, text_of(token)) for rank, (token, value) in enumerate(each.top.items(), 1)]
            for each in logprobs
        ]
    return chunk


def _entry(rank: int, token: int, logprob: float, text: str) -> dict[str, Any]:
    """One of the most likely tokens; a part of a character has no bytes."""
    found = {"rank": rank, "token_id": token, "token": text, "logprob": logprob}
    return found if "\ufffd" in text else found | {"bytes": list(text.encode())}


def end_of(reason: str, prompt: int, cached: int, new: int) -> dict[str, Any]:
    """The last chunk: why the answer ended, and the numbers of tokens, of all samples together."""
    usage = {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"token_ids": [], "index": 0, "finish_reason": _REASONS[reason], "completion_usage": usage}
