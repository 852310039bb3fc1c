"""Computes sampling and training on a CPU."""
