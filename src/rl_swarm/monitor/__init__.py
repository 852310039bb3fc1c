"""Reads a swarm from outside, while it runs and afterwards."""
