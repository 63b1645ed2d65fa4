"""Packed layers that a model calls one after another with the same input, beside the layers of torch."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcache.integrations.transformers import pack_weights

pytestmark = pytest.mark.one_build


class Counted:
    """A `Joint`'s matrix that counts its products."""

    def __init__(self, matrix):
        self.matrix, self.calls = matrix, 0

    def __getattr__(self, name):
        return getattr(self.matrix, name)

    def multiply_tensors(self, *arguments, **options):
        self.calls += 1
        self.matrix.multiply_tensors(*arguments, **options)


def attention_like(dtype=torch.float32, bias=True):
    """q_proj, k_proj, v_proj and o_proj, packed; the same layers of torch; counts of products of the first three."""
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 20, "o_proj": 24}
    torch.manual_seed(5)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(24, size, bias=bias) for name, size in sizes.items()}).to(dtype)
    theirs = copy.deepcopy(model)
    pack_weights(model)
    joint = model["q_proj"]._joint
    assert joint is model["k_proj"]._joint is model["v_proj"]._joint is not model["o_proj"]._joint
    joint.matrix = Counted(joint.matrix)
    return model, theirs, joint.matrix


def same(model, theirs, name, x):
    torch.testing.assert_close(model[name](x), theirs[name](x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_layers_with_the_same_input_are_multiplied_once(dtype, bias):
    model, theirs, joint = attention_like(dtype, bias)
    for step in range(4):
        x = torch.randn(2, 3, 24).to(dtype)
        outs = [model[name](x) for name in ("q_proj", "k_proj", "v_proj")]
        for out, name in zip(outs, ("q_proj", "k_proj", "v_proj"), strict=True):
            torch.testing.assert_close(out, theirs[name](x))
            biases = None if model[name].bias is None else model[name]._joint.biases[model[name]._layer]
            alone = model[name].matrix.multiply(x.float().reshape(6, 24).numpy(), biases)
            assert torch.equal(out, torch.from_numpy(alone).reshape(out.shape).to(dtype))
        assert joint.calls == step  # not yet for the first input
        assert model["q_proj"]._joint._last.x is None


@torch.no_grad()
def test_inputs_that_only_look_the_same():
    model, theirs, joint = attention_like()
    x = torch.randn(1, 24)
    for name in ("q_proj", "k_proj", "v_proj"):
        same(model, theirs, name, x)
    same(model, theirs, "q_proj", x)  # x is known, but all have had theirs
    assert joint.calls == 1
    x += 1
    same(model, theirs, "k_proj", x)  # not what was computed before x changed
    same(model, theirs, "v_proj", x.clone())
    same(model, theirs, "q_proj", x[:, :])
    same(model, theirs, "q_proj", x)
    same(model, theirs, "q_proj", x)  # a second call of one layer
    assert joint.calls == 1  # the last inputs were not given to all
    for _ in range(2):
        y = torch.randn(3, 24)
        for name in ("v_proj", "q_proj", "k_proj"):
            same(model, theirs, name, y)
    assert joint.calls == 2
    first = model["v_proj"](y)
    second = model["v_proj"](y)
    first.zero_()
    torch.testing.assert_close(second, theirs["v_proj"](y))  # each call has a result of its own


@torch.no_grad()
def test_inputs_of_all_kinds_to_layers_that_are_called_together():
    model, theirs, joint = attention_like()
    wide = torch.randn(6, 48)
    kinds = [
        wide[:, ::2], wide[:, :24], torch.randn(24, 6).T, torch.randn(24), torch.randn(2, 0, 24), torch.randn(40, 24),
        torch.randn(3, 24).half(), torch.randn(3, 24).double(), torch._neg_view(torch.randn(3, 24)),
    ]
    for x in kinds:
        for _ in range(3):
            for name in ("q_proj", "k_proj", "v_proj"):
                want = torch.nn.functional.linear(x.float(), theirs[name].weight, theirs[name].bias).to(x.dtype)
                torch.testing.assert_close(model[name](x), want, atol=1e-3, rtol=1e-3)
    with torch.inference_mode():
        calls = joint.calls
        for _ in range(3):
            x = torch.randn(1, 24)
            for name in ("q_proj", "k_proj", "v_proj"):
                same(model, theirs, name, x)
                x.add_(1)  # which torch does not count
        assert joint.calls == calls
    with pytest.raises(ValueError, match=r"x: expected \(..., 24\), got \(..., 23\)"):
        model["q_proj"](torch.randn(2, 23))


@torch.no_grad()
def test_threads_call_layers_together():
    model, theirs, _ = attention_like()

    def work(seed):
        made = torch.Generator().manual_seed(seed)
        for _ in range(300):
            x = torch.randn(1, 24, generator=made)
            for name in ("q_proj", "k_proj", "v_proj"):
                same(model, theirs, name, x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(torch.no_grad()(work), range(4)))


def test_copies_call_layers_together():
    model, theirs, _ = attention_like()
    copied = copy.deepcopy(model)
    assert copied["q_proj"]._joint is copied["v_proj"]._joint is not model["q_proj"]._joint
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(1, 24)
            for name in ("q_proj", "k_proj", "v_proj"):
                same(copied, theirs, name, x)
                same(model, theirs, name, x)


@pytest.mark.parametrize("change", ["dtype", "bias", "width", "rows", "tied", "missing"])
def test_layers_that_cannot_be_one_matrix(change):
    sizes = {"q_proj": 20 if change == "rows" else 32, "k_proj": 32, "v_proj": 16}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(24, size) for name, size in sizes.items()})
    if change == "dtype":
        model["k_proj"].to(torch.bfloat16)
    elif change == "bias":
        model["k_proj"].bias = None
    elif change == "width":
        model["k_proj"] = torch.nn.Linear(32, 32)
    elif change == "tied":
        model["k_proj"].weight = model["q_proj"].weight
    elif change == "missing":
        del model["v_proj"]
    theirs = copy.deepcopy(model)
    pack_weights(model)
    joints = {id(layer._joint) for layer in model.values()}
    assert len(joints) == len(model)
    with torch.no_grad():
        for _ in range(3):
            for name, layer in theirs.items():
                same(model, theirs, name, torch.randn(2, layer.in_features).to(layer.weight.dtype))


@torch.no_grad()
def test_compiled_around_packed_layers():
    model, theirs, joint = attention_like()
    names = ("q_proj", "k_proj", "v_proj")
    compiled = torch.compile(lambda x: torch.cat([model[name](x) * 2 for name in names], -1), backend="eager")
    for step in range(3):
        x = torch.randn(2, 24)
        torch.testing.assert_close(compiled(x), torch.cat([theirs[name](x) * 2 for name in names], -1))
        assert joint.calls == step
    torch._dynamo.reset()
