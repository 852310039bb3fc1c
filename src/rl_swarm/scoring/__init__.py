"""Scores untrusted text in processes of its own."""
