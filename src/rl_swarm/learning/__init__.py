"""Holds a model and makes it better: sampling, GRPO, memory, devices."""
