"""Plays the rounds of a node, and starts nodes."""
