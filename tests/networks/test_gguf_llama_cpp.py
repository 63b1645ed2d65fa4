"""The golden networks as GGUF files, run by llama.cpp in float32; skipped where llama-cpp-python is not installed.

It shows that the files of these tests are what llama.cpp understands by them: row order, RoPE scaling, biases, norms.
"""

from __future__ import annotations

import latent_gguf
import numpy as np
import pytest
from bailing import twins
from dense_runs import run_dense
from gguf_files import ARRAY, CONVERTIBLE, I32, STRING, as_converted, convert
from places import GOLDEN
from seeded_weights import golden_folder, seeded

from kvcache.engine import ModelConfig, Transformer

llama_cpp = pytest.importorskip("llama_cpp")
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# llama.cpp rounds the bounds of YaRN, gpt-oss does not; it has no output matrix in Gemma 2; its OLMo 3 has three layers
# with a window for one without, and all layers of its Mellum have one base.
CHANGES = {
    "gpt_oss": {"rope_parameters": DEFAULT_ROPE},
    "gemma2": {"tie_word_embeddings": True},
    "olmo3": {"layer_types": ["sliding_attention"] * 2},
    "mellum": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), DEFAULT_ROPE)},
}
# Networks of transformers that llama.cpp has not: other biases, heads of other sizes, fewer KV heads; Phi-3.5-MoE,
# whose experts it chooses by a softmax; Gemma 3n, of which it knows networks of 30 and 35 layers alone; MiMo V2, whose
# windows have one token less there; those that its releases with a binding to Python do not have.
OTHERS = {
    "ernie4_5_biases", "seed_oss_biases", "exaone4_windows", "olmoe_normalised", "cohere2_biases", "hunyuan_biases",
    "starcoder2_window", "gemma_biases", "glm", "glm_no_biases", "cohere_norms",
    "dots1", "dots1_windows", "hunyuan_moe_biases", "afmoe_plain", "cohere2_moe_sum", "phimoe",
    "phimoe_longrope", "gemma3n", "gemma3n_streams", "hy_v3", "step3p7",
    "mimo_v2_flash", "mimo_v2_flash_groups",
}


def logits_of_both(path, ids):
    """The logits `(len(ids), vocab)` of this library and of llama.cpp, whose K and V are float32."""
    options = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 1, "n_ctx": 512, "verbose": False}
    llama = llama_cpp.Llama(str(path), logits_all=True, **options)
    llama.eval(ids.tolist())
    return run_dense(Transformer.from_pretrained(path), ids.astype(np.uint32)), llama.scores[: len(ids)]


@pytest.mark.parametrize("name", [name for name in CONVERTIBLE if name not in OTHERS])
def test_logits(tmp_path, name):
    folder = as_converted(golden_folder(name), tmp_path / name, **CHANGES.get(name, {}))
    path = convert(folder, tmp_path / "x.gguf", tokenizer__ggml__model=(STRING, "none"))
    # In longer texts of Gemma 4 the errors of llama.cpp's GELU grow, and choose another expert where two are near.
    seed, count = (0, 40) if name.startswith("gemma4") else (5, 256)
    ids = np.random.default_rng(seed).integers(0, ModelConfig.from_pretrained(folder).vocab_size, count)
    logits, theirs = logits_of_both(path, ids)
    # llama.cpp computes the angles of RoPE in float32; its GELU is a table in float16.
    tolerance = 1e-1 if name.startswith("gemma4") else 3e-2 if name.startswith(("gemma", "starcoder2")) else 1e-3
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_texts_of_towers(tmp_path, name):
    # llama.cpp turns a pair that is in no section by position 0; published sections leave none.
    more = {"tokenizer.ggml.model": (STRING, "none"), "qwen3vl.rope.dimension_sections": (ARRAY, [3, 3, 2, 0], I32)}
    path = convert(GOLDEN / "towers" / name, tmp_path / "x.gguf", **more)
    ids = np.random.default_rng(5).integers(0, 256, 200)
    logits, theirs = logits_of_both(path, ids)
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=5e-3)
    folder = Transformer.from_pretrained(GOLDEN / "towers" / name)
    np.testing.assert_allclose(logits, run_dense(folder, ids.astype(np.uint32)), rtol=0, atol=2e-5)


def test_ling(tmp_path):
    _, folder = twins(tmp_path, next_layer=True)
    path = convert(folder, tmp_path / "x.gguf", tokenizer__ggml__model=(STRING, "none"))
    ids = np.random.default_rng(5).integers(0, 96, 200)
    logits, theirs = logits_of_both(path, ids)
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu"])
def test_latent_attention(tmp_path, name):
    path = latent_gguf.convert(latent_gguf.as_converted(seeded(name), tmp_path / "folder"), tmp_path / "x.gguf")
    ids = np.random.default_rng(5).integers(0, 96, 200)
    logits, theirs = logits_of_both(path, ids)
    # llama.cpp's norms of latents have the eps of the others, 1e-5 in GLM-4.7-Flash; those of transformers 1e-6.
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-3 if "glm" in name else 1e-4)
