"""What every room uses: kernels, the bytes of blocks, pool, heap, locks, arguments."""
