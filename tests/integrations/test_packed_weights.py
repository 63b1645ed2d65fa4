"""`pack_weights` beside the layers of torch over the values that the packed weights have."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hf_models import PACKED, left_padded, logits_of, make_model

from kvcache.core.matrix import MATRIX_FORMATS
from kvcache.integrations.transformers import PackedWeights, PagedCache, pack_weights
from kvcache.integrations.transformers.experts import PackedExperts
from kvcache.integrations.transformers.linear import PackedLinear

pytestmark = [pytest.mark.one_build, pytest.mark.no_level]

IDS, MASK = left_padded([12, 9], 12)


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


def run(model):
    model.set_attn_implementation("kvcache")
    return logits_of(model, PagedCache(model.config, dtype="f32"), IDS, MASK, 8)[MASK.bool()]


def difference(logits, others):
    return float((logits - others).abs().max() / (others.max() - others.min()))


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_weights_as_they_are_give_the_same_logits(kind):
    model = make_model(kind)
    want = run(model)
    report = pack_weights(model)
    assert report.layers == len(packed_layers(model)) + len(packed_experts(model)) > 0
    assert not [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert difference(run(model), want) < 1e-5


FORMATS = ["f16", "bf16", "q8", "q4"]


@pytest.mark.parametrize(
    ("kind", "weights", "activations"),
    [(kind, weights, "int8") for kind in ("llama", "gpt2", "gemma2", "qwen2") for weights in FORMATS]
    + [(kind, weights, "exact") for kind in ("llama", "gpt2", "mixtral", "gpt_oss") for weights in FORMATS[2:]],
)
def test_other_formats_give_the_logits_of_their_values(kind, weights, activations):
    """Experts with exact activations alone: near a tie of two experts a small error chooses the other one."""
    model = make_model(kind)
    pack_weights(model, weights, activations=activations)
    want = run(twin_of(model))
    bounds = {"q8": {"int8": 0.05, "exact": 5e-4}, "q4": {"int8": 0.05, "exact": 5e-4}}
    assert difference(run(model), want) < bounds.get(weights, {}).get(activations, 1e-5)


@pytest.mark.parametrize("weights", ["auto", "bf16", "q8"])
def test_bfloat16_models(weights):
    """Against float32 logits of the packed values, packed layers are no worse than torch's in bfloat16."""
    model = make_model("llama", dtype=torch.bfloat16, hidden_size=64, vocab_size=301)
    pack_weights(model, weights, activations="exact")
    small = twin_of(model)
    exact = copy.deepcopy(small).float()
    want = run(exact)
    theirs = run(small).float() - want
    ours = run(model).float() - want
    assert ours.square().mean().sqrt() < 1.2 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
def test_generate(weights):
    model = make_model("llama")
    pack_weights(model, weights, activations="exact")
    twin = twin_of(model)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASK, "output_logits": True}
    options["return_dict_in_generate"] = True
    model.set_attn_implementation("kvcache")
    got = model.generate(IDS, past_key_values=PagedCache(model.config, dtype="f32"), **options)
    want = twin.generate(IDS, **options)
    same = (got.sequences == want.sequences).all(0).long().cumprod(0).sum() - IDS.shape[1]
    assert same > 2
    for ours, theirs in zip(got.logits[:same], want.logits[:same], strict=True):
        assert difference(ours, theirs) < 1e-3


