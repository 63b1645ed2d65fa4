"""Adapters that peft writes: log-probabilities of a network beside one are those of peft, and of its merged network."""

import numpy as np
import pytest
import torch
from hf_models import make_model

from kvcache import InferenceEngine
from kvcache.networks.adapter_files import read_adapter
from kvcache.networks.config import ModelConfig

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.one_build
TOKENS = np.random.default_rng(0).integers(3, 61, 40)
EXACT = {"weights": "f32", "activations": "exact"}
# What `LoraConfig` takes; parts are the names of all projections.
SETTINGS = {
    "one factor": lambda parts: {"r": 4, "lora_alpha": 7, "target_modules": parts},
    "patterns": lambda parts: {
        "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": rf".*\.(self_attn|mlp)\.({'|'.join(parts)})",
        "rank_pattern": {"o_proj": 2, r"layers.1.self_attn.[qkv]\w+": 3}, "alpha_pattern": {r"^model.layers.0.*": 5},
    },
    "one layer": lambda parts: {
        "r": 3, "target_modules": parts, "layers_to_transform": [1], "exclude_modules": ["o_proj"],
    },
}


def scores(logits):
    rows = torch.log_softmax(logits[0, :-1].double(), -1)
    return rows[torch.arange(len(rows)), torch.tensor(TOKENS[1:])].numpy()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "phi3", "glm", "cohere", "gemma3_text", "gemma3n_text", "qwen2"])
def test_log_probabilities_are_those_of_peft(tmp_path, kind, settings):
    model = make_model(kind)
    model.save_pretrained(tmp_path / "base")
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    parts = sorted({name.rpartition(".")[2] for name in linear if ".self_attn." in name or ".mlp." in name})
    config = peft.LoraConfig(**SETTINGS[settings](parts), init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        want = scores(adapted(torch.tensor(TOKENS[None])).logits)
        with adapted.disable_adapter():
            without = scores(adapted(torch.tensor(TOKENS[None])).logits)
    engine = InferenceEngine.from_pretrained(tmp_path / "base", adapters={"x": tmp_path / "adapter"}, **EXACT)
    np.testing.assert_allclose(engine.score(TOKENS, adapter="x"), want, atol=2e-4)
    np.testing.assert_allclose(engine.score(TOKENS), without, atol=2e-4)
    assert np.abs(want - without).max() > 0.01


def test_an_activated_adapter(tmp_path):
    """It changes a text from the last invocation on."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM", alora_invocation_tokens=[5, 7],
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = TOKENS.copy()
    tokens[10:12] = tokens[20:22] = 5, 7
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor(tokens[None])).logits
    rows = torch.log_softmax(logits[0, :-1].double(), -1)
    want = rows[torch.arange(len(rows)), torch.tensor(tokens[1:])].numpy()
    engine = InferenceEngine.from_pretrained(tmp_path / "base", adapters={"x": tmp_path / "adapter"}, **EXACT)
    np.testing.assert_allclose(engine.score(tokens, adapter="x"), want, atol=2e-4)
    far = np.abs(engine.score(tokens) - want)
    assert far[:19].max() < 2e-4 < far[20:].max()


def test_what_peft_adds_beside_matrices_is_refused(tmp_path):
    """By the name of the setting, or of the tensor."""
    base = make_model("llama")
    base.save_pretrained(tmp_path / "base")
    config = ModelConfig.from_pretrained(tmp_path / "base")
    for number, (more, message) in enumerate((
        ({"use_dora": True}, "use_dora: expected none"), ({"bias": "lora_only"}, "bias: expected one of none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected none"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices: expected none"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"), ({"init_lora_weights": "olora"}, "init_lora"),
    )):
        settings = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | more)
        peft.get_peft_model(make_model("llama"), settings).save_pretrained(tmp_path / str(number))
        with pytest.raises(ValueError, match=message):
            read_adapter(tmp_path / str(number), config)
