"""Runs untrusted programs in isolation."""
