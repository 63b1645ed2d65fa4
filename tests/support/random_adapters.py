"""Random adapters of networks, and the network with one merged into its weights: the oracle of what an adapter adds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcache.kernels.matrix import Matrix
from kvcache.networks.adapter import Adapter, LowRank, adapted_shapes, floats_of
from kvcache.networks.model import Transformer
from kvcache.networks.row_adapters import PLACES


def random_adapter(config, seed=0, rank=3, *, projections=None, invocation=None, dtype=np.float32, name="adapter"):
    """An adapter whose parts have ranks `rank`, `rank + 1`, ...; of some projections, or of all."""
    rng, found = np.random.default_rng(seed), {}
    for place, (rows, columns) in adapted_shapes(config).items():
        if projections is None or place[1] in projections:
            own = rank + len(found) % 3
            a = rng.standard_normal((own, columns)).astype(np.float32) / np.float32(columns**0.5)
            b = rng.standard_normal((rows, own)).astype(np.float32) / np.float32(own**0.5)
            found[place] = LowRank(as_type(a, dtype), as_type(b, dtype), 0.25 + 0.1 * (len(found) % 2))
    return Adapter(found, invocation, name)


def as_type(values, dtype):
    """float32 numbers of a type of adapters; bf16 cuts them."""
    if np.dtype(dtype).names:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    return values.astype(dtype)


def merged(model, adapter):
    """The network, of float weights, with `W + scale * B @ A` in place of each W that the adapter changes."""
    layers = []
    for number, layer in enumerate(model.weights.layers):
        fields = {"qkv": layer.qkv, "output": layer.output}
        mlp = layer.mlps[0] if layer.mlps else None
        fields |= {} if mlp is None else {"gate_up": mlp.gate_up, "down": mlp.down}
        changed = {place: added(model, adapter, number, place, matrix) for place, matrix in fields.items()}
        own = {place: changed[place] for place in ("qkv", "output")}
        if mlp is not None:
            first = replace(mlp, gate_up=changed["gate_up"], down=changed["down"])
            own["mlps"] = (first, *layer.mlps[1:])
        layers.append(replace(layer, **own))
    return Transformer(model.config, replace(model.weights, layers=tuple(layers)), model.activations)


def added(model, adapter, layer, place, matrix):
    """A matrix of a layer with what an adapter adds to it, summed in float64."""
    shapes, column, values = adapted_shapes(model.config), 0, None
    for name in PLACES[place]:
        own = adapter.matrices.get((layer, name))
        if own is not None:
            values = matrix.to_float32().astype(np.float64) if values is None else values
            change = floats_of(own.b).astype(np.float64) @ floats_of(own.a).astype(np.float64)
            values[column : column + len(own.b)] += own.scale * change
        column += shapes.get((layer, name), (0, 0))[0]
    if values is None:
        return matrix
    found = Matrix(*values.shape, "f32")
    found.put(0, values.astype(np.float32))
    return found
