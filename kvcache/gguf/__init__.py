"""GGUF files: metadata and tensors, block types, vocabulary."""

from kvcache.gguf.file import GgufFile, TensorInfo

__all__ = ["GgufFile", "TensorInfo"]
