"""Networks: configurations, weights from checkpoints and GGUF files, and the forward pass."""
