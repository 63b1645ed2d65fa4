"""Sampling of tokens, the text that they spell, and the tokenizers and defaults of checkpoints."""
