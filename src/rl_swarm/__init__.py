"""Trains language models together by sharing rollouts."""

__version__ = "0.1.0"
