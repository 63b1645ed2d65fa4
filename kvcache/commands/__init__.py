"""The commands of `python -m kvcache` that run a checkpoint of the user's own."""
