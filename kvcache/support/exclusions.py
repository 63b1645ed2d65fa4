"""The table of what goes with what: settings that exclude each other, or that some networks exclude.

Code asks it by `expect` and `excluded`; the guide `combinations.md` prints it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from kvcache.support.arguments import short

__all__ = ["EXCLUSIONS", "FEATURES", "Exclusion", "excluded", "expect"]

# Settings and kinds of networks that exclude others: their names in this table, and their words in messages.
FEATURES = {
    "eviction": "an eviction_policy",
    "endless": "an eviction_policy without end",
    "sparse": "sparse_tokens",
    "spill": "spill",
    "logprobs": "prompt_logprobs",
    "tiers": "tiers",
    "grammar": "a grammar",
    "adapter": "an adapter",
    "window": "layers that have a window",
    "state": "layers that keep a state",
    "silent": "layers that do not attend",
    "latent": "layers whose V is a part of K",
    "index": "layers whose indexers choose tokens",
    "shared": "layers that read K and V of others",
    "sizes": "layers of several sizes",
    "positions": "positions that depend on the length of the text",
    "both ways": "layers whose tokens see later ones",
    "no whole": "no layers that keep all tokens",
    "whole sizes": "layers that keep all tokens and have several sizes",
}


class Exclusion(NamedTuple):
    """A setting and the features that it does not go with.

    Attributes:
        setting: its name; what follows a colon says which values, or of what.
        expected: the value that goes with the features, as messages say it.
        features: names of `FEATURES`; a message has the words of the first one that is present.
        why: the reason.
    """

    setting: str
    expected: str
    features: tuple[str, ...]
    why: str


_UNLIKE = ("window", "state", "silent", "index", "latent", "shared", "sizes", "positions", "both ways")
_CHOOSES = "a policy chooses among the tokens of layers that are alike, at positions that stay"
_ELSEWHERE = ("eviction", "sparse", "window", "state", "index", "shared", "both ways", "logprobs", "adapter")
_AS_STORED = "tokens are read at other places than they were computed at, all of them, as the network stored them"
_ENDS = "the text of a grammar ends where nothing may follow"
EXCLUSIONS = {row.setting: row for row in (
    Exclusion("eviction_policy", "none", _UNLIKE, _CHOOSES),
    Exclusion("policy: of a compressed prefix", "none", _UNLIKE, _CHOOSES),
    Exclusion("engine: that compresses a prefix", "none", ("eviction", "sparse"), "no text can stand behind it there"),
    Exclusion(
        "engine: of a PrefixCachedEngine", "none", ("eviction", "both ways"),
        "a prefix with holes cannot be shared, nor one that depends on what follows",
    ),
    Exclusion("generate", "none", ("both ways",), "the rows of a text depend on its last token: embed runs it whole"),
    Exclusion(
        "prefix", "None", ("eviction", "sparse", "logprobs", "adapter"),
        "its heads have tokens of their own, which stay, and are those of the network without an adapter",
    ),
    Exclusion("prefix: of parts of cached texts", "None", _ELSEWHERE, _AS_STORED),
    Exclusion("segments", "None", _ELSEWHERE, _AS_STORED),
    Exclusion("kvcache_mode", "recompute", _ELSEWHERE, "tokens behind an edit see parts of the text before it"),
    Exclusion("embed", "none", ("eviction",), "a vector is of all tokens of its text"),
    Exclusion("keep", "none", ("eviction", "logprobs"), "such requests share no blocks, so none stay cached"),
    Exclusion("hint", "none", ("eviction", "both ways"), "no text is cached that it could be about"),
    Exclusion("tiers", "none", ("eviction", "both ways"), "blocks with holes are of no use to another text"),
    Exclusion("kv_events", "none", ("eviction", "both ways"), "no blocks are cached that routers could be told of"),
    Exclusion("autosave", "None", ("tiers",), "tiers may have a DirectoryTier of their own"),
    Exclusion("draft", "None", ("eviction",), "draft tokens that do not hold are cut off; what they evicted is gone"),
    Exclusion(
        "draft: of a network", "None or ngram", ("eviction", "spill"),
        "the K and V of drafts keep all tokens, in memory",
    ),
    Exclusion(
        "spill", "None", ("eviction", "no whole", "state"),
        "what spills are blocks of layers that keep all tokens; the memory of states is counted beside those",
    ),
    Exclusion(
        "sparse_tokens", "None", ("eviction", "no whole", "index", "latent", "whole sizes", "both ways"),
        "a query chooses among all tokens by summaries of their keys, in one cache of layers of one size, and once",
    ),
    Exclusion(
        "calibrate", "None or False", ("shared", "sizes", "state", "silent", "index", "both ways"),
        "its centres are of one size, of texts that run in pieces, and indexers have keys of their own",
    ),
    Exclusion(
        "residual_length", "0 or none", ("window", "shared", "sizes", "endless", "index", "both ways"),
        "tokens stay unpacked in whole groups of one cache, at positions that stay, and all of them are read",
    ),
    Exclusion("dtype: of each layer", "one format", ("shared", "eviction"), "layers share K and V, or a budget"),
    Exclusion(
        "dtype: a budget of bits", "formats", ("window", "shared", "sizes", "endless", "eviction", "both ways"),
        "losses are measured of layers that are alike",
    ),
    Exclusion("ignore_eos", "none", ("grammar",), _ENDS),
    Exclusion("min_tokens", "none", ("grammar",), _ENDS),
)}


def excluded(setting: str, features: Collection[str]) -> str:
    """The words of the first of some features that a setting does not go with; empty: it goes with all.

    Args:
        setting: a key of `EXCLUSIONS`.
        features: names of `FEATURES`.
    """
    return next((FEATURES[name] for name in EXCLUSIONS[setting].features if name in features), "")


def expect(setting: str, value: Any, features: Collection[str]) -> None:
    """Raise ValueError if a setting has a value, other than None, and does not go with one of the features."""
    if value is not None and (words := excluded(setting, features)):
        name = setting.partition(":")[0]
        raise ValueError(f"{name}: expected {EXCLUSIONS[setting].expected} with {words}, got {short(value)}")
