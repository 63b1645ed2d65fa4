"""The golden networks as GGUF files, run by llama.cpp in float32; skipped where llama-cpp-python is not installed.

It shows that the files of these tests are what llama.cpp understands by them: row order, RoPE scaling, biases, norms.
"""

from __future__ import annotations

import numpy as np
import pytest
from dense_runs import run_dense
from gguf_files import STRING, as_converted, convert
from places import GOLDEN

from kvcache.engine import Transformer

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.no_level

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# llama.cpp rounds the bounds of YaRN, gpt-oss does not; it has no output matrix in Gemma 2; its OLMo 3 has three layers
# with a window for one without.
CHANGES = {
    "gpt_oss": {"rope_parameters": DEFAULT_ROPE},
    "gemma2": {"tie_word_embeddings": True},
    "olmo3": {"layer_types": ["sliding_attention"] * 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, name):
    folder = as_converted(GOLDEN / name, tmp_path / name, **CHANGES.get(name, {}))
    path = convert(folder, tmp_path / "x.gguf", tokenizer__ggml__model=(STRING, "none"))
    ids = np.random.default_rng(5).integers(0, 256, 300)
    options = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 1, "n_ctx": 512, "verbose": False}
    llama = llama_cpp.Llama(str(path), logits_all=True, **options)
    llama.eval(ids.tolist())
    logits = run_dense(Transformer.from_pretrained(path), ids.astype(np.uint32))
    # llama.cpp computes the angles of RoPE in float32; its GELU is a table in float16.
    tolerance = 3e-2 if name.startswith("gemma") else 1e-3
    np.testing.assert_allclose(logits, llama.scores[: len(ids)], rtol=0, atol=tolerance)
