"""Text networks inside larger ones, compared with transformers on texts, and what is refused by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from dense_runs import run_dense
from places import GOLDEN
from seeded_weights import SEEDED
from tensor_files import pack_arrays

from kvcache.engine import InferenceEngine, ModelConfig, SamplingParams, Transformer
from kvcache.errors import CheckpointError
from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.towers import TOWERS

pytestmark = pytest.mark.one_build

TOWER_FOLDERS = sorted(path.parent for path in GOLDEN.glob("towers/*/config.json"))
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=64)


@pytest.fixture(params=TOWER_FOLDERS, ids=lambda folder: folder.name)
def folder(request):
    return request.param


def content_of(folder):
    return json.loads((folder / "config.json").read_text())


def copy(folder, place, rename=lambda name: name, **changes):
    """A copy of a folder with other names of tensors, and another configuration."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.npz", "*.safetensors"))
    checkpoint = Checkpoint(folder)
    arrays = {rename(name): checkpoint.read(name) for name in checkpoint._files}
    (place / "model.safetensors").write_bytes(pack_arrays(arrays))
    (place / "config.json").write_text(json.dumps(content_of(folder) | changes))
    return place


def test_logits_and_texts(folder):
    model = Transformer.from_pretrained(folder)
    with np.load(folder / "golden.npz") as arrays:
        for length in (33, 200):
            prompt, expected = arrays[f"prompt_{length}"], arrays[f"exact_{length}"]
            rows = run_dense(model, prompt)[arrays[f"positions_{length}"]]
            rounding = np.abs(arrays[f"logits_{length}"] - expected).max()
            np.testing.assert_allclose(rows, expected, rtol=0, atol=max(2e-6 * np.abs(expected).max(), 2 * rounding))
            assert InferenceEngine(model).generate(prompt, GREEDY) == arrays[f"greedy_{length}"].tolist()


def test_every_kind_has_a_model():
    seeded = [GOLDEN / "seeded" / name for name in SEEDED]  # test_seeded.py
    towers = [content for folder in [*TOWER_FOLDERS, *seeded] if "text_config" in (content := content_of(folder))]
    found = {content["architectures"][0] for content in towers}
    elsewhere = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}  # test_states.py
    elsewhere.add("Gemma3nForConditionalGeneration")  # test_residual_streams.py
    elsewhere.add("Llama4ForConditionalGeneration")  # test_chosen_experts.py
    elsewhere |= {"KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"}  # test_latent_networks.py
    assert found | elsewhere == set(TOWERS)


def test_names_of_both_versions_of_transformers(folder, tmp_path):
    """`language_model.model.`, `model.language_model.`, and in Qwen2.5-VL no prefix."""
    expected = run_dense(Transformer.from_pretrained(folder), np.arange(40, dtype=np.uint32))

    def newer(name):
        name = plain(name)
        if name.startswith("model."):
            return f"model.language_model.{name.removeprefix('model.')}"
        return name if name.startswith("lm_head") else f"model.{name}"

    def older(name):
        name = plain(name)
        return f"language_model.{name}" if name.startswith(("model.", "lm_head")) else name

    def plain(name):
        """Without the prefix of texts; other towers have no prefix."""
        for prefix in ("model.language_model.", "language_model.model."):
            if name.startswith(prefix):
                return f"model.{name.removeprefix(prefix)}"
        found = name.removeprefix("language_model.")
        return found.removeprefix("model.") if "vis" in found or "projector" in found else found

    for number, rename in enumerate((newer, older, plain)):
        found = Transformer.from_pretrained(copy(folder, tmp_path / str(number), rename))
        np.testing.assert_array_equal(run_dense(found, np.arange(40, dtype=np.uint32)), expected)


def test_tensors_of_no_tower_are_refused(folder, tmp_path):

    def rename(name):
        return name.replace("vision_tower", "hearing").replace("visual", "hearing")

    place = copy(folder, tmp_path / "x", rename)
    with pytest.raises(CheckpointError, match=r"expected no others, got the tensors (model\.)?hearing"):
        Transformer.from_pretrained(place)


