"""The golden networks as GGUF files, run by llama.cpp in float32; skipped where llama-cpp-python is not installed.

It shows that the files of these tests are what llama.cpp understands by them: row order, RoPE scaling, biases, norms.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf_files import STRING, convert
from places import GOLDEN

from kvcache.engine import InferenceEngine

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.no_level

MODELS = ("llama", "llama_biases", "llama_linear_tied_sharded_f16", "llama_llama3_bf16", "mistral_yarn", "qwen2",
          "qwen3_tied")  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, name):
    path = convert(GOLDEN / name, tmp_path / "x.gguf", tokenizer__ggml__model=(STRING, "none"))
    ids = np.random.default_rng(5).integers(0, 256, 300).tolist()
    options = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 1, "n_ctx": 512, "verbose": False}
    llama = llama_cpp.Llama(str(path), logits_all=True, **options)
    llama.eval(ids)
    engine = InferenceEngine.from_gguf(path)
    logits = np.array([engine.decode_step(token, i) for i, token in enumerate(ids)])
    # llama.cpp computes the angles of RoPE in float32.
    np.testing.assert_allclose(logits, llama.scores[: len(ids)], rtol=0, atol=1e-3)
