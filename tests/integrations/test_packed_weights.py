"""`pack_weights` beside the layers of torch over the values that the packed weights have."""

import copy
import pickle

import pytest
import torch
from hf_models import PACKED, left_padded, logits_of, make_model
from hf_packed import packed_experts, packed_layers, twin_of

from kvcache.integrations.transformers import PackedWeights, PagedCache, pack_weights
from kvcache.kernels.matrix import MATRIX_FORMATS

pytestmark = pytest.mark.one_build

IDS, MASK = left_padded([12, 9], 12)


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
    with pytest.warns(UserWarning, match=r"^model: expected layers .*, got a model packed in q4_1, q8_0; nothing has"):
        assert pack_weights(model, "q8") == PackedWeights(0, 0, 0)
    assert layers["lm_head"].weight.shape == embedding.shape
    assert layers["lm_head"].weight.dtype == torch.float32


def test_skipped_layers():
    model = make_model("llama")
    pack_weights(model, "q8", skip=["lm_head", "down_proj"])
    left = {name.rpartition(".")[2] for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert left == {"lm_head", "down_proj"}
    run(model)


@torch.no_grad()
def test_layers_with_hooks_stay():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    model["q_proj"].register_forward_hook(lambda layer, inputs, out: out * 10)
    model["k_proj"].register_forward_pre_hook(lambda layer, inputs: inputs[0] * 10)
    forward = model["v_proj"].forward
    model["v_proj"].forward = lambda x: forward(x) * 10
    x = torch.randn(2, 32)
    want = {name: layer(x) for name, layer in model.items()}
    assert pack_weights(model).layers == 1
    assert list(packed_layers(model)) == ["o_proj"]
    for name, layer in model.items():
        torch.testing.assert_close(layer(x), want[name])


@torch.no_grad()
def test_copies_have_hooks_and_attributes():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 32)}).eval()
    pack_weights(model)
    model["a"].register_forward_hook(lambda layer, inputs, out: out * 10)
    model["a"].note = ["x"]
    copied, x = copy.deepcopy(model), torch.randn(2, 32)
    assert torch.equal(copied["a"](x), model["a"](x))
    assert copied["a"].note == ["x"]
    assert copied["a"].note is not model["a"].note
    assert not copied["a"].training


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
    with pytest.raises(NotImplementedError, match=r"weight: expected a model before pack_weights, got packed weights"):
        model[0].weight = torch.nn.Parameter(torch.randn(32, 64))
    tied = make_model("llama", tie_word_embeddings=True)
    pack_weights(tied)
    with pytest.raises(NotImplementedError, match=r"weight: expected a model before pack_weights"):
        tied.tie_weights()
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
