"""`save_packed` and `load_packed`: a fresh model with the file computes what the packed one did, bit for bit."""

import copy

import pytest
import torch
from hf_models import left_padded, logits_of, make_model
from hf_packed import packed_experts, packed_layers
from safetensors.torch import load_file, save_file

from kvcache.errors import CheckpointError
from kvcache.integrations.transformers import PackedWeights, PagedCache, load_packed, pack_weights, save_packed

pytestmark = pytest.mark.one_build

IDS, MASK = left_padded([12, 9], 12)


def run(model):
    model.set_attn_implementation("kvcache")
    return logits_of(model, PagedCache(model.config, dtype="f32"), IDS, MASK, 8)[MASK.bool()]


def fresh(model, kind, **sizes):
    """A model of the same configuration with other values."""
    other = make_model(kind, **sizes)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.uniform_(-1, 1)
    return other


@pytest.mark.parametrize(
    ("kind", "weights", "sizes"),
    [
        ("llama", "q8", {}), ("llama", "auto", {"dtype": torch.bfloat16}),
        ("llama", "q4", {"tie_word_embeddings": True}),
        ("gpt2", "q4", {}), ("qwen2", "f16", {}), ("mixtral", "q4", {}), ("gpt_oss", "q8", {}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_file_is_the_model(kind, weights, sizes, tmp_path):
    model = make_model(kind, **sizes)
    report = pack_weights(model, weights, activations="exact")
    want = run(model)
    save_packed(model, tmp_path / "x")
    other = fresh(model, kind, **sizes)
    loaded = load_packed(other, tmp_path / "x")
    assert loaded == PackedWeights(report.layers, report.nbytes, report.nbytes_before)
    assert torch.equal(run(other), want)
    assert packed_layers(other).keys() == packed_layers(model).keys()
    assert packed_experts(other).keys() == packed_experts(model).keys()
    save_packed(other, tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_what_is_not_packed_stays_as_it_is(tmp_path):
    model = make_model("llama")
    pack_weights(model, "q8", skip=["lm_head", "down_proj"])
    save_packed(model, tmp_path / "x")
    other = fresh(model, "llama")
    load_packed(other, tmp_path / "x")
    assert type(other.lm_head) is torch.nn.Linear
    assert torch.equal(run(other), run(model))


def test_files_that_are_refused(tmp_path):
    """A model that does not fit its file is as it was."""
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"^model: expected one that pack_weights has packed, got none"):
        save_packed(model, tmp_path / "x")
    pack_weights(model, "q4")
    save_packed(model, tmp_path / "x")
    tensors = load_file(tmp_path / "x")
    save_file(tensors, tmp_path / "bare")
    wider, other = make_model("llama", vocab_size=67), make_model("llama")
    for it, file, message in (
        (wider, "x", r"x: .*: expected \(67, .*\), got \(61, "),
        (make_model("qwen2"), "x", r"x: .*bias: expected \(.*\), got none"),
        (other, "bare", "bare: expected a file of save_packed, got another one"),
    ):
        before = copy.deepcopy(it.state_dict())
        with pytest.raises(CheckpointError, match=message):
            load_packed(it, tmp_path / file)
        assert all(torch.equal(before[name], tensor) for name, tensor in it.state_dict().items())
    with pytest.raises(OSError, match="nowhere"):
        load_packed(other, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="expected packed weights of this model, got"):
        load_packed(model, tmp_path / "x")
