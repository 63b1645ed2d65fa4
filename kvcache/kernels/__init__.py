"""The kernels in C, as functions and classes over arrays: blocks, weight matrices, the steps of a network."""
