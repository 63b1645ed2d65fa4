"""`PagedKvCache`: sequences in blocks, copy-on-write, eviction, attention."""
