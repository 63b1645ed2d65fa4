"""kvcache: the KV-cache engine for LLM inference on CPUs."""
