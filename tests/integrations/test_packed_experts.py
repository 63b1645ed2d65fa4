"""Packed experts of mixtures, beside those of transformers over the values that the packed weights have."""

import copy

import pytest
import torch
from hf_models import left_padded, logits_of, make_model
from hf_packed import packed_experts, packed_layers, unpacked

from kvcache.integrations.transformers import PagedCache, pack_weights

pytestmark = pytest.mark.one_build


def run(model):
    ids, mask = left_padded([12, 9], 12)
    model.set_attn_implementation("kvcache")
    return logits_of(model, PagedCache(model.config, dtype="f32"), ids, mask, 8)[mask.bool()]


def experts_of(kind, dtype=torch.float32, weights="auto"):
    """The packed experts of a layer, transformers' module with the same values, and their number of channels."""
    model = make_model(kind, dtype=dtype)
    pack_weights(model, weights, activations="exact")
    packed = next(iter(packed_experts(model).values()))
    return packed, unpacked(packed), model.config.hidden_size


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "dots1"])
@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "q8")]
)
@pytest.mark.parametrize("n", [0, 1, 7, 150])
@torch.no_grad()
def test_experts(kind, dtype, weights, n):
    packed, theirs, width = experts_of(kind, dtype, weights)
    x, count = torch.randn(n, width).to(dtype), packed.num_experts
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(n)]) if n else torch.empty(0, 2, dtype=torch.int64)
    chosen[n // 2 :] = chosen[n // 2 :].clamp(max=count - 2)  # the last expert has few rows, or none
    shares = torch.rand(n, 2).to(dtype)
    got, want = packed(x, chosen, shares), theirs(x, chosen, shares)
    assert got.dtype == dtype
    tolerance = 1e-3 if weights == "q8" else 0.02 if dtype == torch.bfloat16 else 1e-5
    assert got.shape == want.shape == x.shape
    assert float((got - want).abs().max() if n else 0) <= tolerance * float(want.abs().max() if n else 0)
    if n:
        one = packed(x[:1], chosen[:1], shares[:1])
        torch.testing.assert_close(one, got[:1])  # not bit for bit: torch's gates round by a row's place in memory


@torch.no_grad()
def test_rows_without_an_expert():
    """transformers gives them a number above the last expert."""
    packed, theirs, width = experts_of("mixtral")
    x, chosen, shares = torch.randn(3, width), torch.tensor([[0, 4], [4, 4], [1, 3]]), torch.rand(3, 2)
    assert packed.num_experts == 4
    got = packed(x, chosen, shares)
    torch.testing.assert_close(got[[0, 2]], theirs(x, chosen.clamp(max=3), shares * (chosen < 4))[[0, 2]])
    assert (got[1] == 0).all()


def test_what_packed_experts_refuse_and_show():
    packed, _, width = experts_of("mixtral", weights="q8")
    chosen, shares = torch.tensor([[0, 1]]), torch.rand(1, 2)
    with pytest.raises(RuntimeError, match=r"x: expected no gradients"):
        packed(torch.randn(1, width, requires_grad=True), chosen, shares)
    with pytest.raises(ValueError, match=r"x: expected a tensor on the CPU"):
        packed(torch.randn(1, width, device="meta"), chosen, shares)
    with pytest.raises(NotImplementedError, match=r"state_dict: expected a model before pack_weights"):
        packed.state_dict()
    assert f"4 x ({width}, " in repr(packed)
    assert "q8_0" in repr(packed)
    model = make_model("mixtral")
    pack_weights(model, skip=["experts"])
    assert not packed_experts(model)
    broken = make_model("mixtral")
    experts = next(name for name, each in broken.named_modules() if name.endswith(".experts"))
    broken.get_submodule(experts).down_proj.data[1, 2, 3] = float("inf")
    with pytest.raises(ValueError, match=rf"{experts}.down_proj: expected finite numbers .*, got inf"):
        pack_weights(broken, "q4")
    assert not packed_layers(broken)


@torch.no_grad()
def test_copies_of_packed_experts_and_compiled_ones():
    packed, theirs, width = experts_of("mixtral")
    x, chosen, shares = torch.randn(3, width), torch.tensor([[0, 1], [2, 3], [3, 1]]), torch.rand(3, 2)
    packed.note = ["x"]
    copied = copy.deepcopy(packed)
    assert copied.note == ["x"]
    assert copied.note is not packed.note
    assert [a is b for a, b in zip(copied.matrices, packed.matrices, strict=True)] == [True] * 8
    compiled = torch.compile(lambda x: packed(x, chosen, shares) + 1, backend="eager")
    for got in (copied(x, chosen, shares), compiled(x) - 1):
        torch.testing.assert_close(got, theirs(x, chosen, shares))
    torch._dynamo.reset()


def test_experts_with_hooks_stay():
    model = make_model("mixtral")
    name, experts = next((name, each) for name, each in model.named_modules() if name.endswith(".experts"))
    experts.register_forward_hook(lambda module, inputs, out: out * 10)
    want = run(model)
    pack_weights(model)
    assert model.get_submodule(name) is experts
    assert packed_experts(model)
    torch.testing.assert_close(run(model), want, rtol=0, atol=1e-5)


def test_an_interrupt_leaves_experts_that_work(monkeypatch):
    model = make_model("mixtral")
    want = run(model)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvcache.integrations.transformers.weights.PackedExperts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack_weights(model)
    assert packed_layers(model)
    assert not packed_experts(model)
    torch.testing.assert_close(run(model), want, rtol=0, atol=1e-5)
    assert pack_weights(model).layers == len(packed_experts(model)) > 0
    torch.testing.assert_close(run(model), want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_one_module_of_experts_with_two_names():
    inner = next(each for name, each in make_model("mixtral").named_modules() if name.endswith(".experts"))
    model, theirs = torch.nn.ModuleDict({"a": inner, "b": inner}), copy.deepcopy(inner)
    assert pack_weights(model).layers == 1
    assert model["a"] is model["b"]
    x, chosen, shares = torch.randn(3, inner.hidden_dim), torch.tensor([[0, 1], [2, 3], [3, 1]]), torch.rand(3, 2)
    torch.testing.assert_close(model["a"](x, chosen, shares), theirs(x, chosen, shares))
    torch.testing.assert_close(inner(x, chosen, shares), theirs(x, chosen, shares))  # the module itself stays whole


@pytest.mark.parametrize("n", [1, 3, 100])
@torch.no_grad()
def test_inputs_whose_memory_has_other_values(n):
    """Tensors with the sign in a flag, and with gaps between elements."""
    packed, _, width = experts_of("mixtral")
    x, chosen, shares = torch.randn(n, width), torch.tensor([[0, 3]] * n), torch.rand(n, 2)
    gaps = torch.zeros(n, 2 * width)[:, ::2].copy_(x)
    torch.testing.assert_close(packed(torch._neg_view(-x), chosen, shares), packed(x, chosen, shares))
    torch.testing.assert_close(packed(gaps, chosen, shares), packed(x, chosen, shares))
