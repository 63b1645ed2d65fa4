"""Small contents of config.json, one of each family that the tests of configurations use."""

from __future__ import annotations

from kvcache.engine import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}
MINISTRAL3 = {**LLAMA, "architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
OLMO3 = {**LLAMA, "architectures": ["Olmo3ForCausalLM"]}
GPT_OSS = {**LLAMA, "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2}
BAND = {"low_freq_factor": 4, "high_freq_factor": 3}


def parse(base, **changes):
    return ModelConfig.from_dict({**base, **changes})
