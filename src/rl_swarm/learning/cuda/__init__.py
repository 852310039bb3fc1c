"""Computes sampling and training on a GPU, in Triton kernels."""
