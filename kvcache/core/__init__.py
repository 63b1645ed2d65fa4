"""The bytes of blocks and who holds them: store, pool, heap, locks, attention over blocks."""
