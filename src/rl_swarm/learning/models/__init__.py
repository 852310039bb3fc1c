"""Holds the bundled models."""
