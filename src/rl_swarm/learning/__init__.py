"""Samples from a model and trains it: GRPO, memory planning, devices."""
