"""A model that `pack_weights` has packed, and the model with torch's layers again."""

import copy

import torch

from kvcache.integrations.transformers.experts import PackedExperts
from kvcache.integrations.transformers.linear import PackedLinear


def packed_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def packed_experts(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedExperts)}


def twin_of(model):
    """The model with torch's layers again, whose weights have the values of the packed ones."""
    twin = copy.deepcopy(model)
    for name, layer in packed_layers(model).items():
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.weight.data = torch.from_numpy(layer.matrix.to_float32()).to(layer.weight.dtype)
        if layer.bias is not None:
            linear.bias.data = layer.bias
        twin.set_submodule(name, linear)
    for name, layer in packed_experts(model).items():
        twin.set_submodule(name, unpacked(layer))
    return twin


def unpacked(layer):
    """transformers' module of experts, with the values of packed weights."""
    module = copy.deepcopy(layer.experts)
    for name, part in (("gate_up_proj" if module.has_gate else "up_proj", layer._up), ("down_proj", layer._down)):
        weight = torch.stack([torch.from_numpy(matrix.to_float32()) for matrix in part.matrices]).to(layer._dtype)
        setattr(module, name, torch.nn.Parameter(weight.mT.contiguous() if module.is_transposed else weight))
        if module.has_bias:
            setattr(module, f"{name}_bias", torch.nn.Parameter(torch.from_numpy(part.bias).to(layer._dtype)))
    return module