def test_ends_and_ties_of_the_whole_network(folder):
    """They come before those of the text network, which are often a default that nobody wrote."""
    content = content_of(folder)
    text = content["text_config"] | {"eos_token_id": 1}
    assert ModelConfig.from_dict(content | {"text_config": text, "eos_token_id": [1, 106]}).eos_token_ids == (1, 106)
    assert ModelConfig.from_dict(content | {"text_config": text, "eos_token_id": None}).eos_token_ids == (1,)
    whole = {key: value for key, value in content.items() if key != "tie_word_embeddings"}
    for tied in (False, True):
        text["tie_word_embeddings"] = tied
        default = TOWERS[content["architectures"][0]].tied
        assert ModelConfig.from_dict(whole | {"text_config": text}).tie_word_embeddings == (default or tied)
    assert not ModelConfig.from_dict(whole | {"text_config": text, "tie_word_embeddings": False}).tie_word_embeddings
    quantised = {"quantization_config": {"quant_method": "none such"}}
    with pytest.raises(CheckpointError, match=r"quantization_config: expected .*, got quant_method 'none such'"):
        ModelConfig.from_dict(content | quantised)


def test_what_gemma_3_leaves_out():
    """The text network of Gemma 3 4B as it is published; the rest are defaults."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256,
    }
    config = ModelConfig.from_dict(published)
    sizes = (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim, config.max_position_embeddings)
    assert sizes == (262208, 8, 4, 256, 131072)
    assert (config.rope.factor, config.rope.theta, config.window_rope.theta) == (8.0, 1e6, 1e4)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (1, 106))
    assert ModelConfig.from_dict(published | {"architectures": None}) == config


def test_ministral_3_inside_mistral_3():
    """Both text networks come in the same class; a file that does not say which means the older one."""
    content = content_of(GOLDEN / "towers" / "mistral3")
    text = content["text_config"]
    config = ModelConfig.from_dict(content | {"text_config": text | {"model_type": "ministral3"}})
    assert config.architecture == "Ministral3ForCausalLM"
    del text["model_type"]
    assert ModelConfig.from_dict(content | {"text_config": text}).architecture == "MistralForCausalLM"


def test_qwen_2_5_vl_as_it_is_published():
    """Its configuration is flat, and its rotary embedding has a name of its own, which says nothing of a text."""
    content = content_of(GOLDEN / "towers" / "qwen2_5_vl")
    expected = ModelConfig.from_dict(content)
    text = content.pop("text_config")
    del text["model_type"]
    theta = text["rope_parameters"]["rope_theta"]
    older = {"rope_parameters": None, "rope_theta": theta}
    older["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    assert ModelConfig.from_dict(content | text | older) == expected
    with pytest.raises(CheckpointError, match="hidden_size: expected a positive whole number, got nothing"):
        ModelConfig.from_dict(content)


@pytest.mark.parametrize("folder", [GOLDEN / "towers" / "gemma3", GOLDEN / "towers" / "qwen3_vl"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config: expected an object, got None"),
        ({"text_config": [1]}, r"text_config: expected an object, got \[1\]"),
        ({"text_config": {"model_type": "gemma4_text"}}, "text_config.model_type: expected .*, got 'gemma4_text'"),
        ({"text_config": {"model_type": []}}, "hidden_size: expected .*, got nothing"),
        ({"text_config": {"model_type": ["x"]}}, r"text_config.model_type: expected .*, got \['x'\]"),
        (
            {"architectures": ["Gemma5ForConditionalGeneration"]},
            r"architectures: expected one of .*Gemma3For.*, got \['Gemma5ForConditionalGeneration'\]",
        ),
        ({"architectures": None, "model_type": "gemma5"}, "model_type: expected one of .*qwen3_vl, .*got 'gemma5'"),
    ],
)
def test_refused(folder, changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(content_of(folder) | changes)
