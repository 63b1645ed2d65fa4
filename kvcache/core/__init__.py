"""The ground of every room: kernels, the bytes of blocks, pool, heap, locks, arguments."""
