"""GGUF files: metadata and tensors, block types, configuration, tokenizer."""

from kvcache.gguf.file import GgufFile, TensorInfo

__all__ = ["GgufFile", "TensorInfo"]
