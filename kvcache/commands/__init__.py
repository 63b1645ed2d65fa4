"""The commands of `kvcache` that run a checkpoint of the user's own."""
