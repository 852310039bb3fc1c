"""Measures speed, cost, robustness and what sharing is worth."""
