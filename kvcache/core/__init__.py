"""The bytes of blocks and the references on them: store, pool, heap, locks, attention over blocks."""