def test_what_is_packed_and_in_which_format():
    model = make_model("mixtral", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.clone()
    sizes = []
    report = pack_weights(model, "q4", progress=lambda done, size: sizes.append((done, size)))
    layers = packed_layers(model)
    assert {layer.matrix.format for name, layer in layers.items() if name != "lm_head"} == {"q4_1"}
    assert layers["lm_head"].matrix.format == "q8_0"
    assert "gate" not in {name.rpartition(".")[2] for name in layers}
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    experts = packed_experts(model)
    assert {matrix.format for each in experts.values() for matrix in each.matrices} == {"q4_1"}
    nbytes = sum(each.matrix.nbytes for each in layers.values())
    nbytes += sum(matrix.nbytes for each in experts.values() for matrix in each.matrices)
    assert report == PackedWeights(len(layers) + len(experts), nbytes, sizes[-1][1])
    assert [done for done, _ in sizes] == sorted({done for done, _ in sizes})
    assert sizes[-1][0] == sizes[-1][1]
    assert pack_weights(model, "q8") == PackedWeights(0, 0, 0)
    assert layers["lm_head"].weight.shape == embedding.shape
    assert layers["lm_head"].weight.dtype == torch.float32


def test_skipped_layers():
    model = make_model("llama")
    pack_weights(model, "q8", skip=["lm_head", "down_proj"])
    left = {name.rpartition(".")[2] for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert left == {"lm_head", "down_proj"}
    run(model)


def test_weights_are_shared_where_they_were():
    inner = torch.nn.Linear(40, 24)
    model = torch.nn.ModuleDict({"a": inner, "b": inner, "c": torch.nn.Linear(40, 24, bias=False)})
    model["c"].weight = inner.weight
    assert pack_weights(model).layers == 3
    assert model["a"] is model["b"] is not model["c"]
    assert model["a"].matrix is model["c"].matrix
    copied = copy.deepcopy(model)
    assert copied["a"].matrix is model["a"].matrix
    x = torch.randn(2, 3, 40)
    with torch.no_grad():
        torch.testing.assert_close(model["a"](x), torch.nn.functional.linear(x, inner.weight, inner.bias))
        assert model["a"](x[:, :0]).shape == (2, 0, 24)


def test_the_weights_of_torch_are_freed():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    seen = []
    for layer in model:
        layer.weight.register_hook(lambda grad: grad)
        finaliser = type("Finaliser", (), {"__del__": lambda self: seen.append(1)})()
        layer.finaliser = finaliser
        del finaliser
    del layer
    pack_weights(model, progress=lambda done, size: seen.append((done, size)))
    assert seen == [1, (8192, 10240), 1, (10240, 10240)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_inputs(dtype):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32)).to(dtype)
    x = torch.randn(5, 64).to(dtype)
    want = layer(x)
    pack_weights(layer)
    with torch.no_grad():
        got = layer(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.detach())


def test_what_raises_and_changes_nothing():
    model = make_model("llama")
    want = run(model)
    with pytest.raises(ValueError, match=r"weights: expected one of auto, f32, .*, got 'q5'"):
        pack_weights(model, "q5")
    with pytest.raises(ValueError, match=r"activations: expected one of int8, exact, bf16, got 'f32'"):
        pack_weights(model, activations="f32")
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        pack_weights("model")
    broken = copy.deepcopy(model)
    broken.model.layers[3].mlp.up_proj.weight.data[2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"model.layers.3.mlp.up_proj.weight: expected finite numbers .*, got nan"):
        pack_weights(broken, "q8")
    broken.model.layers[3].mlp.up_proj.weight.data[2, 3] = 1e6
    with pytest.raises(ValueError, match=r"up_proj.weight: expected finite numbers up to 65504 for f16, got 1e\+06"):
        pack_weights(broken, "f16")
    assert not packed_layers(broken)
    with pytest.raises(ValueError, match=r"lm_head.weight: expected float32, .* on the CPU, got torch.float64 on cpu"):
        pack_weights(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(8, 8).double()}))
    with pytest.raises(ValueError, match=r"a.weight: expected float32, .* on the CPU, got torch.float32 on meta"):
        pack_weights(torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8, device="meta")}))
    assert torch.equal(run(model), want)


def test_what_a_packed_layer_refuses():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    pack_weights(model, "q8")
    with pytest.raises(RuntimeError, match=r"x: expected no gradients"):
        model(torch.randn(2, 64, requires_grad=True))
    with pytest.raises(ValueError, match=r"x: expected a tensor on the CPU, .*, got one on meta"):
        model(torch.randn(2, 64, device="meta"))
    with pytest.raises(NotImplementedError, match=r"state_dict: expected a model before pack_weights"):
        model.state_dict()
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(model)
    with pytest.raises(KeyError, match="weight"):
        model[0].weight = torch.nn.Parameter(torch.randn(32, 64))
    assert "64, 32, bias=True, q8_0" in repr(model)
    assert set(MATRIX_FORMATS) >= {"q8_0", "q4_1"}


def test_an_interrupt_leaves_a_model_that_works():
    model = make_model("llama")
    want = run(model)

    def interrupt(done, size):
        if done > size // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_weights(model, progress=interrupt)
    layers = len(packed_layers(model))
    assert 0 < layers < 29
    assert difference(run(model), want) < 1e-5
    assert pack_weights(model).layers == 29 - layers
    assert difference(run(model), want) < 1e-5


# -- Layers that are called together ------------------------------------------------------------------------


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
    ]  # fmt: skip
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


# -- Experts ------------------------------------------------------------------------------------------------


def experts_of(kind, dtype=torch.float32, weights="auto"):
    """The packed experts of a layer, transformers' module with the same values, and their number of channels."""
    model = make_model(kind, dtype=dtype)
    pack_weights(model, weights, activations="exact")
    packed = next(iter(packed_experts(model).values()))
    return packed, unpacked(packed), model.config.hidden_size


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "dots1"])
@pytest.mark.parametrize(("dtype", "weights"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "q8")])
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
        torch.testing.assert_close(one, got[:1], rtol=0, atol=0)  # a row has the same bits in any company


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
    copied = copy.deepcopy(packed)
    assert [a is b for a, b in zip(copied.matrices, packed.matrices, strict=True)] == [True] * 8
    compiled = torch.compile(lambda x: packed(x, chosen, shares) + 1, backend="eager")
    for got in (copied(x, chosen, shares), compiled(x) - 1):
        torch.testing.assert_close(got, theirs(x, chosen, shares))
    torch._dynamo.reset()
