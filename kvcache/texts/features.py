"""The features of a network that exclude settings; see `kvcache.support.exclusions`."""

from __future__ import annotations

from kvcache.networks.protocols import Model, is_causal, latent_layers, layer_attention, layer_recurrences

__all__ = ["features_of"]


def features_of(model: Model) -> frozenset[str]:
    """The names of the features that a network has."""
    attention, regime = layer_attention(model), getattr(model, "regime", None)
    known = [each for each in attention if each is not None]
    sizes = {(each.num_kv_heads, each.head_dim, each.latent) for each in known}
    own = [each for each in known if each.window is None and each.kv_layer is None]
    whole = {(each.num_kv_heads, each.head_dim, each.latent) for each in own}
    found = {
        "window": any(each.window is not None for each in known), "state": bool(layer_recurrences(model)),
        "chunked": any(each.chunked for each in known),
        "silent": None in attention, "latent": bool(latent_layers(model)), "sizes": len(sizes) > 1,
        "index": any(each.index is not None for each in known),
        "shared": any(each.kv_layer is not None for each in known), "no whole": not whole,
        "whole sizes": len(whole) > 1,
        "both ways": not is_causal(model),
        "positions": regime is not None and regime(1) != regime(model.config.max_position_embeddings),
    }
    return frozenset(name for name, is_present in found.items() if is_present)
